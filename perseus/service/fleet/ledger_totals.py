"""The ledger's totals, updated incrementally. Pure.

Past hours never change, so their sums are read once; those of open hours are read again each time. The totals
have no standard errors; `perseus.service.fleet.ledger` computes those.
"""

from collections.abc import Iterable

from perseus.service.domain.ledger import EnergyGroup, HourFilter, Rates
from perseus.service.domain.statement import LedgerTotals, Quantity
from perseus.service.fleet.ledger import statement

WINDOW_HOURS = 30 * 24
"""Hours read at a time: listings of the ledger wait meanwhile."""

OPEN_HOURS = 2
"""This hour, and the previous one, whose last records may not be stored yet."""


class RunningTotals:
    """Adds up the ledger from an hour on.

    Attributes:
        known: the totals as of the last complete pass; None before the first.
    """

    def __init__(self, first_hour: int) -> None:
        self.known: LedgerTotals | None = None
        self._begin_hour = first_hour
        self._closed = LedgerTotals()

    def next_window(self, now_hour: int) -> HourFilter:
        """Return the hours to read next: past ones, or finally the open ones."""
        end_hour = min(self._begin_hour + WINDOW_HOURS, now_hour + 1 - OPEN_HOURS)
        return HourFilter(self._begin_hour, end_hour if end_hour > self._begin_hour else None)

    def add(self, window: HourFilter, groups: Iterable[EnergyGroup], now: Rates) -> None:
        """Add the groups of a requested window; `now` are the rates where none were known."""
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
    """Return the amounts used and saved; None without rates."""
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
