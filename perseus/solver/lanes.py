"""Choices under search for many deadlines: a lane each, several for deadlines of more interest."""

from collections.abc import Set

import numpy as np

from perseus.solver.columns import Columns, FloatArray, Rungs
from perseus.solver.graph import Int64Array


class Lanes:
    """A choice per lane, as columns, and what is known of its deadline.

    Attributes:
        index_of: per lane, the index of its deadline; the first lanes are one for each, in their order.
        deadline_count: how many deadlines there are.
        choices, prices: a column a lane.
        deadlines_ps: one a lane.
        energies_j: about what an iteration takes in all.
    """

    def __init__(self, columns: Columns, index_of: Int64Array) -> None:
        """Begin with nothing known."""
        self._columns = columns
        self.index_of = index_of
        self.deadline_count = int(index_of.max()) + 1
        shape = columns.row_count, len(index_of)
        self.choices: Int64Array = np.empty(shape, dtype=np.int64)
        self.prices: Rungs = np.empty(shape, dtype=np.int8)
        self.deadlines_ps: Int64Array = np.empty(len(index_of), dtype=np.int64)
        self.energies_j = np.empty(len(index_of))
        self._bounds_j = np.empty(len(index_of))

    def of(self, index: int) -> Int64Array:
        """Return a deadline's lanes."""
        return np.flatnonzero(self.index_of == index)

    def set_target(
        self, index: int, deadline_ps: int, bound_j: float, energy_j: float, prices: Rungs
    ) -> None:
        """Say what is known of a deadline: bounds of effective energy and energy, a column of prices."""
        lanes = self.of(index)
        self.deadlines_ps[lanes], self._bounds_j[lanes], self.energies_j[lanes] = (
            deadline_ps,
            bound_j,
            energy_j,
        )
        self.prices[:, lanes] = prices

    def put_best_first(self) -> None:
        """Let the first lane of each deadline have the cheapest of its choices."""
        for index in np.unique(self.index_of[self.deadline_count :]).tolist():
            lanes, best = self.of(index), self.best(index)
            self.choices[:, [lanes[0], best]] = self.choices[:, [best, lanes[0]]]

    def effective_energies_j(self) -> FloatArray:
        """Return what each lane costs."""
        return self._columns.effective_energies_j(self.choices)

    def excess_share(self, lane: int, effective_j: float) -> float:
        """Return how far such a choice in a lane would be above its bound, as a share of the energy."""
        return float((effective_j - self._bounds_j[lane]) / self.energies_j[lane])

    def excess_shares(self) -> FloatArray:
        """Return how far each lane is above its bound, as a share of the energy."""
        found: FloatArray = (self.effective_energies_j() - self._bounds_j) / self.energies_j
        return found

    def farthest(self, without: Set[int]) -> int:
        """Return the index of the deadline whose best choice is farthest above its bound, but for some."""
        nearest = np.full(self.deadline_count, np.inf)
        np.minimum.at(nearest, self.index_of, self.excess_shares())
        nearest[list(without)] = -np.inf
        return int(nearest.argmax())

    def above(self, share: float) -> Int64Array:
        """Return the lanes that are above their bound by more than a share of the energy."""
        return np.flatnonzero(self.excess_shares() > share)

    def best(self, index: int) -> int:
        """Return the lane of a deadline's cheapest choice."""
        lanes = self.of(index)
        return int(lanes[self._columns.effective_energies_j(self.choices[:, lanes]).argmin()])
