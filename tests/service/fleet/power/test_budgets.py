"""Which limit applies when, and how the power cap reaches it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.power import Budget, Feed, percent_of_reference_w
from perseus.service.fleet.power.budgets import goal_w, limit_w, next_change_s, ramped_power_cap_w

FEED = Feed("a", reference_w=1000.0, ramp_down_w_per_s=10.0, ramp_up_w_per_s=5.0)
RAMPS_W_PER_S = (10.0, 5.0)
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


def test_the_lowest_limit_in_force_applies() -> None:
    at_s = (0.0, 50.0, 100.0, 199.9, 200.0)
    assert [limit_w([SHORT, LONG], FEED, now_s) for now_s in at_s] == [math.inf, 800.0, 600.0, 600.0, 800.0]


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


@given(budgets, st.floats(0, 2000), st.none() | st.floats(100, 900))
def test_the_power_cap_keeps_every_budget_known_in_advance_within_its_ramps(
    some: list[Budget], drawn_w: float, default_w: float | None
) -> None:
    """All budgets, and the default after the last one, are known long before they start."""
    feed = replace(FEED, default_w=default_w)
    power_cap_w = math.inf if default_w is None else default_w
    for now_s in range(-500, 600):
        goal, down_w_per_s = goal_w(some, feed, now_s)
        before, power_cap_w = (
            power_cap_w,
            ramped_power_cap_w(power_cap_w, drawn_w, goal, (down_w_per_s, 5.0), 1.0),
        )
        assert power_cap_w <= limit_w(some, feed, now_s) + 1e-6
        if math.isfinite(before):
            assert -FEED.ramp_down_w_per_s - 1e-6 <= power_cap_w - before <= FEED.ramp_up_w_per_s + 1e-6


def test_the_cap_of_an_immediate_budget_falls_from_the_present_power() -> None:
    power_cap_w = ramped_power_cap_w(math.inf, 1000.0, 700.0, RAMPS_W_PER_S, 1.0)
    assert power_cap_w == 990.0
    assert ramped_power_cap_w(power_cap_w, 1000.0, 700.0, RAMPS_W_PER_S, 60.0) == 700.0


def test_the_power_cap_rises_by_the_ramp_after_the_last_budget() -> None:
    assert ramped_power_cap_w(700.0, 650.0, math.inf, RAMPS_W_PER_S, 2.0) == 710.0
    assert ramped_power_cap_w(700.0, 650.0, math.inf, (math.inf, math.inf), 2.0) == math.inf


def test_a_default_applies_without_a_budget_and_the_rating_always() -> None:
    feed = Feed("a", limit_w=900.0, default_w=700.0)
    high = Budget("high", "a", 850.0, 100.0, 200.0)
    above = Budget("above", "a", 950.0, 150.0, 300.0)
    at_s = (0.0, 100.0, 199.0, 250.0, 300.0)
    assert [limit_w([high, above], feed, now_s) for now_s in at_s] == [700.0, 850.0, 850.0, 900.0, 700.0]


def test_the_power_cap_is_at_the_default_when_the_last_budget_ends() -> None:
    feed = Feed("a", default_w=500.0, ramp_down_w_per_s=10.0)
    some = [Budget("first", "a", 800.0, 0.0, 100.0), Budget("second", "a", 900.0, 50.0, 200.0)]
    assert [goal_w(some, feed, now_s)[0] for now_s in (0.0, 100.0, 190.0, 200.0)] == [
        800.0,
        900.0,
        600.0,
        500.0,
    ]
    assert goal_w([Budget("for good", "a", 800.0, 0.0)], feed, 0.0)[0] == 800.0


def test_the_cap_falls_no_faster_than_the_budgets_ramp_or_the_feeds() -> None:
    slow, fast = (Budget("b", "a", 600.0, 100.0, ramp_w_per_s=ramp) for ramp in (2.0, 50.0))
    assert goal_w([slow], FEED, 0.0) == (800.0, 2.0)
    assert goal_w([fast], FEED, 0.0) == (1600.0, 10.0)
    assert goal_w([slow], FEED, 100.0) == (600.0, 2.0)
