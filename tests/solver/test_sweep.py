"""The relaxed frontier is exactly the optimum of the linear program, and convex."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import Pipeline, gpipe
from perseus.solver.graph import build_event_graph, convex_hulls
from perseus.solver.profile import Option
from perseus.solver.relaxed_cost import RelaxedCost
from perseus.solver.sweep import sweep_frontier
from tests.solver.pipelines import ReferenceProgram, pipelines, published_pipeline


@given(pipeline=pipelines(), shares=st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_equals_linear_program_on_random_pipelines(pipeline: Pipeline, shares: list[float]) -> None:
    sweep = sweep_frontier(build_event_graph(pipeline))
    program = ReferenceProgram(pipeline)
    t_min_s, t_slow_s = sweep.t_min_ps / 1e12, sweep.t_slow_ps / 1e12
    scale_j = sum(abs(energy_j) for energy_j in sweep.effective_energies_j[[0, -1]]) + 1
    for share in (0.0, *shares, 1.0):
        # 10 ps more: at T_min itself the program may be a rounding error short of feasible.
        time_s = t_min_s + share * (t_slow_s - t_min_s) + 1e-11
        expected_j = program.min_effective_energy_j(time_s)
        assert sweep.effective_energy_j_at(time_s) == pytest.approx(expected_j, abs=1e-7 * scale_j)


@given(pipeline=pipelines())
def test_frontier_falls_and_is_convex(pipeline: Pipeline) -> None:
    sweep = sweep_frontier(build_event_graph(pipeline))
    assert sweep.iteration_times_ps[0] == sweep.t_slow_ps
    assert sweep.iteration_times_ps[-1] == sweep.t_min_ps
    assert np.all(np.diff(sweep.iteration_times_ps) < 0)
    assert np.all(sweep.slopes_w > 0)
    assert np.all(np.diff(sweep.slopes_w) > 0)


@given(pipeline=pipelines(), share=st.floats(0, 1))
def test_relaxed_plan_between_corners_is_feasible_and_costs_the_bound(
    pipeline: Pipeline, share: float
) -> None:
    graph = build_event_graph(pipeline)
    sweep = sweep_frontier(graph)
    time_ps = sweep.t_min_ps + round(share * (sweep.t_slow_ps - sweep.t_min_ps))
    events_ps = sweep.event_times_at(time_ps)
    assert events_ps[0] == 0
    assert events_ps[-1] == time_ps
    assert np.all(events_ps[graph.head_event] - events_ps[graph.tail_event] >= graph.lag_ps)
    durations_ps = events_ps[graph.finish_event] - events_ps[graph.start_event]
    cost_j = 0.0
    for p, duration_ps in zip(graph.profile_of, durations_ps, strict=True):
        hull = graph.hulls[p]
        assert duration_ps >= hull.times_ps[0]
        cost_j += hull.slowest_effective_energy_j
        for k, slope_uw in enumerate(hull.slopes_uw):
            missing_ps = hull.times_ps[k + 1] - max(hull.times_ps[k], duration_ps)
            cost_j += max(0, int(missing_ps)) * slope_uw * 1e-18
    counted_j = RelaxedCost(graph.hulls, graph.profile_of).effective_energy_j(durations_ps)
    assert counted_j == pytest.approx(cost_j, rel=1e-9, abs=1e-9)
    assert cost_j == pytest.approx(sweep.effective_energy_j_at(time_ps / 1e12), rel=1e-9, abs=1e-9)


def test_a_partial_sweep_stops_at_its_limit_and_agrees_with_the_whole() -> None:
    graph = build_event_graph(published_pipeline("a40", 4))
    whole = sweep_frontier(graph)
    middle_ps = (whole.t_min_ps + whole.t_slow_ps) // 2
    part = sweep_frontier(graph, stop_s=middle_ps / 1e12)
    assert part.iteration_times_ps[-1] == middle_ps
    assert part.t_min_ps == whole.t_min_ps
    assert np.array_equal(part.event_times_at(middle_ps), whole.event_times_at(middle_ps))


def test_progress_rises_to_one() -> None:
    seen: list[float] = []
    sweep_frontier(build_event_graph(published_pipeline("a40", 4)), seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize("gpu", ["a100-sxm", "a40"])
@pytest.mark.parametrize("microbatch_count", [3, 12])
def test_equals_linear_program_on_published_profiles(gpu: str, microbatch_count: int) -> None:
    pipeline = published_pipeline(gpu, microbatch_count)
    if microbatch_count == 3:
        pipeline = Pipeline(gpipe(8, 3), pipeline.profiles, pipeline.blocking_power_w)
    sweep = sweep_frontier(build_event_graph(pipeline))
    program = ReferenceProgram(pipeline)
    shares = np.random.default_rng(microbatch_count).uniform(size=5)
    for share in (0.0, *shares, 1.0):
        time_s = (sweep.t_min_ps + share * (sweep.t_slow_ps - sweep.t_min_ps)) / 1e12 + 1e-11
        expected_j = program.min_effective_energy_j(time_s)
        assert sweep.effective_energy_j_at(time_s) == pytest.approx(expected_j, rel=1e-7)


def test_the_largest_schedule_keeps_the_slopes_of_real_profiles() -> None:
    """20 kW, as of eight GPUs at their steepest; flows of all of them stay whole numbers."""
    options = (Option(1400, 10 * 10**9, 300.0, 300.0), Option(1200, 20 * 10**9, 100.0, 100.0))
    (hull,) = convex_hulls([options], np.zeros(65_536, dtype=np.int64))
    assert hull.slopes_uw == (20_000 * 10**6,)
