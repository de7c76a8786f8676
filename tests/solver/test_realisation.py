"""Choices for many deadlines at once: in time on any pipeline, never dearer with more search,
deterministic."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import Pipeline, replay
from perseus.solver.block_search import BlockSearch
from perseus.solver.columns import Columns, FloatArray
from perseus.solver.graph import EventGraph, Int64Array, build_event_graph
from perseus.solver.plan import earliest_finishes_ps
from perseus.solver.plan_table import tabulate
from perseus.solver.realisation import Realiser, SearchSettings, Target
from perseus.solver.sweep import Sweep, sweep_frontier
from tests.solver.pipelines import pipelines

SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=5)


def targets_of(pipeline: Pipeline, sweep: Sweep, shares: list[float]) -> list[Target]:
    """Deadlines at these shares of the way from T_min to T_slow, rising."""
    width_ps = sweep.t_slow_ps - sweep.t_min_ps
    made = []
    for deadline_ps in sorted({sweep.t_min_ps + int(share * width_ps) for share in shares}):
        deadline_s = sweep.scale.to_s(deadline_ps)
        bound_j = sweep.effective_energy_j_at(deadline_s) * sweep.scale.energy
        energy_j = bound_j + sum(pipeline.blocking_power_w) * deadline_s * sweep.scale.energy
        made.append(Target(deadline_ps, sweep.event_times_at(deadline_ps), bound_j, energy_j))
    return made


def assert_in_time(graph: EventGraph, choice: list[int], deadline_ps: int) -> None:
    """Judged by the other implementation, computation by computation."""
    durations_ps = [graph.options[p][k].time_ps for p, k in zip(graph.profile_of, choice, strict=True)]
    assert max(earliest_finishes_ps(graph.dependencies, durations_ps)) <= deadline_ps


@given(pipeline=pipelines(), shares=SHARES, price_levels_below=st.integers(0, 8))
def test_searching_never_makes_plans_dearer(
    pipeline: Pipeline, shares: list[float], price_levels_below: int
) -> None:
    graph = build_event_graph(pipeline)
    targets = targets_of(pipeline, sweep_frontier(graph), shares)
    columns = Columns(graph)
    order = columns.computation_of
    finishes_ps, starts_ps = (
        np.array([target.relaxed_ps[events[order]] for target in targets]).T
        for events in (graph.finish_event, graph.start_event)
    )
    deadlines_ps = np.array([target.deadline_ps for target in targets])
    prices = columns.price_of(finishes_ps - starts_ps)
    rounded = columns.within_finishes(finishes_ps, columns.with_prices(prices - price_levels_below))
    assert (columns.iteration_times_ps(rounded) <= deadlines_ps).all()

    def searched(seed: int) -> Int64Array:
        search = BlockSearch(columns, np.random.default_rng(seed))
        return search.search(rounded, deadlines_ps, prices, 8)

    found = searched(1)
    found_j, rounded_j = columns.effective_energies_j(found), columns.effective_energies_j(rounded)
    # Sums of the same choices' parts in another order; steep slopes make effective energies of 1e8 J.
    assert (found_j <= rounded_j + 1e-9 * np.maximum(1.0, np.abs(rounded_j))).all()
    assert (columns.iteration_times_ps(found) <= deadlines_ps).all()
    assert (found == searched(1)).all()


@pytest.mark.slow("plans pipelines by exchanges, twice each")
@given(pipeline=pipelines(), shares=SHARES)
def test_taking_over_from_others_never_makes_plans_dearer(pipeline: Pipeline, shares: list[float]) -> None:
    graph = build_event_graph(pipeline)
    targets = targets_of(pipeline, sweep_frontier(graph), shares)
    made = [lambda one=one: one for one in targets]

    def found_j(exchange_rounds: int) -> FloatArray:
        reported: list[float] = []
        settings = SearchSettings(
            round_tries=0, search_tries=0, exchange_rounds=exchange_rounds, exchange_above=0.0
        )
        realiser = Realiser(graph, settings)
        choices = realiser.realise(made, reported.append)
        assert reported == sorted(reported)
        assert reported[-1] == 1
        for target, choice in zip(targets, choices.tolist(), strict=True):
            assert_in_time(graph, choice, target.deadline_ps)
        return realiser.columns.effective_energies_j(realiser.columns.to_columns(choices))

    without_j = found_j(0)
    assert (found_j(2) <= without_j + 1e-9 * np.abs(without_j)).all()


@given(pipeline=pipelines(), draws=st.randoms(use_true_random=False))
def test_a_table_of_choices_equals_their_replays(pipeline: Pipeline, draws: Random) -> None:
    graph = build_event_graph(pipeline)
    columns = Columns(graph)
    choices = np.array(
        [[draws.randrange(len(graph.options[p])) for p in graph.profile_of] for _ in range(3)],
        dtype=np.int16,
    )
    assert (columns.to_choices(columns.to_columns(choices)) == choices).all()
    table = tabulate(pipeline, graph, columns, choices)
    for row in range(3):
        plan = table.plan(row)
        replayed = replay(pipeline, plan.clocks_mhz)
        assert plan.stages == replayed.stages
        assert plan.iteration_time_s == replayed.iteration_time_s
