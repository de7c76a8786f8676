"""Agents can't fill the store with events: excess events are dropped, counted and announced once."""

from dataclasses import replace

from perseus.service.domain.inputs import AgentHeard, AgentLeft, FinishRequested, GpuErrorReported
from perseus.service.domain.model import GpuErrorReason, JobState
from perseus.service.job.event_rate_limit import MIN_CAPACITY, EventRateLimit
from perseus.v1 import event_pb2, job_pb2
from tests.service.job.machine_bench import FIRST, cluster_in
from tests.service.service_fakes import Cluster, make_spec


def count_of(cluster: Cluster, kind: event_pb2.JobEventType.ValueType) -> int:
    return sum(event.type == kind for event in cluster.events())


def test_a_bucket_empties_keeps_a_reserve_and_refills() -> None:
    budget = EventRateLimit(rank_count=0)
    budget.fill(0.0)
    reported = sum(budget.take(event_pb2.JOB_EVENT_TYPE_RANK_CHANGED) for _ in range(2 * MIN_CAPACITY))
    assert reported == 3 * MIN_CAPACITY // 4
    assert budget.take(event_pb2.JOB_EVENT_TYPE_STALLED), "events of the whole job have a reserve"
    assert budget.take(event_pb2.JOB_EVENT_TYPE_POLICY_SET)
    assert budget.fill(60.0) == 0, "the flood is over once the bucket is half full"
    assert budget.fill(3600.0) == 2 * MIN_CAPACITY - reported
    assert budget.fill(3600.0) == 0
    assert budget.take(event_pb2.JOB_EVENT_TYPE_RANK_CHANGED)
    budget.fill(1e9)
    assert sum(budget.take(event_pb2.JOB_EVENT_TYPE_STALLED) for _ in range(2 * MIN_CAPACITY)) == MIN_CAPACITY


def test_a_job_whose_gpus_keep_failing_announces_the_flood_twice_and_drops_the_rest() -> None:
    cluster = cluster_in(JobState.BASELINE)
    error = GpuErrorReported(FIRST, "GPU-0-0-0", GpuErrorReason.DRIVER_FAILED, "")
    count = 5 * MIN_CAPACITY
    errors = [replace(error, message=f"hostile {number} " + "x" * 900) for number in range(count)]
    for each in errors:
        cluster.send(each)
    reported = count_of(cluster, event_pb2.JOB_EVENT_TYPE_GPU_ERROR)
    assert reported < MIN_CAPACITY * 2
    assert [dropped.is_over for dropped in cluster.announced(event_pb2.EventsDropped)] == [False]
    cluster.now_s += 3600
    cluster.send(AgentHeard("agent-0"))
    cluster.send(AgentHeard("agent-0"))
    assert cluster.announced(event_pb2.EventsDropped)[1:] == [
        event_pb2.EventsDropped(dropped_count=count - reported, is_over=True)
    ]
    sequences = [event.sequence for event in cluster.events()]
    assert sequences == list(range(1, len(sequences) + 1)), "dropped events have no number"
    for each, is_forgotten in ((errors[-1024], False), (errors[-1025], True)):  # so many are remembered
        cluster.send(each)
        assert count_of(cluster, event_pb2.JOB_EVENT_TYPE_GPU_ERROR) == reported + is_forgotten


def test_an_agent_that_keeps_reconnecting_does_not_suppress_the_jobs_end() -> None:
    cluster = Cluster(make_spec())
    for _ in range(600):
        cluster.join_all()
        cluster.send(AgentLeft("agent-0"))
        cluster.send(AgentLeft("agent-1"))
    assert count_of(cluster, event_pb2.JOB_EVENT_TYPE_RANK_CHANGED) < 2 * MIN_CAPACITY
    cluster.send(FinishRequested())
    assert cluster.announced(event_pb2.StateChanged)[-1].after == job_pb2.JOB_STATE_FINISHED
