"""GPUs that change from outside while a job runs: power limits and profiles, clocks that others hold."""

import pytest

from perseus.service.api.translate_jobs import coordinates_from_proto
from perseus.service.domain.commands import FindProfile
from perseus.service.domain.inputs import AgentLeft, BaselineRequested, TelemetryArrived
from perseus.service.domain.model import JobState, Rank, RankFilter
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import ForeignClock, GpuLimits
from perseus.v1 import event_pb2
from tests.service.job.truthful_cluster import TruthfulCluster
from tests.service.service_fakes import batch

RANK = Coordinates(1, 0, 0)
LIMIT = GpuLimits(300.0)


def planned() -> TruthfulCluster:
    """Return a planned job whose GPUs all have a known power limit."""
    cluster = TruthfulCluster()
    set_limits(cluster, LIMIT)
    cluster.plan()
    cluster.run(10)
    cluster.expect(JobState.PLANNED)
    return cluster


def set_limits(cluster: TruthfulCluster, limits: GpuLimits) -> None:
    for rank in cluster.ranks.values():
        rank.limits = limits


def asked_keys(cluster: TruthfulCluster) -> list[tuple[str, ...]]:
    return [command.keys for command in cluster.history if isinstance(command, FindProfile)]


@pytest.mark.parametrize("limits", [GpuLimits(250.0), GpuLimits(300.0, (7,)), GpuLimits(0.0)])
def test_another_limit_or_profile_is_measured_anew_and_violates_no_prediction(limits: GpuLimits) -> None:
    cluster = planned()
    keys = asked_keys(cluster)[-1]
    set_limits(cluster, limits)
    cluster.work = lambda _stage: 1.2  # the first iteration under the limit is slower already
    cluster.run(1)
    cluster.expect(JobState.BASELINE)
    assert "under other limits: it is measured anew" in cluster.job().state_reason
    assert cluster.machine.run.profiler.profiles == ()
    changed = cluster.announced(event_pb2.GpuLimitsChanged)[-len(cluster.ranks) :]
    assert {coordinates_from_proto(each.rank) for each in changed} == set(cluster.ranks)
    assert {(each.before_power_limit_w, each.power_limit_w) for each in changed} == {
        (300.0, limits.power_limit_w)
    }
    assert {tuple(each.workload_power_profiles) for each in changed} == {limits.power_profiles}
    cluster.run_until(JobState.PLANNED)
    assert asked_keys(cluster)[-1] != keys, "it does not count as the same work on the same GPUs"
    cluster.run(20)
    assert cluster.announced(event_pb2.PredictionViolated) == []
    (_, rank), *_ = cluster.machine.run.ranks.select(RankFilter(), 0)
    assert rank.gpu is not None
    assert (rank.gpu.power_limit_w, rank.gpu.power_profiles) == limits


def test_a_limit_that_returns_has_its_earlier_key() -> None:
    cluster = planned()
    keys = asked_keys(cluster)[-1]
    set_limits(cluster, GpuLimits(250.0))
    cluster.run(1)
    cluster.run_until(JobState.PLANNED)
    set_limits(cluster, LIMIT)
    cluster.run(1)
    cluster.run_until(JobState.PLANNED)
    assert asked_keys(cluster)[-1] == keys


def test_less_than_a_watt_is_no_change() -> None:
    cluster = planned()
    set_limits(cluster, GpuLimits(300.4))
    cluster.run(5)
    cluster.expect(JobState.PLANNED)


def test_one_gpu_is_enough_and_it_may_change_while_its_job_is_profiled() -> None:
    cluster = TruthfulCluster()
    set_limits(cluster, LIMIT)
    cluster.join_all()
    cluster.run_until(JobState.PROFILING)
    cluster.ranks[RANK].limits = GpuLimits(200.0)
    cluster.run(1)
    cluster.expect(JobState.BASELINE)
    cluster.run_until(JobState.PLANNED)


