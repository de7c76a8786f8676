"""The job's state machine by its exact commands, when the coordinator is restarted."""

from perseus.service.domain.inputs import StragglerCleared, StragglerReported
from perseus.service.domain.model import JobState, Straggler
from perseus.v1 import event_pb2
from tests.service.job.machine_bench import measured_clocks_mhz, planned
from tests.service.service_fakes import Cluster, make_spec


def test_a_restarted_coordinator_continues_with_the_same_versions_and_offers_nothing() -> None:
    cluster = planned()
    cluster.send(StragglerReported(Straggler(0, slowdown_factor=1.2)))
    cluster.iterate(3)
    before, sent = cluster.machine, list(cluster.offered_versions)
    cluster.restart()
    assert cluster.machine is not before
    cluster.expect(JobState.PLANNED)
    cluster.join_all()
    cluster.iterate(3)
    assert cluster.offered_versions == sent
    cluster.send(StragglerCleared(0))
    assert cluster.offered_versions[-1] > max(sent)


def test_a_coordinator_restarted_while_profiling_keeps_its_measurements() -> None:
    cluster = Cluster(make_spec())
    cluster.join_all()
    cluster.iterate(12)
    measured = measured_clocks_mhz(cluster)
    assert measured
    cluster.restart()
    cluster.join_all()
    assert measured_clocks_mhz(cluster) == measured
    cluster.iterate_until(JobState.PLANNED)
    profiled = [tuple(found.clocks_mhz) for found in cluster.announced(event_pb2.ClockProfiled)]
    assert len(profiled) == len(set(profiled)) == len(measured_clocks_mhz(cluster))


def reported_in_force(cluster: Cluster) -> list[int]:
    """Return the versions announced as in force on a pipeline."""
    return [
        event.pipeline_clocks.version
        for event in cluster.events()
        if event.type == event_pb2.JOB_EVENT_TYPE_PLAN_IN_FORCE
    ]


def test_clocks_offered_before_a_restart_and_in_force_after_it_are_announced_once() -> None:
    cluster = Cluster(make_spec())
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    version = max(cluster.offered_versions)
    assert version not in reported_in_force(cluster)
    cluster.restart()
    cluster.join_all()
    cluster.iterate(4)
    cluster.restart()
    cluster.join_all()
    cluster.iterate(2)
    cluster.expect_in_force()
    assert reported_in_force(cluster).count(version) == cluster.spec.parallelism.pipeline_count


def test_events_are_numbered_without_gaps_across_restarts() -> None:
    cluster = planned()
    cluster.restart()
    cluster.join_all()
    sequences = [event.sequence for event in cluster.events()]
    assert sequences == list(range(1, len(sequences) + 1))
