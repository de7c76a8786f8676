"""Compactly stored times are recovered exactly, or as a plan between kept ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver.event_times import AllCorners, EventTimesRecorder, SomeCorners
from perseus.solver.graph import build_event_graph
from perseus.solver.relaxed_cost import RelaxedCost
from perseus.solver.sweep import sweep_frontier
from tests.solver.pipelines import published_pipeline


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
