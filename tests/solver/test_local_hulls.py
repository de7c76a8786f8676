"""Local hulls keep the deadline within reach, and what is relaxed around a plan costs no more than it."""

from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import Pipeline
from perseus.solver.columns import Columns
from perseus.solver.graph import build_event_graph
from perseus.solver.local_hulls import relax_around, with_local_hulls
from perseus.solver.relaxed_cost import RelaxedCost
from perseus.solver.rounding import Roundings
from perseus.solver.sweep import sweep_frontier
from tests.solver.pipelines import pipelines


@given(pipeline=pipelines(), share=st.floats(0, 1), reach=st.integers(1, 3))
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
def test_what_is_relaxed_around_a_plan_costs_no_more_than_it(
    pipeline: Pipeline, share: float, reach: int
) -> None:
    graph = build_event_graph(pipeline)
    sweep = sweep_frontier(graph)
    deadline_ps = sweep.t_min_ps + int(share * (sweep.t_slow_ps - sweep.t_min_ps))
    columns = Columns(graph)
    roundings = Roundings(graph, columns)
    rounded = roundings.round(*roundings.of(sweep.event_times_at(deadline_ps)))[:, :1]
    durations_ps = columns.times_ps[rounded[columns.row_of, 0]]
    times_ps = relax_around(graph, durations_ps, deadline_ps, reach, 0.0, lambda _: None)
    assert times_ps[-1] <= deadline_ps
    relaxed_ps = times_ps[graph.finish_event] - times_ps[graph.start_event]
    local = with_local_hulls(graph, durations_ps, reach)
    cost = RelaxedCost(local.hulls, local.profile_of)
    rounded_j = float(columns.effective_energies_j(rounded)[0])
    assert cost.effective_energy_j(relaxed_ps) <= rounded_j + 1e-6 * max(1.0, abs(rounded_j))
