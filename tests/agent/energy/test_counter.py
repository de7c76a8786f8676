"""What an energy counter shows: its changes, and whether it counts what power readings say."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.agent.energy.counter import ChangeDetector, CounterChange, PowerSample, disagreement


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


# --- Counters that count something else than the power readings --------------------------------------------


def samples(
    counter_w: float, power_w: float, swing_w: float = 0.0, count: int = 40, seed: int = 1
) -> list[PowerSample]:
    """Return samples at random times of a counter that moves every 0.1 s, and of a power that swings."""
    rng = random.Random(seed)
    times_s = [0.25 * index + rng.uniform(0, 0.2) for index in range(count)]
    return [
        PowerSample(time_s, counter_w * (time_s // 0.1 * 0.1), power_w + rng.choice((-1, 1)) * swing_w)
        for time_s in times_s
    ]


AGREES = "^$"
MORE = "expected the GPU's 90 W of its power readings, found 2[89]. W: it counts more than the GPU"


@pytest.mark.parametrize(
    ("counter_w", "power_w", "swing_w", "cause"),
    [
        (300.0, 300.0, 0.0, AGREES),
        (300.0, 300.0, 150.0, AGREES),
        (330.0, 300.0, 0.0, AGREES),
        (95.0, 75.0, 0.0, AGREES),
        (250.0, 300.0, 50.0, AGREES),
        (290.0, 90.0, 0.0, MORE),
        (900.0, 600.0, 100.0, "counts more than the GPU"),
        (100.0, 300.0, 0.0, "does not count all of the GPU's energy"),
    ],
)
def test_a_counter_of_more_or_less_than_the_gpu_is_named(
    counter_w: float, power_w: float, swing_w: float, cause: str
) -> None:
    assert re.search(cause, disagreement(samples(counter_w, power_w, swing_w)))


def test_a_mean_of_a_few_bursty_readings_is_not_exact() -> None:
    texts = {disagreement(samples(300.0, 300.0, 280.0, seed=seed)) for seed in range(300)}
    assert texts == {""}


def test_a_few_samples_say_nothing() -> None:
    assert disagreement([]) == ""
    assert disagreement(samples(290.0, 90.0, count=19)) == ""
