"""The cheapest mixture of two plans, by a minimum cut.

A plan gives every event of the iteration a time, and each computation runs at the cheapest measured clock
that fits between its two events. Each event of a mixture takes its time from one of two plans, so a
computation has one of four durations. A minimum cut of the event graph finds the cheapest mixture: one side
keeps the first plan's times, the other takes the second's (a fusion move: Lempitsky et al., "Fusion Moves for
Markov Random Field Optimization", IEEE TPAMI 32(8), 2010).

A cut represents energies exactly only if keeping both times plus taking both costs no more than the two ways
of having one of each. Measured clocks far above their hull may violate this; one of the latter two then
counts as dearer than it is. So the result is never dearer than the first plan, but perhaps not the very
cheapest mixture.
"""

import igraph
import numpy as np

from perseus.solver.columns import Columns
from perseus.solver.graph import EventGraph, Int64Array

_UNCUT = 2.0**45
"""More than all other capacities together; all are whole numbers, which igraph adds without rounding."""


class Fusion:
    """Mixes plans of one event graph. Times of events are arrays of shape (events,), in ps."""

    def __init__(self, graph: EventGraph, columns: Columns) -> None:
        self._columns = columns
        order = columns.computation_of
        self._start, self._finish = graph.start_event[order], graph.finish_event[order]
        self._tail, self._head, self._lag_ps = graph.tail_event, graph.head_event, graph.lag_ps
        self._fastest_ps = columns.times_ps[columns.fastest]
        self._event_count = count = graph.event_count
        self._keeping, self._taking = count, count + 1
        computations = list(zip(self._start.tolist(), self._finish.tolist(), strict=True))
        dependencies = list(zip(self._tail.tolist(), self._head.tolist(), strict=True))
        self._network = igraph.Graph(
            count + 2,
            [
                *computations,
                *((finish, start) for start, finish in computations),
                *dependencies,
                *((head, tail) for tail, head in dependencies),
                *((self._keeping, event) for event in range(count)),
                *((event, self._taking) for event in range(count)),
            ],
            directed=True,
        )

    def times_ps(self, choices: Int64Array) -> Int64Array:
        """Return the earliest times of the events, one column per column of choices."""
        durations_ps = self._columns.times_ps[choices]
        finishes_ps = self._columns.earliest_finishes_ps(durations_ps)[:-1]
        times_ps = np.empty((self._event_count, choices.shape[1]), dtype=np.int64)
        times_ps[self._finish] = finishes_ps
        # A start that is one event with finishes is the latest of them.
        times_ps[self._start] = finishes_ps - durations_ps
        times_ps[-1] = finishes_ps.max(axis=0)
        return times_ps

    def choice(self, times_ps: Int64Array) -> Int64Array:
        """Return the slowest options that fit between the events, as a column of choices."""
        durations_ps = (times_ps[self._finish] - times_ps[self._start])[:, None]
        return self._columns.slowest_within(slice(None), durations_ps, None)

    def fuse(self, times_ps: Int64Array, others_ps: Int64Array, deadline_ps: int) -> Int64Array:
        """Return the times of the cheapest mixture.

        Args:
            times_ps: events' times of a plan that meets the deadline.
            others_ps: events' times of another plan, which may be shifted: it may begin before 0 and end
                after the deadline. The mixture does not.
            deadline_ps: the iteration time to meet.
        """
        start, finish, tail, head = self._start, self._finish, self._tail, self._head
        durations_ps = np.stack(
            (
                times_ps[finish] - times_ps[start],
                others_ps[finish] - times_ps[start],
                times_ps[finish] - others_ps[start],
                others_ps[finish] - others_ps[start],
            ),
            axis=1,
        )
        is_short = durations_ps < self._fastest_ps
        found = self._columns.slowest_within(slice(None), np.maximum(durations_ps, self._fastest_ps), None)
        kept_j, late_j, early_j, taken_j = self._columns.energies_j[found].T
        _, is_never_late, is_never_early, _ = is_short.T
        late_j = np.where(is_never_late, taken_j, late_j)
        # An impossible combination gets the energy that needs no extra arc; an arc that is never cut forbids
        # it.
        early_j = np.where(is_never_early, kept_j + taken_j - late_j, early_j)
        taking_j = np.bincount(start, early_j - kept_j, self._event_count)
        taking_j += np.bincount(finish, taken_j - early_j, self._event_count)
        between_j = np.maximum(late_j + early_j - kept_j - taken_j, 0.0)
        scale = _UNCUT / 2 / (1.0 + between_j.sum() + np.abs(taking_j).sum())
        keeping = np.maximum(taking_j, 0.0) * scale
        if others_ps[0] != 0:
            keeping[0] = _UNCUT
        if others_ps[-1] > deadline_ps:
            keeping[-1] = _UNCUT
        capacities = (
            np.where(is_never_late, _UNCUT, between_j * scale),
            np.where(is_never_early, _UNCUT, 0.0),
            np.where(others_ps[head] - times_ps[tail] < self._lag_ps, _UNCUT, 0.0),
            np.where(times_ps[head] - others_ps[tail] < self._lag_ps, _UNCUT, 0.0),
            keeping,
            np.maximum(-taking_j, 0.0) * scale,
        )
        _, _, _, kept = igraph.GraphBase.maxflow(
            self._network, self._keeping, self._taking, np.rint(np.concatenate(capacities)).tolist()
        )
        is_kept = np.zeros(self._event_count + 2, dtype=bool)
        is_kept[kept] = True
        return np.where(is_kept[: self._event_count], times_ps, others_ps)
