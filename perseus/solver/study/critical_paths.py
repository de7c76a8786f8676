"""The critical paths of many iterations of one schedule at once, with array operations over all of them.

Computations are laid out by level: a computation's predecessors are on earlier levels. So evaluation is one
loop over levels, for any number of iterations and stages.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perseus.solver.computation import Computation, Kind
from perseus.solver.order_table import OrderTable
from perseus.solver.schedule import Schedule
from perseus.solver.study.transfers import Transfers, lagged_arcs

Int64Array = NDArray[np.int64]


class Link(NamedTuple):
    """A pair of stages between which activations (or gradients) travel."""

    is_activation: bool
    sender: int
    receiver: int


class CriticalPath(NamedTuple):
    """One longest path through each iteration; deterministic among equal paths.

    Shapes are (iterations,), (iterations, links) and (iterations, sought).
    """

    lengths_ps: Int64Array
    link_counts: Int64Array
    """How often the path waits for each link's lag."""
    sought_counts: Int64Array
    """How often it passes each of the sought computations: 0 or 1."""


class CriticalPaths:
    """A schedule with computations' times and links' lags as arrays.

    Attributes:
        computations: the schedule's computations in order: rows of durations.
        links: all links with a lag, sorted: entries of lags.

    Raises:
        ScheduleError: transfers that occupy their stages would deadlock.
    """

    def __init__(self, schedule: Schedule, transfers: Transfers) -> None:
        self.computations = tuple(schedule.computations)
        links = [_link(*pair) for pair in schedule.dependencies]
        self.links: Sequence[Link] = sorted(set(links))
        # Slot 0 is for arcs without any lag, slot k + 1 for link k.
        slot_of = {link: slot for slot, link in enumerate(self.links, 1)}
        slot_of_dependency = np.array([slot_of[link] for link in links], np.int64)
        lagged = lagged_arcs(schedule, transfers)
        in_order = _in_order(schedule)
        earlier = np.concatenate((in_order - 1, lagged[:, 0]))
        later = np.concatenate((in_order, lagged[:, 1]))
        slots = np.concatenate((np.zeros(len(in_order), np.int64), slot_of_dependency[lagged[:, 2]]))
        self.occurrence_counts = np.bincount(slot_of_dependency, minlength=len(self.links) + 1)[1:]
        levels = OrderTable(schedule.orders).levels(lagged[:, :2])
        self._order = np.argsort(levels, kind="stable")
        self._row_of = np.argsort(self._order)
        self._bounds = np.cumsum([0, *np.bincount(levels).tolist()]).tolist()
        self._earlier, self._slots = self._lay_out(self._row_of[earlier], self._row_of[later], slots)

    def lengths_ps(self, durations_ps: Int64Array, lags_ps: Int64Array) -> Int64Array:
        """Return the iteration times.

        Durations have shape (computations, iterations); lags (links,), or (links, iterations) for individual
        lags.
        """
        lengths_ps: Int64Array = self._finishes_ps(durations_ps, lags_ps).max(axis=0)
        return lengths_ps

    def critical(
        self, durations_ps: Int64Array, lags_ps: Int64Array, sought: Sequence[int] = ()
    ) -> CriticalPath:
        """Return a longest path of each iteration, and how often it passes links and ``sought`` rows.

        Durations have shape (computations, iterations), lags (links,).
        """
        finishes_ps = self._finishes_ps(durations_ps, lags_ps)
        slot_ps = np.concatenate(([0], lags_ps))
        cases = np.arange(durations_ps.shape[1])
        begin = len(self.computations)
        link_counts = np.zeros((len(cases), len(self.links) + 1), np.int64)
        visits = np.zeros((len(cases), begin + 1), np.bool_)
        at = finishes_ps[:begin].argmax(axis=0)
        while (at != begin).any():
            visits[cases, at] = True
            ready_ps = finishes_ps[self._earlier[:, at], cases] + slot_ps[self._slots[:, at]]
            chosen = ready_ps.argmax(axis=0)
            link_counts[cases, self._slots[chosen, at]] += 1
            at = self._earlier[chosen, at]
        rows = self._row_of[list(sought)] if sought else np.zeros(0, np.int64)
        return CriticalPath(finishes_ps.max(axis=0), link_counts[:, 1:], visits[:, rows].astype(np.int64))

    def _lay_out(
        self, earlier: Int64Array, later: Int64Array, slots: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Return each row's arcs as columns of (rows before, slots), padded by repeating its first.

        The row after the last one is the iteration's begin, on which all rows without other predecessors
        wait.
        """
        count = len(self.computations)
        by_later = np.lexsort((slots, earlier, later))
        earlier, later, slots = earlier[by_later], later[by_later], slots[by_later]
        in_degrees = np.bincount(later, minlength=count)
        place = np.arange(len(later)) - np.repeat(np.cumsum(in_degrees) - in_degrees, in_degrees)
        depth = max(1, int(in_degrees.max(initial=0)))
        before = np.full((depth, count + 1), -1, np.int64)
        slot = np.zeros((depth, count + 1), np.int64)
        before[place, later], slot[place, later] = earlier, slots
        before[0, before[0] < 0] = count
        is_padding = before < 0
        return np.where(is_padding, before[0], before), np.where(is_padding, slot[0], slot)

    def _finishes_ps(self, durations_ps: Int64Array, lags_ps: Int64Array) -> Int64Array:
        """Return each row's end, plus a row for the begin."""
        lags_ps = lags_ps if lags_ps.ndim == 2 else lags_ps[:, None]
        slot_ps = np.concatenate((np.zeros((1, lags_ps.shape[1]), np.int64), lags_ps))
        durations_ps = durations_ps[self._order]
        finishes_ps = np.zeros((len(durations_ps) + 1, durations_ps.shape[1]), np.int64)
        for begin, end in pairwise(self._bounds):
            ready_ps = finishes_ps[self._earlier[:, begin:end]] + slot_ps[self._slots[:, begin:end]]
            finishes_ps[begin:end] = ready_ps.max(axis=0) + durations_ps[begin:end]
        return finishes_ps


def _in_order(schedule: Schedule) -> Int64Array:
    """Return the indices of all computations but the first of each stage."""
    lengths = [len(order) for order in schedule.orders]
    firsts = np.cumsum([0, *lengths])[:-1]
    return np.setdiff1d(np.arange(sum(lengths)), firsts)


def _link(earlier: Computation, later: Computation) -> Link:
    return Link(later.kind is Kind.FORWARD, earlier.stage, later.stage)
