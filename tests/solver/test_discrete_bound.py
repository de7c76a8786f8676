"""The proved bound for discrete clocks is below every plan and not below the relaxed bound."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.discrete_bound import DiscreteBound
from perseus.solver import Pipeline, solve
from perseus.solver.graph import build_event_graph
from perseus.solver.sweep import sweep_frontier
from tests.solver.pipelines import little_search, pipelines


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
