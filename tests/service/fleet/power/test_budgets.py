"""Which budget counts when, and how the ceiling comes to it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.errors import InvalidFieldError
from perseus.service.fleet.power.budgets import (
    Budget,
    Feed,
    goal_w,
    limit_w,
    moved_ceiling_w,
    next_change_s,
    percent_of_reference_w,
)

FEED = Feed("a", reference_w=1000.0, ramp_down_w_per_s=10.0, ramp_up_w_per_s=5.0)
SHORT = Budget("short", "a", 600.0, 100.0, 200.0)
LONG = Budget("long", "a", 800.0, 50.0)

budgets = st.lists(
    st.builds(
        lambda number, limit, start, length: Budget(f"b{number}", "a", limit, start, start + length),
        st.integers(0, 9),
        st.integers(100, 900).map(float),
        st.integers(0, 300).map(float),
        st.integers(1, 200).map(float),
    ),
    max_size=4,
)


def test_the_lowest_in_force_counts() -> None:
    at_s = (0.0, 50.0, 100.0, 199.9, 200.0)
    assert [limit_w([SHORT, LONG], now_s) for now_s in at_s] == [math.inf, 800.0, 600.0, 600.0, 800.0]


def test_changes_are_known_in_advance() -> None:
    assert [next_change_s([SHORT, LONG], now_s) for now_s in (0, 50, 100, 200)] == [50, 100, 200, math.inf]


def test_percent_is_of_the_reference() -> None:
    assert percent_of_reference_w(FEED, 75) == 750
    with pytest.raises(
        InvalidFieldError, match="a reference of feed 'b', for a limit in percent, found none"
    ):
        percent_of_reference_w(Feed("b"), 75)


def test_a_budget_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="end_s: expected after the start, 10, found 10"):
        Budget("b", "a", 1.0, 10.0, 10.0)


def test_a_ramp_has_to_be_positive() -> None:
    with pytest.raises(InvalidFieldError, match="ramp_up_w_per_s: expected more than 0, found 0"):
        Feed("a", ramp_up_w_per_s=0)


@given(budgets, st.floats(0, 2000))
def test_the_ceiling_keeps_every_budget_known_in_advance_within_its_ramps(
    some: list[Budget], drawn_w: float
) -> None:
    """All budgets are known long before they start."""
    ceiling = moved_ceiling_w(FEED, math.inf, drawn_w, goal_w(some, FEED, -500.0), 0.0)
    for now_s in range(-499, 600):
        before, ceiling = ceiling, moved_ceiling_w(FEED, ceiling, drawn_w, goal_w(some, FEED, now_s), 1.0)
        assert ceiling <= limit_w(some, now_s) + 1e-6
        if math.isfinite(before):
            assert -FEED.ramp_down_w_per_s - 1e-6 <= ceiling - before <= FEED.ramp_up_w_per_s + 1e-6


def test_a_budget_that_is_set_at_once_falls_from_what_is_drawn() -> None:
    ceiling = moved_ceiling_w(FEED, math.inf, 1000.0, 700.0, 1.0)
    assert ceiling == 990.0
    assert moved_ceiling_w(FEED, ceiling, 1000.0, 700.0, 60.0) == 700.0


def test_the_ceiling_rises_by_the_ramp_after_the_last_budget() -> None:
    assert moved_ceiling_w(FEED, 700.0, 650.0, math.inf, 2.0) == 710.0
    assert moved_ceiling_w(Feed("free"), 700.0, 650.0, math.inf, 2.0) == math.inf
