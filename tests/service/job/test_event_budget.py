"""Agents can't fill the store with events: excess events are dropped, counted and announced once."""

from dataclasses import replace
from typing import TypeVar

from perseus.service.domain.inputs import AgentHeard, AgentLeft, FinishRequested, GpuErrorReported
from perseus.service.domain.model import GpuErrorReason
from perseus.service.domain.specification import Coordinates
from perseus.service.job.event_rate_limit import _MIN_CAPACITY, EventRateLimit
from perseus.service.job.ranks.rank_table import _MAX_GPU_ERRORS
from perseus.v1 import event_pb2, job_pb2
from tests.service.service_fakes import Cluster, make_spec

FIRST = Coordinates(0, 0, 0)

E = TypeVar("E")


def count_of(cluster: Cluster, kind: event_pb2.JobEventType.ValueType) -> int:
    return sum(event.type == kind for event in cluster.events())


def test_a_bucket_empties_keeps_a_reserve_and_refills() -> None:
    budget = EventRateLimit(rank_count=0)
    budget.fill(0.0)
    reported = sum(budget.take(event_pb2.JOB_EVENT_TYPE_RANK_CHANGED) for _ in range(2 * _MIN_CAPACITY))
    assert reported == 3 * _MIN_CAPACITY // 4
    assert budget.take(event_pb2.JOB_EVENT_TYPE_STALLED), "events of the whole job have a reserve"
    assert budget.take(event_pb2.JOB_EVENT_TYPE_POLICY_SET)
    assert budget.fill(60.0) == 0, "the flood is over once the bucket is half full"
    assert budget.fill(3600.0) == 2 * _MIN_CAPACITY - reported
    assert budget.fill(3600.0) == 0
    assert budget.take(event_pb2.JOB_EVENT_TYPE_RANK_CHANGED)
    budget.fill(1e9)
    assert (
        sum(budget.take(event_pb2.JOB_EVENT_TYPE_STALLED) for _ in range(2 * _MIN_CAPACITY)) == _MIN_CAPACITY
    )


def test_a_job_whose_gpus_keep_failing_announces_the_flood_twice_and_drops_the_rest() -> None:
    cluster = Cluster(make_spec())
    cluster.join_all()
    error = GpuErrorReported(FIRST, "GPU-0-0-0", GpuErrorReason.DRIVER_FAILED, "")
    count = 5 * _MIN_CAPACITY
    for number in range(count):
        cluster.send(replace(error, message=f"hostile {number} " + "x" * 900))
    reported = count_of(cluster, event_pb2.JOB_EVENT_TYPE_GPU_ERROR)
    assert reported < _MIN_CAPACITY * 2
    assert [dropped.is_over for dropped in cluster.announced(event_pb2.EventsDropped)] == [False]
    assert len(cluster.machine.run.ranks._gpu_errors) == _MAX_GPU_ERRORS
    cluster.now_s += 3600
    cluster.send(AgentHeard("agent-0"))
    cluster.send(AgentHeard("agent-0"))
    assert cluster.announced(event_pb2.EventsDropped)[1:] == [
        event_pb2.EventsDropped(dropped_count=count - reported, is_over=True)
    ]
    sequences = [event.sequence for event in cluster.events()]
    assert sequences == list(range(1, len(sequences) + 1)), "dropped events have no number"


def test_an_agent_that_keeps_reconnecting_does_not_suppress_the_jobs_end() -> None:
    cluster = Cluster(make_spec())
    for _ in range(600):
        cluster.join_all()
        cluster.send(AgentLeft("agent-0"))
        cluster.send(AgentLeft("agent-1"))
    assert count_of(cluster, event_pb2.JOB_EVENT_TYPE_RANK_CHANGED) < 2 * _MIN_CAPACITY
    cluster.send(FinishRequested())
    assert cluster.announced(event_pb2.StateChanged)[-1].after == job_pb2.JOB_STATE_FINISHED
