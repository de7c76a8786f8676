"""GPUs that change from outside while a job runs: limits, clocks that others hold or that are not reached."""

from dataclasses import replace

import pytest

from perseus.service.api.translate_jobs import coordinates_from_proto
from perseus.service.domain.commands import FindProfile, Solve
from perseus.service.domain.inputs import AgentLeft, BaselineRequested, TelemetryArrived
from perseus.service.domain.model import JobState, PlannedClocks, Rank, RankFilter
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import ForeignClock, GpuLimits, IterationColumns
from perseus.service.job.planning.caps import Cap, CapWatch
from perseus.service.job.retry_delay import INITIAL_DELAY_S, MAX_DELAY_S
from perseus.v1 import event_pb2
from tests.service.frontiers import FRONTIER
from tests.service.job.clusters import TruthfulCluster
from tests.service.service_fakes import CLOCKS_MHZ, batch

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


@pytest.mark.usefixtures("stock_beside_plans")
def test_a_job_at_stock_stays_there_but_discards_old_measurements() -> None:
    cluster = planned()
    cluster.plan_delay_s = 1.0
    cluster.run_until(JobState.STOCK)
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


def test_without_a_known_baseline_none_is_refuted() -> None:
    cluster = TruthfulCluster()
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


# ---------------------------------------------------------------------- clocks that GPUs do not reach


CAPPED = Coordinates(0, 1, 0)
USABLE_MHZ = (CLOCKS_MHZ, CLOCKS_MHZ)


def rows(*clocks_mhz: int, reasons: int = 0x4) -> IterationColumns:
    return batch(1, range(len(clocks_mhz)), 1, 1.0).iterations._replace(
        clock_event_reasons=[reasons if mhz else 0 for mhz in clocks_mhz], capped_clock_mhz=list(clocks_mhz)
    )


def all_at(clock_mhz: int) -> list[PlannedClocks]:
    """A pipeline's plan with one clock for all computations."""
    plan = FRONTIER.baseline
    stages = tuple(tuple(each._replace(clock_mhz=clock_mhz) for each in stage) for stage in plan.stages)
    return [PlannedClocks(replace(plan, stages=stages))]


def test_a_rank_that_was_capped_in_all_its_latest_iterations_explains_slowness() -> None:
    caps = CapWatch(5)
    caps.take(CAPPED, rows(1250, 1200, 1230, 1210))
    assert caps.explain(all_at(1400), USABLE_MHZ, ()) == ()
    caps.take(CAPPED, rows(1240, reasons=0x44))
    assert caps.explain(all_at(1400), USABLE_MHZ, ()) == (Cap(CAPPED, 1200, 1400, 0x44),)
    assert caps.explain(all_at(1200), USABLE_MHZ, ()) == (), "its plan needs no more"
    assert caps.explain(all_at(1400), USABLE_MHZ, {0}) != ()
    assert caps.explain([*all_at(1400), *all_at(1400)], USABLE_MHZ, {1}) == (), "another pipeline is slow"
    caps.take(CAPPED, rows(0))
    assert caps.explain(all_at(1400), USABLE_MHZ, ()) == ()


def test_harmless_reasons_and_agents_without_a_reported_clock_explain_nothing() -> None:
    caps = CapWatch(5)
    caps.take(CAPPED, rows(*[1200] * 8, reasons=0x1))
    caps.take(Coordinates(0, 0, 0), rows(*[1200] * 8)._replace(capped_clock_mhz=()))
    assert caps.explain(all_at(1400), USABLE_MHZ, ()) == ()


def test_the_two_lowest_clocks_are_never_excluded() -> None:
    caps = CapWatch(5)
    caps.take(CAPPED, rows(*[500] * 5))
    assert caps.explain(all_at(CLOCKS_MHZ[-2]), USABLE_MHZ, ()) == ()
    assert caps.explain(all_at(CLOCKS_MHZ[-3]), USABLE_MHZ, ()) != ()


