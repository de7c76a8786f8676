"""Clocks that GPUs do not reach: detected when they cost time, excluded, and tried again."""

from dataclasses import replace

import pytest

from perseus.service.api.translate_jobs import coordinates_from_proto
from perseus.service.domain.commands import Solve
from perseus.service.domain.model import JobState, PlannedClocks, RankFilter
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import IterationColumns
from perseus.service.job.planning.caps import Cap, CapWatch
from perseus.service.job.retry_delay import INITIAL_DELAY_S, MAX_DELAY_S
from perseus.v1 import event_pb2
from tests.service.frontiers import FRONTIER
from tests.service.job.truthful_cluster import TruthfulCluster
from tests.service.service_fakes import CLOCKS_MHZ, batch

RANK = Coordinates(0, 1, 0)
USABLE_MHZ = (CLOCKS_MHZ, CLOCKS_MHZ)


def rows(*clocks_mhz: int, reasons: int = 0x4) -> IterationColumns:
    return batch(1, range(len(clocks_mhz)), 1, 1.0).iterations._replace(
        clock_event_reasons=[reasons if mhz else 0 for mhz in clocks_mhz], capped_clock_mhz=list(clocks_mhz)
    )


def planned(clock_mhz: int) -> list[PlannedClocks]:
    """A pipeline's plan with one clock for all computations."""
    plan = FRONTIER.baseline
    stages = tuple(tuple(each._replace(clock_mhz=clock_mhz) for each in stage) for stage in plan.stages)
    return [PlannedClocks(replace(plan, stages=stages))]


def test_a_rank_that_was_capped_in_all_its_latest_iterations_explains_slowness() -> None:
    caps = CapWatch(5)
    caps.take(RANK, rows(1250, 1200, 1230, 1210))
    assert caps.explain(planned(1400), USABLE_MHZ, ()) == ()
    caps.take(RANK, rows(1240, reasons=0x44))
    assert caps.explain(planned(1400), USABLE_MHZ, ()) == (Cap(RANK, 1200, 1400, 0x44),)
    assert caps.explain(planned(1200), USABLE_MHZ, ()) == (), "its plan needs no more"
    assert caps.explain(planned(1400), USABLE_MHZ, {0}) != ()
    assert caps.explain([*planned(1400), *planned(1400)], USABLE_MHZ, {1}) == (), "another pipeline is slow"
    caps.take(RANK, rows(0))
    assert caps.explain(planned(1400), USABLE_MHZ, ()) == ()


def test_harmless_reasons_and_agents_without_a_reported_clock_explain_nothing() -> None:
    caps = CapWatch(5)
    caps.take(RANK, rows(*[1200] * 8, reasons=0x1))
    caps.take(Coordinates(0, 0, 0), rows(*[1200] * 8)._replace(capped_clock_mhz=()))
    assert caps.explain(planned(1400), USABLE_MHZ, ()) == ()


def test_the_two_lowest_clocks_are_never_excluded() -> None:
    caps = CapWatch(5)
    caps.take(RANK, rows(*[500] * 5))
    assert caps.explain(planned(CLOCKS_MHZ[-2]), USABLE_MHZ, ()) == ()
    assert caps.explain(planned(CLOCKS_MHZ[-3]), USABLE_MHZ, ()) != ()


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


def test_a_cap_on_all_pipelines_is_planned_around_instead_of_violating_a_prediction() -> None:
    cluster = TruthfulCluster().plan()
    cluster.run(10)
    before = cluster.job()
    cap_stage(cluster, 0, 1100)
    cluster.run_until(JobState.BASELINE)
    capped = cluster.announced(event_pb2.ClockCapped)
    assert {
        (coordinates_from_proto(each.rank), each.clock_mhz, each.planned_clock_mhz) for each in capped
    } == {(place, 1100, 1400) for place in cluster.ranks if place.stage == 0}
    assert {each.clock_event_reasons for each in capped} == {0x4}
    cluster.run_until(JobState.PLANNED)
    assert solved_clocks_mhz(cluster, 0) == {1100, 1000, 900}
    assert max(solved_clocks_mhz(cluster, 1)) == 1400
    after = cluster.job()
    assert after.t_min_s > 1.1 * before.t_min_s, "the clocks that the GPUs reach"
    assert after.baseline.iteration_time_s > 1.1 * before.baseline.iteration_time_s, "stock is no faster"
    cluster.run(100)
    cluster.expect(JobState.PLANNED)
    assert cluster.announced(event_pb2.PredictionViolated) == []
    assert cluster.machine.run.offers.planned_times_s == (after.t_min_s,) * 2


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
    cluster.run(20)
    assert max(solved_clocks_mhz(cluster, 0)) == 1100
    cluster.now_s += INITIAL_DELAY_S
    cluster.run(2)
    cluster.expect(JobState.BASELINE)
    cluster.run_until(JobState.PLANNED)
    cluster.run(3)
    assert max(solved_clocks_mhz(cluster, 0)) == 1400
    assert {rank.capped_clock_mhz for _, rank in cluster.machine.run.ranks.select(RankFilter(), 0)} == {0}
