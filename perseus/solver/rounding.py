"""From relaxed plans to measured clocks, without ever missing the deadline.

A relaxed plan runs computations for durations between two measured ones. Each computation gets a measured
clock that ends it by its planned finish, so that what one leaves over the next one can use: one way the
slowest that does, others the one that is worth its price.
"""

import numpy as np

from perseus.solver.columns import Choice, Columns, Rungs
from perseus.solver.graph import EventGraph, Int64Array

_RUNGS_BELOW = (None, 8, 3, 1)
"""The ways: to the slowest option that fits, and to those worth their price, in rungs below a computation's
own (see :meth:`Columns.price_of`): time that is left over goes to a later one, which may reach the next
vertex of its hull with it. None of these is best everywhere."""

ROUNDING_COUNT = len(_RUNGS_BELOW)


class Roundings:
    """Rounds relaxed plans of one event graph, to choices as columns."""

    def __init__(self, graph: EventGraph, columns: Columns) -> None:
        self._columns = columns
        order = columns.computation_of
        self._start, self._finish = graph.start_event[order], graph.finish_event[order]

    def of(self, relaxed_ps: Int64Array) -> tuple[Int64Array, Rungs]:
        """Return a relaxed plan's finishes and prices, from its events' times, as columns."""
        finishes_ps = relaxed_ps[self._finish][:, None]
        return finishes_ps, self._columns.price_of(finishes_ps - relaxed_ps[self._start][:, None])

    def cheapest(self, relaxed_ps: Int64Array) -> Choice:
        """Return what costs the least of what a relaxed plan, its events' times, is rounded to."""
        rounded = self.round(*self.of(relaxed_ps))
        best = int(self._columns.effective_energies_j(rounded).argmin())
        choice: Choice = self._columns.to_choices(rounded)[best].tolist()
        return choice

    def round(self, finishes_ps: Int64Array, prices: Rungs) -> Int64Array:
        """Return relaxed plans rounded in all ways: all in one way first, then all in the next."""
        columns = self._columns
        return np.concatenate(
            [
                columns.within_finishes(
                    finishes_ps, None if below is None else columns.with_prices(prices - below)
                )
                for below in _RUNGS_BELOW
            ],
            axis=1,
        )
