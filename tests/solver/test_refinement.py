"""Refined plans come close to their bound, are in time, and cost no more than their inputs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import Frontier, Pipeline, Plan, solve
from perseus.solver.graph import build_event_graph
from perseus.solver.realisation import Realiser, Target
from perseus.solver.sweep import sweep_frontier
from tests.solver.pipelines import little_search, pipelines, published_pipeline


@pytest.mark.parametrize(
    ("gpu", "at_t_min_percent"),
    [pytest.param("a100-sxm", 0.15, marks=pytest.mark.slow("a frontier and four plans")), ("a40", 0.3)],
)
def test_plans_are_close_to_the_bound(gpu: str, at_t_min_percent: float) -> None:
    frontier = solve(published_pipeline(gpu, 12))
    assert excess_percent(frontier, frontier.plan(frontier.t_min_s), frontier.t_min_s) <= at_t_min_percent
    for slowdown in (1.05, 1.1, 1.2):
        deadline_s = min(slowdown * frontier.t_min_s, frontier.t_slow_s)
        assert excess_percent(frontier, frontier.plan(deadline_s), deadline_s) <= 0.15


@pytest.mark.parametrize(
    ("gpu", "at_t_min_percent"),
    [
        ("a100-sxm", 0.155),
        pytest.param("a40", 0.46, marks=pytest.mark.slow("100 plans of 24 microbatches")),
    ],
)
def test_solving_takes_the_same_search_budget_at_t_min(gpu: str, at_t_min_percent: float) -> None:
    frontier = solve(published_pipeline(gpu, 24))
    at_t_min = frontier.plan_within(frontier.t_min_s)
    assert excess_percent(frontier, at_t_min, frontier.t_min_s) <= at_t_min_percent


def excess_percent(frontier: Frontier, plan: Plan, deadline_s: float) -> float:
    """Energy above the bound, both until the deadline, as a share of the bound."""
    assert plan.iteration_time_s <= deadline_s
    return 100 * (plan.energy_until_j(deadline_s) / frontier.bound_energy_j(deadline_s) - 1)


@given(pipeline=pipelines(), share=st.floats(0, 1))
@little_search()
def test_a_refined_plan_is_in_time_and_no_dearer_than_its_inputs(pipeline: Pipeline, share: float) -> None:
    graph = build_event_graph(pipeline)
    sweep = sweep_frontier(graph)
    deadline_ps = sweep.t_min_ps + int(share * (sweep.t_slow_ps - sweep.t_min_ps))
    relaxed_ps = sweep.event_times_at(deadline_ps)
    bound_j = sweep.effective_energy_j_at(sweep.scale.to_s(deadline_ps)) * sweep.scale.energy
    # Plans above their bound count as far from it: all rounds are used.
    target = Target(deadline_ps, relaxed_ps, bound_j, 1e-6)
    realiser = Realiser(graph)
    columns = realiser.columns
    rounded = realiser.rounded(relaxed_ps)
    refined = realiser.refine(target, [rounded])
    rounded_j, found_j = columns.effective_energies_j(columns.to_columns([rounded, refined]))
    assert (columns.iteration_times_ps(columns.to_columns([rounded, refined])) <= deadline_ps).all()
    assert found_j <= rounded_j + 1e-9 * abs(rounded_j)
    assert found_j >= bound_j - 1e-9 * max(sweep.scale.energy, abs(bound_j))
    # The same search budget finds the same plan.
    assert Realiser(graph).refine(target, [rounded]) == refined
