import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.agent.energy.counter import ChangeDetector, CounterChange


def test_only_changes_are_kept_at_the_midpoint_of_their_poll_interval() -> None:
    detector = ChangeDetector()
    polls = [(0.0, 0.25, 5.0), (1.0, 1.25, 5.0), (2.0, 2.25, 7.0), (3.0, 3.25, 7.0), (4.0, 4.25, 8.0)]
    changes = [detector.poll(*poll, 0) for poll in polls]
    assert changes == [
        None,
        None,
        CounterChange(time_s=1.625, energy_j=7.0, uncertainty_s=0.625),
        None,
        CounterChange(time_s=3.625, energy_j=8.0, uncertainty_s=0.625),
    ]


@pytest.mark.parametrize(
    ("polls", "expected"),
    [
        # A reason seen in the poll that sees the change may belong to either side of it: it is on both.
        (
            [(5.0, 1, 0), (5.0, 4, 0), (7.0, 0, 0), (7.0, 0, 0), (8.0, 32, 0), (9.0, 0, 0), (10.0, 0, 0)],
            [(5, 0), (32, 0), (32, 0), (0, 0)],
        ),
        (
            [(5.0, 0, 0), (5.0, 4, 1200), (7.0, 4, 1100), (7.0, 0, 0), (8.0, 0, 0), (9.0, 0, 0)],
            [(4, 1200), (4, 1100), (0, 0)],
        ),
    ],
    ids=["reasons", "the highest clock of a throttled GPU"],
)
def test_a_change_contains_what_was_read_since_the_last(
    polls: list[tuple[float, int, int]], expected: list[tuple[int, int]]
) -> None:
    detector = ChangeDetector()
    changes = [detector.poll(time_s, time_s, *poll) for time_s, poll in enumerate(polls)]
    assert [(each.clock_event_reasons, each.capped_clock_mhz) for each in changes if each] == expected


@given(
    period_s=st.floats(0.02, 0.1),
    phase_s=st.floats(0, 1),
    intervals_s=st.lists(st.floats(0.001, 0.015), min_size=50, max_size=100),
)
def test_the_true_moment_of_change_lies_within_the_uncertainty(
    period_s: float, phase_s: float, intervals_s: list[float]
) -> None:
    detector, now_s, found = ChangeDetector(), 0.0, 0
    for interval_s in intervals_s:
        now_s += interval_s
        step = (now_s - phase_s) // period_s
        change = detector.poll(now_s - 1e-4, now_s + 1e-4, step, 0)
        if change is not None:
            found += 1
            assert abs(change.time_s - (phase_s + change.energy_j * period_s)) <= change.uncertainty_s + 1e-9
    assert found >= (now_s - 0.015) // period_s - 1
