"""The relaxed frontier is exactly the optimum of the linear program, and convex.

Its compactly stored times are recovered exactly, or as a plan between kept ones.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import Pipeline, gpipe
from perseus.solver.event_times import AllCorners, EventTimesRecorder, SomeCorners
from perseus.solver.graph import EXACT, build_event_graph, convex_hulls, steepest_exact_uw
from perseus.solver.profile import Option
from perseus.solver.relaxed_cost import RelaxedCost
from perseus.solver.scale import UW_PER_W
from perseus.solver.sweep import sweep_frontier
from tests.solver.pipelines import ReferenceProgram, pipelines, published_pipeline


@given(pipeline=pipelines(), shares=st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_equals_linear_program_on_random_pipelines(pipeline: Pipeline, shares: list[float]) -> None:
    sweep = sweep_frontier(build_event_graph(pipeline))
    program = ReferenceProgram(pipeline)
    t_min_s, t_slow_s = sweep.t_min_s, sweep.t_slow_s
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
    assert counted_j == pytest.approx(cost_j, rel=1e-9, abs=1e-9 * graph.scale.energy)
    expected_j = sweep.effective_energy_j_at(graph.scale.to_s(time_ps)) * graph.scale.energy
    assert cost_j == pytest.approx(expected_j, rel=1e-9, abs=1e-9 * graph.scale.energy)


def test_a_partial_sweep_stops_at_its_limit_and_agrees_with_the_whole() -> None:
    graph = build_event_graph(published_pipeline("a40", 4))
    whole = sweep_frontier(graph)
    middle_ps = (whole.t_min_ps + whole.t_slow_ps) // 2
    part = sweep_frontier(graph, stop_ps=middle_ps)
    assert part.iteration_times_ps[-1] == middle_ps
    assert part.t_min_ps == whole.t_min_ps
    assert np.array_equal(part.event_times_at(middle_ps), whole.event_times_at(middle_ps))


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
        time_s = sweep.t_min_s + share * (sweep.t_slow_s - sweep.t_min_s) + 1e-11
        expected_j = program.min_effective_energy_j(time_s)
        assert sweep.effective_energy_j_at(time_s) == pytest.approx(expected_j, rel=1e-7)


def test_the_largest_schedule_keeps_the_slopes_of_real_profiles() -> None:
    """The steepest are a hundred times as steep as the mean; flows of all of them stay whole numbers."""
    options = (Option(1400, 10 * 10**9, 300.0, 300.0), Option(1200, 20 * 10**9, 100.0, 100.0))
    assert steepest_exact_uw([options], np.zeros(65_536, dtype=np.int64)) == np.inf


def test_limited_slopes_use_all_that_is_exact() -> None:
    """Where one profile is nearly vertical, its limit is what the others leave."""
    usual = (Option(1400, 10**12, 300.0, 300.0), Option(1200, 2 * 10**12, 100.0, 100.0))
    vertical = (Option(1400, 10**12, 300.0, 300.0), Option(1200, 10**12 + 1, 100.0, 100.0))
    limit_uw = steepest_exact_uw([usual, vertical], np.array([0] * 90 + [1] * 10))
    assert limit_uw == (EXACT // 4 - 90 * 200 * UW_PER_W) // 10
    assert convex_hulls([usual, vertical], limit_uw)[1].slopes_uw == (limit_uw,)


def test_the_whole_frontier_takes_little_memory() -> None:
    graph = build_event_graph(published_pipeline("a100-sxm", 12))
    sweep = sweep_frontier(graph)
    assert (
        sweep.event_times.byte_count < len(sweep.slopes_w) * graph.event_count
    )  # One byte per event and piece.


@given(
    moves=st.lists(st.lists(st.integers(0, 2**45), min_size=6, max_size=6), min_size=1, max_size=60),
    max_bytes=st.integers(0, 4000) | st.just(2**20),
    shares=st.lists(st.floats(0, 1), max_size=10),
)
def test_every_corner_is_recovered_or_with_less_memory_a_plan_in_time(
    moves: list[list[int]], max_bytes: int, shares: list[float]
) -> None:
    """Minimum distances of events at all corners also hold between them, and the iteration is in time."""
    times_ps = np.full(7, 2**52)
    recorder = EventTimesRecorder(times_ps, max_bytes)
    corners = [times_ps]
    for some in moves:
        step_ps = np.array([*some, max(1, *some)])
        times_ps = times_ps - step_ps
        recorder.record(step_ps, times_ps)
        corners.append(times_ps)
    recorded = recorder.finish()
    if isinstance(recorded, AllCorners):
        assert all(np.array_equal(recorded.at(number), corner) for number, corner in enumerate(corners))
        assert [step.moves_ps.tolist()[:-1] for step in recorded.steps] == moves
    else:
        assert recorded.byte_count <= max(max_bytes, 56) + 56 < 2**20
    slowest_ps, fastest_ps = int(corners[0][-1]), int(corners[-1][-1])
    assert np.array_equal(recorded.until(slowest_ps), corners[0])
    assert np.array_equal(recorded.until(fastest_ps), corners[-1])
    min_gaps_ps = np.min([np.subtract.outer(c, c) for c in corners], axis=0)
    for share in shares:
        deadline_ps = fastest_ps + int(share * (slowest_ps - fastest_ps))
        found_ps = recorded.until(deadline_ps)
        assert found_ps[-1] <= deadline_ps
        assert (np.subtract.outer(found_ps, found_ps) >= min_gaps_ps).all()


def test_a_plan_between_kept_corners_costs_little_more_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = build_event_graph(published_pipeline("a100-sxm", 12))
    sweep = sweep_frontier(graph)
    monkeypatch.setattr("perseus.solver.sweep.MAX_BYTES", 40_000)
    thinned = sweep_frontier(graph)
    cost = RelaxedCost(graph.hulls, graph.profile_of)
    assert isinstance(thinned.event_times, SomeCorners)
    assert thinned.event_times.byte_count <= 40_000
    for deadline_ps in np.linspace(sweep.t_min_ps, sweep.t_slow_ps, 30).astype(int).tolist():
        times_ps = thinned.event_times_at(deadline_ps)
        assert times_ps[-1] <= deadline_ps
        relaxed_j = cost.effective_energy_j(times_ps[graph.finish_event] - times_ps[graph.start_event])
        bound_j = sweep.effective_energy_j_at(graph.scale.to_s(deadline_ps)) * graph.scale.energy
        assert bound_j - 1e-6 <= relaxed_j <= 1.01 * bound_j  # with 14 corners of 537
