"""The incremental totals equal those of the whole ledger."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.ledger import EnergyGroup, EnergyHour, EnergySums, HourFilter, Rates, Reference
from perseus.service.domain.statement import LedgerTotals
from perseus.service.fleet.ledger import statement
from perseus.service.fleet.ledger_totals import OPEN_HOURS, WINDOW_HOURS, RunningTotals

NOW = Rates(0.25, 400.0)
LAST_HOUR = 3 * WINDOW_HOURS
ENERGY_J = st.floats(0.0, 1e9)


@st.composite
def hours(draw: st.DrawFn) -> EnergyGroup:
    """Draw an hour of one of two runs, with or without a baseline and rates."""
    hour = draw(st.integers(0, LAST_HOUR))
    is_compared = draw(st.booleans())
    count = draw(st.integers(0, 1000)) if is_compared else 0
    sums = EnergySums(
        iteration_count=count + 1,
        stock_energy_j=draw(ENERGY_J),
        uncompared_energy_j=0.0 if is_compared else draw(ENERGY_J),
        compared_count=count,
        compared_energy_j=draw(ENERGY_J) if count else 0.0,
    )
    reference = Reference(0, 10, draw(ENERGY_J), 0.0) if is_compared else None
    rates = draw(st.sampled_from([Rates(), Rates(0.5, 100.0)]))
    return EnergyGroup.of_hour("job", 0, draw(st.integers(1, 2)), EnergyHour(hour, reference, sums, rates))


def read(ledger: Sequence[EnergyGroup], window: HourFilter) -> list[EnergyGroup]:
    first, end = window.first_hour, window.end_hour
    assert first is not None
    found = [each for each in ledger if first <= each.first_hour and (end is None or each.first_hour < end)]
    return sorted(found, key=lambda each: each.run_number)


def added_up(totals: RunningTotals, ledger: Sequence[EnergyGroup], now_hour: int, now: Rates) -> int:
    """Read all requested windows; return the number of hours read."""
    hour_count = 0
    while True:
        window = totals.next_window(now_hour)
        groups = read(ledger, window)
        totals.add(window, groups, now)
        hour_count += len({each.first_hour for each in groups})
        if window.end_hour is None:
            return hour_count
        assert window.first_hour is not None
        assert window.end_hour - window.first_hour <= WINDOW_HOURS


def close(found: float | None, expected: float | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return found == pytest.approx(expected, rel=1e-9, abs=1e-3)


@given(st.lists(hours(), max_size=30), st.sampled_from([Rates(), NOW]), st.integers(0, LAST_HOUR))
def test_totals_equal_those_of_a_complete_statement(
    ledger: list[EnergyGroup], now: Rates, first_view: int
) -> None:
    totals = RunningTotals(0)
    added_up(totals, [each for each in ledger if each.first_hour <= first_view], first_view, now)
    added_up(totals, ledger, LAST_HOUR, now)
    whole = statement(sorted(ledger, key=lambda each: each.run_number), now).total
    found = totals.known
    assert found is not None
    assert close(found.energy_j, whole.energy_j.used)
    assert close(found.saved_energy_j, whole.energy_j.saved)
    for quantity, expected in ((found.cost, whole.cost), (found.carbon_g, whole.carbon_g)):
        assert (quantity is None) is (expected.used is None)
        if quantity is not None:
            assert close(quantity.used, expected.used)
            assert close(quantity.saved, expected.saved)


def hour(number: int) -> EnergyGroup:
    sums = EnergySums(1, stock_energy_j=100.0)
    return EnergyGroup.of_hour("job", 0, 1, EnergyHour(number, None, sums, NOW))


def test_past_hours_are_read_once_and_open_hours_again() -> None:
    totals, ledger = RunningTotals(0), [hour(number) for number in range(1001)]
    assert added_up(totals, ledger, 1000, NOW) == 1001
    assert added_up(totals, ledger, 1000, NOW) == OPEN_HOURS
    assert added_up(totals, [*ledger, hour(1001)], 1001, NOW) == OPEN_HOURS + 1
    assert totals.known is not None
    assert totals.known.energy_j == 100.0 * 1002


def test_totals_are_unknown_before_a_complete_pass_and_so_is_a_partial_cost() -> None:
    now_hour = 2 * WINDOW_HOURS
    totals = RunningTotals(0)
    totals.add(totals.next_window(now_hour), [hour(1)], NOW)
    assert totals.known is None
    unpriced = EnergyGroup.of_hour(
        "job", 0, 1, EnergyHour(now_hour, None, EnergySums(1, stock_energy_j=50.0), Rates())
    )
    added_up(totals, [unpriced], now_hour, NOW)
    assert totals.known is not None
    assert totals.known.cost is not None
    assert totals.known.cost.used == pytest.approx(150 / 3.6e6 * 0.25)
    added_up(totals, [unpriced], now_hour, Rates())
    assert totals.known == LedgerTotals(150.0, None, None, None)