def test_a_change_while_the_agent_was_away_is_seen_when_it_is_back() -> None:
    cluster = planned()
    cluster.restart()
    set_limits(cluster, GpuLimits(200.0))
    cluster.join_all()  # as before: their agents report the earlier limit
    cluster.run(1)
    cluster.expect(JobState.BASELINE)


def test_a_job_at_stock_stays_there_but_discards_old_measurements() -> None:
    cluster = planned()
    cluster.iterate(8, duration_s=5.0)
    cluster.expect(JobState.STOCK)
    set_limits(cluster, GpuLimits(200.0))
    cluster.run(2)
    cluster.expect(JobState.STOCK)
    assert cluster.machine.run.profiler.profiles == ()
    cluster.restart()
    assert cluster.machine.run.profiler.profiles == (), "the store has forgotten them, too"


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


def test_a_foreign_clock_is_announced_once_when_it_begins_and_when_it_ends() -> None:
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


def test_telemetry_without_iterations_says_nothing_about_a_foreign_clock() -> None:
    cluster = with_foreign_clock()
    rank = cluster.ranks[RANK]
    cluster.send(
        TelemetryArrived(RANK, rank.instance_id, batch(rank.sequence + 1, [], rank.in_force.version, 1.0))
    )
    assert rank_of(cluster).foreign_clock == CLOCK


def test_a_foreign_clock_outlasts_a_restart_without_another_event() -> None:
    cluster = with_foreign_clock()
    count = len(messages(cluster))
    cluster.restart()
    cluster.join_all()
    cluster.run(3)
    assert rank_of(cluster).foreign_clock == CLOCK
    assert len(messages(cluster)) == count


def test_a_foreign_clock_ends_with_its_rank() -> None:
    cluster = with_foreign_clock()
    cluster.send(AgentLeft(cluster.ranks[RANK].instance_id))
    assert rank_of(cluster).foreign_clock is None
    assert messages(cluster)[-1].endswith("any more")


def test_a_foreign_clock_that_shows_only_after_the_baseline_held_the_gpu_meanwhile() -> None:
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


def permit_again(cluster: TruthfulCluster) -> None:
    """Let a planned job profile more: an agent that may not set clocks is followed by one that may."""
    cluster.send(cluster.ranks[RANK].lose_permission())
    cluster.run_until(JobState.PLANNED)
    cluster.send(AgentLeft(cluster.ranks[RANK].instance_id))
    lost, other = (rank for place, rank in cluster.ranks.items() if place.pipeline == RANK.pipeline)
    for rank in (lost, other):
        rank.instance_id, rank.is_permitted = "agent-new", True
        rank.start_trainer(rank.iteration)
    cluster.send(lost.joined())
    cluster.machine.run.profiler.forget()  # so that there is something to be profiled
    cluster.send(other.joined())
    cluster.expect(JobState.PROFILING)


@pytest.mark.parametrize("has_planned", [False, True])
def test_only_a_baseline_that_no_plan_has_followed_was_measured_under_a_foreign_clock(
    *, has_planned: bool
) -> None:
    cluster = TruthfulCluster()
    if has_planned:
        cluster.plan()
        cluster.run(10)
        permit_again(cluster)
    else:
        cluster.join_all()
        cluster.run_until(JobState.PROFILING)
        cluster.machine.run.log.latest_baseline = None  # none of its iterations was fit for a report
    cluster.ranks[RANK].foreign_clock = ForeignClock(705, 0)
    cluster.run(1)
    cluster.expect(JobState.PROFILING)
    assert not any(period.is_wrong for period in cluster.machine.run.log.periods)


def test_no_stock_baseline_is_measured_under_a_foreign_clock() -> None:
    cluster = with_foreign_clock()
    cluster.send(BaselineRequested("request"))
    cluster.run(100)
    cluster.expect(JobState.BASELINE)
    reason = f"another client of the driver holds the clock of {RANK}"
    assert cluster.job().state_reason.endswith(f"; stock is measured once this has passed: {reason}")
    cluster.ranks[RANK].foreign_clock = None
    cluster.run_until(JobState.PLANNED)
