"""A GPU whose clock another client of the driver holds, as its agent reports it."""

import pytest

from perseus.service.domain.inputs import AgentLeft, BaselineRequested, TelemetryArrived
from perseus.service.domain.model import JobState, Rank
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import ForeignClock
from perseus.v1 import event_pb2
from tests.service.job.truthful_cluster import TruthfulCluster
from tests.service.service_fakes import batch

RANK = Coordinates(1, 0, 0)
CLOCK = ForeignClock(705, 1200)


def messages(cluster: TruthfulCluster) -> list[str]:
    return [
        event.message for event in cluster.events() if event.type == event_pb2.JOB_EVENT_TYPE_FOREIGN_CLOCK
    ]


def rank_of(cluster: TruthfulCluster) -> Rank:
    return cluster.machine.run.ranks[RANK]


def with_foreign_clock() -> TruthfulCluster:
    cluster = TruthfulCluster()
    cluster.plan()
    cluster.run(10)
    cluster.ranks[RANK].foreign_clock = CLOCK
    cluster.run(3)
    assert rank_of(cluster).foreign_clock == CLOCK
    return cluster


def test_it_is_announced_once_when_it_begins_and_when_it_ends() -> None:
    cluster = with_foreign_clock()
    gpu = rank_of(cluster).gpu
    assert gpu is not None
    cluster.ranks[RANK].foreign_clock = ForeignClock(705, 0)
    cluster.run(3)
    cluster.ranks[RANK].foreign_clock = None
    cluster.run(3)
    assert messages(cluster) == [
        f"{RANK}: {gpu.uuid} runs at 705 MHz, wanted 1200 MHz: another client of the driver holds it",
        f"{RANK}: {gpu.uuid} runs at 705 MHz, wanted stock: another client of the driver holds it",
        f"{RANK}: no other client of the driver is known to hold the clock of {gpu.uuid} any more",
    ]
    first, _, last = cluster.announced(event_pb2.ForeignClockChanged)
    assert (first.gpu_uuid, first.foreign_clock.clock_mhz, first.foreign_clock.wanted_clock_mhz) == (
        gpu.uuid,
        705,
        1200,
    )
    assert not last.HasField("foreign_clock")
    cluster.expect(JobState.PLANNED)


def test_telemetry_without_iterations_says_nothing_about_it() -> None:
    cluster = with_foreign_clock()
    rank = cluster.ranks[RANK]
    cluster.send(
        TelemetryArrived(RANK, rank.instance_id, batch(rank.sequence + 1, [], rank.in_force.version, 1.0))
    )
    assert rank_of(cluster).foreign_clock == CLOCK


def test_it_outlasts_a_restart_without_another_event() -> None:
    cluster = with_foreign_clock()
    count = len(messages(cluster))
    cluster.restart()
    for rank in cluster.ranks.values():
        cluster.send(rank.joined())
    cluster.run(3)
    assert rank_of(cluster).foreign_clock == CLOCK
    assert len(messages(cluster)) == count


def test_it_ends_with_the_rank() -> None:
    cluster = with_foreign_clock()
    cluster.send(AgentLeft(cluster.ranks[RANK].instance_id))
    assert rank_of(cluster).foreign_clock is None
    assert messages(cluster)[-1].endswith("any more")


def test_one_that_shows_only_after_the_baseline_held_the_gpu_meanwhile() -> None:
    cluster = TruthfulCluster()
    cluster.join_all()
    cluster.run_until(JobState.PROFILING)
    cluster.ranks[RANK].foreign_clock = ForeignClock(705, 0)
    cluster.run(3)
    cluster.expect(JobState.BASELINE)
    log = cluster.machine.run.log
    assert log.latest_baseline is not None
    assert log.latest_baseline.is_wrong
    cluster.ranks[RANK].foreign_clock = None
    cluster.run_until(JobState.PLANNED)
    assert log.latest_baseline is not None
    assert not log.latest_baseline.is_wrong


@pytest.mark.parametrize("has_planned", [False, True])
def test_only_a_baseline_that_no_plan_has_followed_was_measured_meanwhile(*, has_planned: bool) -> None:
    cluster = TruthfulCluster()
    if has_planned:
        cluster.plan()
        cluster.run(10)
        cluster.machine.run.profiler.forget()
        cluster.machine._lifecycle.profile_more("of the test")
    else:
        cluster.join_all()
        cluster.run_until(JobState.PROFILING)
        cluster.machine.run.log.latest_baseline = None  # none of its iterations was fit for a report
    cluster.ranks[RANK].foreign_clock = ForeignClock(705, 0)
    cluster.run(1)
    cluster.expect(JobState.PROFILING)
    assert not any(period.is_wrong for period in cluster.machine.run.log.periods)


def test_no_stock_baseline_is_measured_meanwhile() -> None:
    cluster = with_foreign_clock()
    cluster.send(BaselineRequested("request"))
    cluster.run(100)
    cluster.expect(JobState.BASELINE)
    reason = f"another client of the driver holds the clock of {RANK}"
    assert cluster.job().state_reason.endswith(f"; stock is measured once this has passed: {reason}")
    cluster.ranks[RANK].foreign_clock = None
    cluster.run_until(JobState.PLANNED)
