"""The ledger's totals, kept up to date at the cost of what is new. Pure.

An hour that is over is never written to again, so its sums are taken once; those of the hours that go on are
taken again and again. What is added up here has no standard error: `perseus.service.fleet.ledger` tells that.
"""

from collections.abc import Iterable

from perseus.service.domain.ledger import EnergyGroup, HourFilter, Rates
from perseus.service.domain.statement import LedgerTotals, Quantity
from perseus.service.fleet.ledger import statement

WINDOW_HOURS = 30 * 24
"""Hours read at a time: the store does nothing else meanwhile."""

OPEN_HOURS = 2
"""The last ones: this one, and the one before, of which something may still wait to be stored."""


class RunningTotals:
    """Adds up the ledger from an hour on.

    Attributes:
        known: the totals as of the last time that all was added up; None before.
    """

    def __init__(self, first_hour: int) -> None:
        self.known: LedgerTotals | None = None
        self._begin_hour = first_hour
        self._closed = LedgerTotals()

    def next_window(self, now_hour: int) -> HourFilter:
        """Return what is to be read next: hours that are over, or at the end those that go on."""
        end_hour = min(self._begin_hour + WINDOW_HOURS, now_hour + 1 - OPEN_HOURS)
        return HourFilter(self._begin_hour, end_hour if end_hour > self._begin_hour else None)

    def add(self, window: HourFilter, groups: Iterable[EnergyGroup], now: Rates) -> None:
        """Take what was read of a window that was asked for; `now` holds where no rates were known."""
        total = statement(groups, now).total
        found = _sum(
            self._closed,
            LedgerTotals(
                total.sums.energy_j, total.energy_j.saved, _plain(total.cost), _plain(total.carbon_g)
            ),
        )
        if window.end_hour is None:
            self.known = found
        else:
            self._begin_hour, self._closed = window.end_hour, found


def _plain(quantity: Quantity) -> Quantity | None:
    """Return what was used and saved; None where there are no rates."""
    return None if quantity.used is None else Quantity(quantity.used, quantity.saved)


def _sum(one: LedgerTotals, other: LedgerTotals) -> LedgerTotals:
    return LedgerTotals(
        one.energy_j + other.energy_j,
        _known_sum(one.saved_energy_j, other.saved_energy_j),
        _sum_of_weighted(one.cost, other.cost),
        _sum_of_weighted(one.carbon_g, other.carbon_g),
    )


def _sum_of_weighted(one: Quantity | None, other: Quantity | None) -> Quantity | None:
    if one is None or other is None:
        return None  # a part would look like the whole
    return Quantity((one.used or 0.0) + (other.used or 0.0), _known_sum(one.saved, other.saved))


def _known_sum(one: float | None, other: float | None) -> float | None:
    return None if one is None and other is None else (one or 0.0) + (other or 0.0)