def test_clocks_are_tried_again_after_twice_as_long_every_time() -> None:
    caps, now_s, held_s = CapWatch(5), 0.0, []
    assert not caps.is_over(1e9)
    for _ in range(8):
        held_s.append(caps.hold(now_s))
        assert not caps.is_over(now_s + held_s[-1] - 0.1)
        now_s += held_s[-1]
        assert caps.is_over(now_s)
        assert not caps.is_over(now_s), "once"
    assert held_s[:3] == [INITIAL_DELAY_S, 2 * INITIAL_DELAY_S, 4 * INITIAL_DELAY_S]
    assert held_s[-1] == MAX_DELAY_S
    caps.restart()
    assert caps.hold(now_s) == INITIAL_DELAY_S


# ---------------------------------------------------------------------- in the machine


def solved_clocks_mhz(cluster: TruthfulCluster, stage: int) -> set[int]:
    """Return the clocks that the latest problem was solved with."""
    problem = [command.problem for command in cluster.history if isinstance(command, Solve)][-1]
    return {m.clock_mhz for (at, _, _), some in problem.profiles.items() if at == stage for m in some}


def cap_stage(cluster: TruthfulCluster, stage: int, clock_mhz: int | None) -> None:
    for place in cluster.ranks:
        if place.stage == stage:
            cluster.caps_mhz.pop(place, None)
            if clock_mhz is not None:
                cluster.caps_mhz[place] = clock_mhz


@pytest.mark.parametrize("reached_mhz", [1100, 1300])
def test_clocks_that_are_not_reached_are_not_profiled_for_long(reached_mhz: int) -> None:
    cluster = TruthfulCluster()
    cap_stage(cluster, 0, reached_mhz)
    cluster.plan()
    assert solved_clocks_mhz(cluster, 0) == {mhz for mhz in CLOCKS_MHZ if mhz <= reached_mhz}
    assert max(solved_clocks_mhz(cluster, 1)) == 1400
    assert {each.clock_mhz for each in cluster.announced(event_pb2.ClockCapped)} == {reached_mhz}
    assert cluster.announced(event_pb2.ClockGivenUp) == []
    cluster.run(30)
    cluster.expect(JobState.PLANNED)


@pytest.mark.usefixtures("stock_beside_plans")
@pytest.mark.parametrize(("reached_mhz", "state"), [(1300, JobState.PLANNED), (1350, JobState.STOCK)])
def test_gpus_that_are_always_under_their_power_cap_keep_plans_only_if_they_reach_a_clock_exactly(
    reached_mhz: int, state: JobState
) -> None:
    """Large GPUs are always under their power cap at the highest clocks.

    Wanted are plans in both cases. Clocks above the cap are excluded, so if it is between two clocks, every
    plan is slower than stock, which the guard takes for a violated prediction without an explanation.
    """
    cluster = TruthfulCluster()
    for stage in range(2):
        cap_stage(cluster, stage, reached_mhz)
    cluster.plan()
    assert {each.clock_mhz for each in cluster.announced(event_pb2.ClockCapped)} == {reached_mhz}
    assert max(solved_clocks_mhz(cluster, 0) | solved_clocks_mhz(cluster, 1)) == 1300
    cluster.run(40)
    cluster.expect(state)
    assert bool(cluster.announced(event_pb2.PredictionViolated)) == (state is JobState.STOCK)


@pytest.mark.usefixtures("stock_beside_plans")
@pytest.mark.parametrize("is_restarted", [False, True])
def test_clocks_are_planned_on_again_once_the_cap_has_gone(*, is_restarted: bool) -> None:
    cluster = TruthfulCluster().plan()
    cap_stage(cluster, 0, 1100)
    cluster.run_until(JobState.BASELINE, 200)
    cluster.run_until(JobState.PLANNED)
    if is_restarted:
        cluster.restart()
        cluster.join_all()
        ranks = [rank for _, rank in cluster.machine.run.ranks.select(RankFilter(stage=0))]
        assert {rank.capped_clock_mhz for rank in ranks} == {1100}
    cap_stage(cluster, 0, None)
    cluster.run(100)
    cluster.expect(JobState.PLANNED)
    assert max(solved_clocks_mhz(cluster, 0)) == 1400
    assert {rank.capped_clock_mhz for _, rank in cluster.machine.run.ranks.select(RankFilter(), 0)} == {0}
