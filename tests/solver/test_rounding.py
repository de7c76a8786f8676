"""Rounded plans come close to their bound, trades only ever help, and what is undone is as it was."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus.solver import Frontier, Pipeline, Plan, solve
from perseus.solver.assignment import Assignment, Neighbourhood
from perseus.solver.graph import build_event_graph
from perseus.solver.realisation import Realiser, Relaxing, Target
from perseus.solver.relaxed_cost import RelaxedCost
from perseus.solver.rounding import Rounder, relax_around, relax_locally, with_local_hulls
from perseus.solver.sweep import sweep_frontier
from tests.solver.pipelines import pipelines, published_pipeline


@pytest.mark.parametrize(("gpu", "at_t_min_percent"), [("a100-sxm", 0.15), ("a40", 0.4)])
def test_plans_are_close_to_the_bound(gpu: str, at_t_min_percent: float) -> None:
    frontier = solve(published_pipeline(gpu, 12), point_count=3)
    assert excess_percent(frontier, frontier.plan(frontier.t_min_s), frontier.t_min_s) <= at_t_min_percent
    for slowdown in (1.05, 1.1, 1.2):
        deadline_s = min(slowdown * frontier.t_min_s, frontier.t_slow_s)
        assert excess_percent(frontier, frontier.plan(deadline_s), deadline_s) <= 0.15


@pytest.mark.parametrize(("gpu", "at_t_min_percent"), [("a100-sxm", 0.155), ("a40", 0.5)])
def test_solving_takes_the_same_pains_at_t_min(gpu: str, at_t_min_percent: float) -> None:
    frontier = solve(published_pipeline(gpu, 24), point_count=3)
    at_t_min = frontier.plan_within(frontier.t_min_s)
    assert excess_percent(frontier, at_t_min, frontier.t_min_s) <= at_t_min_percent


def excess_percent(frontier: Frontier, plan: Plan, deadline_s: float) -> float:
    """Energy above the bound, both until the deadline, as a share of the bound."""
    assert plan.iteration_time_s <= deadline_s
    return 100 * (plan.energy_until_j(deadline_s) / frontier.bound_energy_j(deadline_s) - 1)


@given(
    pipeline=pipelines(), share=st.floats(0, 1), changes=st.lists(st.tuples(st.integers(0), st.integers(0)))
)
@settings(max_examples=40)
def test_an_assignment_keeps_its_slack_and_can_be_undone(
    pipeline: Pipeline, share: float, changes: list[tuple[int, int]]
) -> None:
    graph = build_event_graph(pipeline)
    neighbourhood = Neighbourhood(graph)
    count = len(graph.computations)
    deadline_ps = sum(max(times_ps) for times_ps in neighbourhood.times_ps)
    assignment = Assignment(neighbourhood, [0] * count, round(share * deadline_ps))
    before = list(assignment.choice), [assignment.slack_ps(i) for i in range(count)]
    mark = assignment.mark()
    for i, option in changes:
        assignment.choose(i % count, option % len(neighbourhood.times_ps[i % count]))
    fresh = Assignment(neighbourhood, assignment.choice, round(share * deadline_ps))
    assert [assignment.slack_ps(i) for i in range(count)] == [fresh.slack_ps(i) for i in range(count)]
    assignment.undo_to(mark)
    assert (assignment.choice, [assignment.slack_ps(i) for i in range(count)]) == before


@given(pipeline=pipelines(), share=st.floats(0, 1))
@settings(max_examples=40)
def test_every_means_helps_and_none_is_late(pipeline: Pipeline, share: float) -> None:
    graph = build_event_graph(pipeline)
    sweep = sweep_frontier(graph)
    rounder = Rounder(graph)
    deadline_ps = sweep.t_min_ps + int(share * (sweep.t_slow_ps - sweep.t_min_ps))
    relaxed_ps = sweep.event_times_at(deadline_ps)
    rounded = rounder.round(relaxed_ps, deadline_ps)
    improved = rounder.improve(rounded, deadline_ps, float("inf"))
    assert rounder.effective_energy_j(improved) <= rounder.effective_energy_j(rounded)
    bound_j = sweep.effective_energy_j_at(deadline_ps / 1e12)
    target = Target(deadline_ps, relaxed_ps, bound_j, bound_j + 100.0, Relaxing.FINELY)
    local = [
        rounder.round(local_ps, deadline_ps)
        for local_ps in relax_locally(graph, relaxed_ps, deadline_ps, is_coarse=False, report=lambda _: None)
    ]
    traded = rounder.improve(min(local, key=rounder.effective_energy_j), deadline_ps, float("inf"))
    refined = Realiser(graph).refine(target, [improved])
    for choice in (improved, traded):
        assert rounder.effective_energy_j(refined) <= rounder.effective_energy_j(choice) + 1e-9
    assert Realiser(graph).refine(target, [improved]) == refined
    for choice in (improved, refined):
        checked = Assignment(Neighbourhood(graph), choice, deadline_ps)
        assert all(checked.slack_ps(i) >= 0 for i in range(len(choice)))
    # The same effort finds the same plan.
    assert rounder.improve(rounded, deadline_ps, 500) == rounder.improve(rounded, deadline_ps, 500)


@given(pipeline=pipelines(), share=st.floats(0, 1), reach=st.integers(1, 3))
@settings(max_examples=40)
def test_local_hulls_keep_the_deadline_within_reach(pipeline: Pipeline, share: float, reach: int) -> None:
    graph = build_event_graph(pipeline)
    sweep = sweep_frontier(graph)
    deadline_ps = sweep.t_min_ps + int(share * (sweep.t_slow_ps - sweep.t_min_ps))
    relaxed_ps = sweep.event_times_at(deadline_ps)
    durations_ps = relaxed_ps[graph.finish_event] - relaxed_ps[graph.start_event]
    local = with_local_hulls(graph, durations_ps, reach)
    assert all(len(options) <= 2 * reach + 1 for options in local.options)
    assert sweep_frontier(local, stop_s=deadline_ps / 1e12).t_min_ps <= deadline_ps


@given(pipeline=pipelines(), share=st.floats(0, 1), reach=st.integers(1, 3))
@settings(max_examples=40)
def test_what_is_relaxed_around_a_plan_costs_no_more_than_it(
    pipeline: Pipeline, share: float, reach: int
) -> None:
    graph = build_event_graph(pipeline)
    sweep = sweep_frontier(graph)
    rounder = Rounder(graph)
    deadline_ps = sweep.t_min_ps + int(share * (sweep.t_slow_ps - sweep.t_min_ps))
    choice = rounder.round(sweep.event_times_at(deadline_ps), deadline_ps)
    chosen = [graph.options[p][k] for p, k in zip(graph.profile_of.tolist(), choice, strict=True)]
    durations_ps = np.array([option.time_ps for option in chosen])
    times_ps = relax_around(graph, durations_ps, deadline_ps, reach, 0.0, lambda _: None)
    assert times_ps[-1] <= deadline_ps
    relaxed_ps = times_ps[graph.finish_event] - times_ps[graph.start_event]
    local = with_local_hulls(graph, durations_ps, reach)
    cost = RelaxedCost(local.hulls, local.profile_of)
    assert cost.effective_energy_j(relaxed_ps) <= rounder.effective_energy_j(choice) + 1e-6
