"""What is stored in little room comes back as it was."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver.event_times import EventTimesRecorder
from perseus.solver.graph import build_event_graph
from perseus.solver.sweep import sweep_frontier
from tests.solver.pipelines import published_pipeline


@given(
    steps=st.lists(
        st.lists(st.integers(0, 2**52), min_size=9, max_size=9).map(lambda moves: [*moves, max(1, *moves)]),
        max_size=70,
    )
)
def test_every_corner_comes_back(steps: list[list[int]]) -> None:
    times_ps = np.full(10, 2**60)
    recorder = EventTimesRecorder(times_ps)
    corners = [times_ps]
    for moves in steps:
        times_ps = times_ps - np.array(moves)
        recorder.record(np.array(moves), times_ps)
        corners.append(times_ps)
    recorded = recorder.finish()
    for corner, expected_ps in enumerate(corners):
        assert np.array_equal(recorded.at(corner), expected_ps)
    for step, moves in zip(recorded.steps, steps, strict=True):
        assert step.moves_ps.tolist() == moves


def test_the_whole_frontier_takes_little_room() -> None:
    graph = build_event_graph(published_pipeline("a100-sxm", 12))
    sweep = sweep_frontier(graph)
    assert sweep.corners.byte_count < len(sweep.slopes_w) * graph.event_count  # One byte per event and piece.
