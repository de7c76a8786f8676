"""Frontiers for GPUs whose clock takes a while to set."""

from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import Frontier, Pipeline, Plan, SolverError, replay, replay_with_latency, solve
from perseus.solver.dwelled_plans import dwelled_count
from tests.solver.pipelines import little_search, pipelines, published_pipeline, small_pipeline

MAX_SLOWDOWN = 1.002 + 1e-9


def shortest_run_s(plan: Plan) -> float:
    """The shortest time that a clock is kept, except those at the iteration's end."""
    shortest_s = float("inf")
    for stage in plan.stages:
        starts_s = [next(run).start_s for _, run in groupby(stage, key=lambda planned: planned.clock_mhz)]
        for earlier_s, later_s in pairwise(starts_s):
            shortest_s = min(shortest_s, later_s - earlier_s)
    return shortest_s


def check_points(frontier: Frontier, latency_s: float) -> None:
    """No point is late, with the latency or without; slower ones cost less, and look-ups return them
    unchanged.

    If the all-highest plan itself is late, because highest clocks differ within a stage, no other is later.
    """
    baseline_late_s = replay_with_latency(frontier.pipeline, frontier.baseline, latency_s).iteration_time_s
    assert frontier.set_latency_s == latency_s
    assert frontier.points[0].deadline_s == frontier.t_min_s
    assert frontier.points[-1].deadline_s == pytest.approx(frontier.t_slow_s, rel=1e-12)
    assert frontier.points[frontier.t_star_index].deadline_s == frontier.t_star_s
    for earlier, later in pairwise(frontier.points):
        assert earlier.deadline_s < later.deadline_s
        assert earlier.iteration_time_s <= later.iteration_time_s
        assert earlier.effective_energy_j >= later.effective_energy_j
    for point in frontier.points:
        plan = frontier.plan_within(point.deadline_s)
        assert plan.iteration_time_s <= point.deadline_s
        assert plan.clocks_mhz == replay(frontier.pipeline, plan.clocks_mhz).clocks_mhz
        if plan.iteration_time_s >= frontier.baseline.iteration_time_s:
            late = replay_with_latency(frontier.pipeline, plan, latency_s)
            assert late.iteration_time_s <= max(MAX_SLOWDOWN * plan.iteration_time_s, baseline_late_s)


@pytest.mark.slow("each example is a frontier, dwelled point by point")
@given(pipelines(), st.floats(0.0, 3.0), st.floats(0.0, 1.0))
@little_search()
def test_no_plan_is_late_on_random_pipelines(pipeline: Pipeline, latencies: float, where: float) -> None:
    """Latencies range from none to three times the longest computation.

    Times may rise with the clock: if the highest clocks are not the fastest, there may be no plan in time.
    """
    longest_s = max(m.time_s for some in pipeline.profiles.values() for m in some)
    latency_s = latencies * longest_s
    frontier = solve(pipeline, point_count=4, set_latency_s=latency_s)
    check_points(frontier, latency_s)
    time_s = frontier.t_min_s + where * (frontier.t_slow_s - frontier.t_min_s)
    plan = frontier.plan(time_s)
    assert plan.iteration_time_s <= time_s + 1e-9
    if plan.iteration_time_s >= frontier.baseline.iteration_time_s:
        late = replay_with_latency(pipeline, plan, latency_s)
        baseline_late = replay_with_latency(pipeline, frontier.baseline, latency_s)
        assert late.iteration_time_s <= max(
            MAX_SLOWDOWN * plan.iteration_time_s, baseline_late.iteration_time_s
        )


def test_without_latency_nothing_changes() -> None:
    pipeline = small_pipeline()
    frontier, other = solve(pipeline), solve(pipeline, set_latency_s=0.0)
    assert frontier.points == other.points
    assert frontier.set_latency_s == 0.0
    assert all(point.latency_cost_j == 0.0 for point in frontier.points)


def test_latency_that_is_small_against_computations_changes_no_plan() -> None:
    pipeline = published_pipeline("a100-sxm", 12)
    instant, kept = (solve(pipeline, point_count=8, set_latency_s=latency_s) for latency_s in (0.0, 0.001))
    assert kept.plan_within(kept.t_min_s).clocks_mhz == instant.plan_within(instant.t_min_s).clocks_mhz
    assert 0 < kept.points[0].latency_cost_percent < 0.1


@pytest.mark.slow("twenty plans of the published model are dwelled")
def test_latency_that_is_large_against_computations_makes_them_share_clocks() -> None:
    pipeline = published_pipeline("a100-sxm", 12)
    latency_s = 0.2
    instant, kept = solve(pipeline, point_count=20), solve(pipeline, point_count=20, set_latency_s=latency_s)
    check_points(kept, latency_s)
    plan = kept.plan_within(kept.t_min_s)
    assert shortest_run_s(instant.plan_within(instant.t_min_s)) < 2 * latency_s <= shortest_run_s(plan)
    assert plan.iteration_time_s <= instant.t_min_s
    assert instant.points[0].energy_j < plan.energy_j < kept.baseline.energy_j
    point = kept.points[0]
    assert point.latency_cost_j >= plan.energy_until_j(point.deadline_s) - instant.points[0].energy_j
    assert kept.point_within(kept.t_min_s) == point


def test_large_pipelines_have_fewer_plans_with_a_dwell() -> None:
    assert [dwelled_count(size) for size in (4, 768, 3_000, 65_536)] == [20, 20, 10, 1]


def test_an_invalid_latency_is_refused() -> None:
    with pytest.raises(SolverError, match="latency_s: expected a finite number of 0 or more, found -1"):
        solve(small_pipeline(), set_latency_s=-1.0)
