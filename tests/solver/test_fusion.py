"""Mixtures of two plans: in time, no dearer than either, and the cheapest of all where a cut is exact."""

from itertools import product

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from perseus.solver import Pipeline
from perseus.solver.columns import Columns, FloatArray
from perseus.solver.fusion import Fusion
from perseus.solver.graph import EventGraph, Int64Array, build_event_graph
from perseus.solver.sweep import sweep_frontier
from tests.solver.pipelines import pipelines, small_pipeline

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
