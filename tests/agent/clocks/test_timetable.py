"""The timetable's predictions from previous iterations."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.agent.clocks.timetable import Prediction, Timetable

DURATIONS_S = (1.0, 2.0, 3.0)
GAP_S = 0.5


def run(timetable: Timetable, begin_s: float, durations_s: tuple[float, ...] = DURATIONS_S) -> float:
    """Mark one iteration, with a gap before each computation; return its end."""
    for position, duration_s in enumerate(durations_s):
        begin_s += GAP_S
        timetable.begin(position, begin_s)
        begin_s += duration_s
        timetable.end(position, begin_s)
    return begin_s


def test_nothing_is_predicted_from_a_single_iteration() -> None:
    timetable = Timetable(3)
    end_s = run(timetable, 0.0)
    assert timetable.duration_s(0) is None
    assert list(timetable.after_end(2, end_s)) == [Prediction(3, end_s, None)]
    timetable.begin(0, end_s)
    assert list(timetable.after_begin(0, end_s)) == [Prediction(1, end_s, None)], "it may end at once"


def test_predictions_start_at_the_mark_and_are_cyclic() -> None:
    timetable = Timetable(3)
    run(timetable, run(timetable, run(timetable, 0.0)))
    timetable.begin(1, 100.0)
    assert list(islice(timetable.after_begin(1, 100.0), 3)) == [
        Prediction(2, 102.5, 105.5),
        Prediction(3, 106.0, 107.0),
        Prediction(4, 107.5, 109.5),
    ]
    assert list(islice(timetable.after_end(1, 200.0), 1)) == [Prediction(2, 200.5, 203.5)]
    assert list(islice(timetable.from_start(300.0), 2)) == [
        Prediction(0, 300.0, 301.0),
        Prediction(1, 301.5, 303.5),
    ]


def test_one_slow_iteration_changes_nothing() -> None:
    timetable = Timetable(3)
    end_s = 0.0
    for factor in (1, 1, 10, 1, 1):
        end_s = run(timetable, end_s, tuple(factor * each for each in DURATIONS_S))
    assert [timetable.duration_s(position) for position in range(3)] == pytest.approx(DURATIONS_S)


def test_the_shortest_gap_counts() -> None:
    timetable = Timetable(1)
    for begin_s in (0.0, 2.0, 3.25, 9.0):  # each lasts a second
        timetable.begin(0, begin_s)
        timetable.end(0, begin_s + 1.0)
    assert timetable.gap_s(0) == 0.25


def test_lost_marks_yield_no_duration_and_no_gap() -> None:
    timetable = Timetable(3)
    for begin_s in (0.0, 100.0, 200.0):
        timetable.begin(0, begin_s)
        timetable.end(2, begin_s + 50.0)
        timetable.interrupt()
    assert [timetable.duration_s(position) for position in range(3)] == [None] * 3
    assert [timetable.gap_s(position) for position in range(3)] == [0.0] * 3


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["begin", "end"]), st.integers(0, 2), st.floats(0, 10)), max_size=80
    ),
    position=st.integers(0, 2),
)
def test_predictions_are_in_the_future_and_in_order_after_any_marks(
    steps: list[tuple[str, int, float]], position: int
) -> None:
    timetable = Timetable(3)
    now_s = 0.0
    for edge, at, passed_s in steps:
        now_s += passed_s
        (timetable.begin if edge == "begin" else timetable.end)(at, now_s)
    for ahead in (timetable.after_begin(position, now_s), timetable.after_end(position, now_s)):
        predictions = list(ahead)
        assert 1 <= len(predictions) <= 3
        assert [each.position for each in predictions] == list(
            range(position + 1, position + 1 + len(predictions))
        )
        time_s = now_s
        for each in predictions:
            assert each.begin_s >= time_s
            assert each.end_s is None or each.end_s >= each.begin_s
            time_s = each.end_s or each.begin_s
