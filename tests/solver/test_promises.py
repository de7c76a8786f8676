"""What every frontier promises, over any pipeline and settings: no plan late, none below its bound."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.discrete_bound import DiscreteBound
from perseus.solver import (
    Frontier,
    Kind,
    Pipeline,
    Plan,
    plan_at,
    replay,
    replay_with_latency,
    solve,
)
from perseus.solver.graph import build_event_graph
from perseus.solver.sweep import sweep_frontier
from tests.solver.pipelines import little_search, pipelines, remeasured, replayed_iteration_time_s

MAX_SLOWDOWN = 1.002 + 1e-9
"""Of a plan that keeps its clocks for the latency."""


@st.composite
def pipelines_by_clock(draw: st.DrawFn) -> Pipeline:
    """Pipelines whose blocking power is known at one to three clocks, and rises by any amounts."""
    pipeline = draw(pipelines())
    by_clock = []
    for least_w in pipeline.blocking_power_w:
        clocks_mhz = sorted(draw(st.sets(st.integers(990, 1070), min_size=1, max_size=3)))
        powers_w = sorted(least_w + draw(st.floats(0.0, 50.0)) for _ in clocks_mhz)
        by_clock.append(dict(zip(clocks_mhz, powers_w, strict=True)))
    return replace(pipeline, blocking_powers_w=tuple(by_clock))


@st.composite
def frontiers(draw: st.DrawFn, latencies: st.SearchStrategy[float]) -> Frontier:
    """Of any pipeline: blocking power by clock or not, exact times or noisy ones with a margin.

    `latencies`: of setting a clock, in longest computations. Any share may be tolerated in the hulls.
    """
    pipeline = draw(pipelines() | pipelines_by_clock())
    error_share = draw(st.sampled_from([0.0, 0.0, 0.05]))
    pipeline = remeasured(pipeline, lambda m: replace(m, time_se_s=error_share * m.time_s))
    return solve(
        pipeline,
        point_count=4,
        set_latency_s=draw(latencies) * max(m.time_s for some in pipeline.profiles.values() for m in some),
        hull_tolerance=draw(st.just(0.0) | st.floats(0.0, 0.3)),
        confidence=draw(st.sampled_from([0.5, 0.9])),
    )


def at_w(by_clock: dict[int, float], clock_mhz: int) -> float:
    known = sorted(by_clock.items())
    for (low_mhz, low_w), (high_mhz, high_w) in pairwise(known):
        if low_mhz <= clock_mhz <= high_mhz:
            return low_w + (high_w - low_w) * (clock_mhz - low_mhz) / (high_mhz - low_mhz)
    return known[0][1] if clock_mhz < known[0][0] else known[-1][1]


def energy_j(pipeline: Pipeline, plan: Plan, until_s: float) -> float:
    """Follow each GPU through the iteration, wait by wait."""
    total_j = 0.0
    powers_w = pipeline.blocking_powers_w or [{1: each} for each in pipeline.blocking_power_w]
    for planned, by_clock in zip(plan.stages, powers_w, strict=True):
        now_s, before_mhz = 0.0, planned[0].clock_mhz if planned else 0
        for p in planned:
            c = p.computation
            (m,) = (m for m in pipeline.profiles[c.stage, c.chunk, c.kind] if m.clock_mhz == p.clock_mhz)
            total_j += at_w(dict(by_clock), min(before_mhz, p.clock_mhz)) * (p.start_s - now_s) + m.energy_j
            now_s, before_mhz = p.start_s + p.duration_s, p.clock_mhz
        total_j += by_clock[max(by_clock)] * (until_s - now_s)
    return total_j


def assert_kept(frontier: Frontier, plan: Plan, time_s: float) -> None:
    """The plan is in time and not below the bound, also when replayed; its timeline is its energy."""
    pipeline = frontier.pipeline
    assert plan.iteration_time_s <= time_s + 1e-12
    assert replayed_iteration_time_s(pipeline, plan) == pytest.approx(plan.iteration_time_s, abs=1e-10)
    bound_j = frontier.bound_energy_j(plan.iteration_time_s)
    assert plan.energy_j >= bound_j - 1e-9 * (1 + abs(bound_j))
    for until_s in (plan.iteration_time_s, 1.5 * plan.iteration_time_s):
        assert plan.energy_until_j(until_s) == pytest.approx(energy_j(pipeline, plan, until_s))
    again = replay(pipeline, plan.clocks_mhz)
    assert (again.stages, again.iteration_time_s) == (plan.stages, plan.iteration_time_s)
    assert again.energy_j == pytest.approx(plan.energy_j)
    for stage, order in zip(plan.stages, pipeline.schedule.orders, strict=True):
        assert [p.computation for p in stage] == [c for c in order if c.kind is not Kind.FIXED]
        for earlier, later in pairwise(stage):
            assert later.start_s >= earlier.start_s + earlier.duration_s - 1e-11


def assert_not_late(frontier: Frontier, plan: Plan) -> None:
    """With the latency, unless times rise with the clock: if all-highest is late, no other is later."""
    latency_s, pipeline = frontier.set_latency_s, frontier.pipeline
    if plan.iteration_time_s >= frontier.baseline.iteration_time_s:
        late_s = replay_with_latency(pipeline, plan, latency_s).iteration_time_s
        baseline_late_s = replay_with_latency(pipeline, frontier.baseline, latency_s).iteration_time_s
        assert late_s <= max(MAX_SLOWDOWN * plan.iteration_time_s, baseline_late_s)


def check(frontier: Frontier) -> None:
    """Slower points cost less, and each is what a look-up returns."""
    points = frontier.points
    assert points[0].deadline_s == frontier.t_min_s
    assert points[-1].deadline_s == pytest.approx(frontier.t_slow_s, rel=1e-12)
    assert points[frontier.t_star_index].deadline_s == frontier.t_star_s
    for earlier, later in pairwise(points):
        assert earlier.deadline_s < later.deadline_s
        assert earlier.iteration_time_s <= later.iteration_time_s
        assert earlier.effective_energy_j >= later.effective_energy_j
    for point in points:
        assert point.iteration_time_s <= point.deadline_s
        assert point.bound_energy_j == frontier.bound_energy_j(point.iteration_time_s)
        assert point.bound_energy_j <= point.energy_j + 1e-9
        plan = frontier.plan_within(point.iteration_time_s)
        assert plan.effective_energy_j == pytest.approx(point.effective_energy_j, rel=1e-12)
        assert_not_late(frontier, plan)


@pytest.mark.parametrize(
    "latencies",
    [
        pytest.param(st.just(0.0), id="clocks set at once"),
        pytest.param(
            st.floats(0.0, 3.0), id="latency", marks=pytest.mark.slow("plans are dwelled one by one")
        ),
    ],
)
@given(data=st.data(), share=st.floats(0, 1.2))
@little_search()
def test_points_and_plans_keep_their_times_and_never_cost_less_than_the_bound(
    latencies: st.SearchStrategy[float], data: st.DataObject, share: float
) -> None:
    frontier = data.draw(frontiers(latencies))
    check(frontier)
    time_s = frontier.t_min_s + share * (frontier.t_slow_s - frontier.t_min_s)
    made, looked_up = frontier.plan(time_s), frontier.plan_within(time_s)
    assert made.effective_energy_j <= looked_up.effective_energy_j
    for plan in (made, looked_up):
        assert_kept(frontier, plan, time_s)
        assert_not_late(frontier, plan)
    assert_kept(frontier, plan_at(frontier.pipeline, time_s), time_s)


@given(pipeline=pipelines() | pipelines_by_clock(), share=st.floats(0, 1))
@little_search()
def test_a_replay_without_latency_is_the_replay(pipeline: Pipeline, share: float) -> None:
    frontier = solve(pipeline, point_count=3)
    plan = plan_at(pipeline, frontier.t_min_s + share * (frontier.t_slow_s - frontier.t_min_s))
    late = replay_with_latency(pipeline, plan, 0.0)
    assert (late.iteration_time_s, late.share_on_clock) == (plan.iteration_time_s, 1.0)
    if not (pipeline.blocking_powers_w and pipeline.fixed_times_s):  # a clock is lowered after them, too
        assert late.energy_j == pytest.approx(plan.energy_j)


@given(pipeline=pipelines(), tolerance=st.floats(0.0, 0.3))
@little_search()
def test_the_reported_slack_covers_the_tolerances_cost_to_the_bounds(
    pipeline: Pipeline, tolerance: float
) -> None:
    exact = solve(pipeline, point_count=5)
    coarse = solve(pipeline, point_count=5, hull_tolerance=tolerance)
    assert exact.bound_slack == 0.0
    for point in coarse.points:
        exact_j = exact.bound_energy_j(point.iteration_time_s)
        assert point.bound_energy_j <= exact_j + 1e-6
        assert exact_j <= point.bound_energy_j + coarse.bound_slack * abs(point.bound_energy_j) + 1e-6
        assert point.energy_j >= exact_j - 1e-6


@given(pipeline=pipelines(), share=st.floats(0, 1), window=st.integers(1, 4))
@little_search()
def test_the_proved_bound_lies_between_the_relaxed_bound_and_every_plan(
    pipeline: Pipeline, share: float, window: int
) -> None:
    frontier = solve(pipeline, point_count=5)
    graph = build_event_graph(pipeline)
    sweep = sweep_frontier(graph)
    # Ten nanoseconds more: at T_min itself the program may be infeasible by HiGHS's tolerance, 1e-6 ms.
    deadline_s = frontier.t_min_s + share * (frontier.t_slow_s - frontier.t_min_s) + 1e-8
    proof = DiscreteBound(graph).prove(deadline_s, window, 5.0)
    scale_j = 1 + sum(abs(float(energy_j)) for energy_j in sweep.effective_energies_j[[0, -1]])
    assert proof.bound_j >= sweep.effective_energy_j_at(deadline_s) - 1e-5 * scale_j
    for point in frontier.points:
        if point.iteration_time_s <= deadline_s:
            assert proof.bound_j_at(point.iteration_time_s) <= point.effective_energy_j + 1e-5 * scale_j
        else:
            assert proof.bound_j_at(point.iteration_time_s) == -float("inf")
