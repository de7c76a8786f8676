"""Choices for many deadlines at once: in time on any pipeline, never dearer with more search, deterministic.

Mixtures of two plans are in time, no dearer than either, and the cheapest of all where a cut is exact.
"""

from itertools import pairwise, product
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from perseus.solver import Pipeline, replay
from perseus.solver.block_search import BlockSearch
from perseus.solver.columns import Columns, FloatArray
from perseus.solver.fusion import Fusion
from perseus.solver.graph import EventGraph, Int64Array, build_event_graph
from perseus.solver.plan import earliest_finishes_ps
from perseus.solver.plan_table import tabulate
from perseus.solver.realisation import Realiser, SearchSettings, Target
from perseus.solver.sweep import Sweep, sweep_frontier
from tests.solver.pipelines import pipelines, small_pipeline

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


@given(pipeline=pipelines(), shares=st.lists(st.floats(0, 1), min_size=8, max_size=20))
def test_more_time_costs_no_more(pipeline: Pipeline, shares: list[float]) -> None:
    """Also where nothing but rounding makes plans."""
    graph = build_event_graph(pipeline)
    realiser = Realiser(graph, SearchSettings(round_tries=0, search_tries=0, exchange_rounds=0))
    made = [lambda one=one: one for one in targets_of(pipeline, sweep_frontier(graph), shares)]
    choices = realiser.realise(made)
    energies_j = realiser.columns.effective_energies_j(realiser.columns.to_columns(choices))
    assert all(later_j <= earlier_j for earlier_j, later_j in pairwise(energies_j))


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


# --- Mixtures of two plans ----------------------------------------------------------------------------------

SEEDS = st.integers(0, 2**32 - 1)


def two_choices(columns: Columns, seed: int) -> Int64Array:
    """Options at random, as two columns."""
    random = np.random.default_rng(seed)
    slowest = columns.slowest_within(slice(None), np.full((columns.row_count, 1), 2**52), None)
    return random.integers(columns.fastest, slowest + 1, size=(columns.row_count, 2))


def durations_ps(graph: EventGraph, times_ps: Int64Array) -> Int64Array:
    return times_ps[graph.finish_event] - times_ps[graph.start_event]


def assert_feasible(graph: EventGraph, times_ps: Int64Array, deadline_ps: int) -> None:
    fastest_ps = np.array([options[0].time_ps for options in graph.options])[graph.profile_of]
    assert (durations_ps(graph, times_ps) >= fastest_ps).all()
    assert (times_ps[graph.head_event] - times_ps[graph.tail_event] >= graph.lag_ps).all()
    assert times_ps[0] == 0
    assert times_ps[-1] <= deadline_ps


def energies_j(graph: EventGraph, planned_ps: Int64Array) -> FloatArray:
    """Each computation's energy at its slowest option within a duration; infinite if there is none."""
    found = [
        min(
            (option.effective_energy_j for option in graph.options[p] if option.time_ps <= one_ps),
            default=np.inf,
        )
        for p, one_ps in zip(graph.profile_of.tolist(), planned_ps.tolist(), strict=True)
    ]
    return np.array(found)


@given(pipeline=pipelines(), seed=SEEDS, share=st.floats(0, 1), is_late=st.booleans())
def test_a_mixture_keeps_the_deadline_and_costs_no_more(
    pipeline: Pipeline, seed: int, share: float, is_late: bool
) -> None:
    graph = build_event_graph(pipeline)
    columns = Columns(graph)
    fusion = Fusion(graph, columns)
    choices = two_choices(columns, seed)
    times_ps, others_ps = fusion.times_ps(choices).T
    for each_ps in (times_ps, others_ps):
        assert_feasible(graph, each_ps, int(each_ps[-1]))
    deadline_ps = int(times_ps[-1] + share * (sweep_frontier(graph).t_slow_ps - times_ps[-1]))
    if is_late:
        others_ps = others_ps + (deadline_ps - others_ps[-1])
    fused_ps = fusion.fuse(times_ps, others_ps, deadline_ps)
    assert_feasible(graph, fused_ps, deadline_ps)
    assert ((fused_ps == times_ps) | (fused_ps == others_ps)).all()
    choice = fusion.choice(fused_ps)
    assert columns.iteration_times_ps(choice)[0] <= deadline_ps
    fused_j = columns.effective_energies_j(choice)[0]
    kept_j, other_j = columns.effective_energies_j(choices)
    rounding_j = 1e-6 * (1 + np.abs(columns.energies_j[choices]).sum())
    assert fused_j <= kept_j + rounding_j
    if others_ps[0] == 0 and others_ps[-1] <= deadline_ps:
        assert fused_j <= other_j + rounding_j


@given(seed=SEEDS, share=st.floats(0, 1), offset_share=st.floats(-0.2, 0.2))
def test_no_other_mixture_is_cheaper_where_a_cut_is_exact(
    seed: int, share: float, offset_share: float
) -> None:
    graph = build_event_graph(small_pipeline())
    columns = Columns(graph)
    fusion = Fusion(graph, columns)
    times_ps, others_ps = fusion.times_ps(two_choices(columns, seed)).T
    deadline_ps = int(times_ps[-1] + share * (sweep_frontier(graph).t_slow_ps - times_ps[-1]))
    others_ps = others_ps + round(offset_share * others_ps[-1])
    start, finish = graph.start_event, graph.finish_event
    kept_j, late_j, early_j, taken_j = (
        energies_j(graph, ends_ps[finish] - begins_ps[start])
        for begins_ps, ends_ps in product((times_ps, others_ps), repeat=2)
    )
    assume((late_j + early_j >= kept_j + taken_j - 1e-9).all())
    fused_j = energies_j(graph, durations_ps(graph, fusion.fuse(times_ps, others_ps, deadline_ps))).sum()
    min_j = np.inf
    for taken in product((False, True), repeat=graph.event_count):
        mixed_ps = np.where(taken, others_ps, times_ps)
        in_order = mixed_ps[graph.head_event] - mixed_ps[graph.tail_event] >= graph.lag_ps
        if in_order.all() and mixed_ps[0] == 0 and mixed_ps[-1] <= deadline_ps:
            min_j = min(min_j, energies_j(graph, durations_ps(graph, mixed_ps)).sum())
    assert fused_j <= min_j + 1e-6
