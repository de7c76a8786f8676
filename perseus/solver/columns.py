"""Many choices of options over one event graph at once: one row per computation, one column per choice.

Computations are laid out by level: a computation's predecessors are on earlier levels. Each operation applies
to a whole level and all columns at once. So a pass over the iteration takes a few array operations per level,
not a few steps of Python per computation and choice.

A cell holds its option's index in one flat list of all profiles' options, each profile's fastest first: the
next faster option is one place before, the next slower one after.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perseus.solver.graph import EventGraph, Int64Array
from perseus.solver.scale import PS_PER_SCALED_S, UW_PER_W

FloatArray = NDArray[np.float64]

Choice = list[int]
"""Per computation of the graph, the index of its chosen option."""

PriceLevels = NDArray[np.int8]
"""Indices of price levels."""

PRICE_COUNT = 64
PRICE_RATIO = 1.2
"""Ratio of each price level to the one below."""

_Arcs = tuple[tuple[Int64Array, Int64Array | None], ...]
"""Per arc of a level's computations: the rows at the other ends, and the lags unless all are 0."""


@dataclass(frozen=True, slots=True)
class Level:
    """A set of computations that don't wait for each other.

    Attributes:
        rows: rows of these computations.
        before, after: arcs from their predecessors and to their successors. Computations with fewer arcs than
            others of the level are padded with arcs to the row after the last, which is the iteration's begin
            and end.
    """

    rows: slice
    before: _Arcs
    after: _Arcs


class Columns:
    """One event graph, laid out for passes over many choices.

    Attributes:
        row_of: per computation of the graph, its row.
        computation_of: per row, its computation.
        levels: in topological order.
        times_ps, energies_j: per option, its time and effective energy.
        faster_vertices: per option, the index of the next faster one that is a vertex of the hull, or of the
            fastest one.
        fastest: per row, the index of its fastest option, as a column.
    """

    def __init__(self, graph: EventGraph) -> None:
        self.row_count = len(graph.computations)
        self._lay_out(graph)
        self._list_options(graph)
        self._price(graph)

    def earliest_finishes_ps(self, durations_ps: Int64Array) -> Int64Array:
        """Return each computation's earliest finish; the last row is the iteration's begin."""
        finishes_ps = np.zeros((self.row_count + 1, durations_ps.shape[1]), dtype=np.int64)
        for level in self.levels:
            starts_ps = latest_of(finishes_ps, level.before)
            rows = level.rows
            finishes_ps[rows] = durations_ps[rows] if starts_ps is None else starts_ps + durations_ps[rows]
        return finishes_ps

    def iteration_times_ps(self, choices: Int64Array) -> Int64Array:
        """Return each column's iteration time."""
        found: Int64Array = self.earliest_finishes_ps(self.times_ps[choices]).max(axis=0)
        return found

    def effective_energies_j(self, choices: Int64Array) -> FloatArray:
        """Return each column's effective energy."""
        found: FloatArray = self.energies_j[choices].sum(axis=0)
        return found

    def slowest_within(self, rows: slice, times_ps: Int64Array, prices: Int64Array | None) -> Int64Array:
        """Return each cell's slowest option within a time; its fastest option must be within it.

        With prices, return the cheapest option within it, counting its time at that price.
        """
        keys = np.minimum(times_ps, self._slowest_ps[rows])
        keys += self._key_offset[rows]
        found: Int64Array = self._keys.searchsorted(keys, "right")
        found -= 1
        if prices is not None:
            found = self._cheapest[prices[rows] + found]
        return found

    def within_finishes(self, finishes_ps: Int64Array, prices: Int64Array | None) -> Int64Array:
        """Return choices that end every computation by a given time; unused time passes to the next one.

        Each is the slowest option that fits; with prices, the cheapest that fits, counting its time at that
        price.
        """
        choices = np.empty_like(finishes_ps)
        ends_ps = np.zeros((self.row_count + 1, finishes_ps.shape[1]), dtype=np.int64)
        for level in self.levels:
            starts_ps = latest_of(ends_ps, level.before)
            rows = level.rows
            if starts_ps is None:
                starts_ps = np.zeros_like(finishes_ps[rows])
            choices[rows] = self.slowest_within(rows, finishes_ps[rows] - starts_ps, prices)
            ends_ps[rows] = starts_ps + self.times_ps[choices[rows]]
        return choices

    def price_of(self, durations_ps: Int64Array) -> PriceLevels:
        """Return the approximate value of time to each computation with this relaxed duration, as a price
        level.

        Each of the ``PRICE_COUNT`` levels is ``PRICE_RATIO`` times the one before, and the lowest is 0.
        """
        keys = np.minimum(durations_ps, self._slowest_ps)
        keys += self._key_offset
        faster = self._hull_keys.searchsorted(keys, "left")
        slower = self._hull_keys.searchsorted(keys, "right")
        between: PriceLevels = (self._hull_prices[faster] + self._hull_prices[slower]) // 2
        return between

    def with_prices(self, price_levels: PriceLevels) -> Int64Array:
        """Convert price levels to the form that :meth:`slowest_within` takes."""
        return np.clip(price_levels, 0, PRICE_COUNT - 1).astype(np.int64) * len(self.times_ps)

    def to_columns(self, choices: Sequence[Sequence[int]] | NDArray[np.int16]) -> Int64Array:
        """Convert choices (a row each, option indices per computation) to columns."""
        return self.fastest + np.asarray(choices, dtype=np.int64).T[self.computation_of]

    def to_choices(self, columns: Int64Array) -> NDArray[np.int16]:
        """Convert columns to choices: one row per column, option indices in the order of computations."""
        return (columns - self.fastest)[self.row_of].T.astype(np.int16)

    def _lay_out(self, graph: EventGraph) -> None:
        count = self.row_count
        level_of = [0] * count
        for earlier, later, _ in graph.dependencies:
            level_of[later] = max(level_of[later], level_of[earlier] + 1)
        self.computation_of: Int64Array = np.argsort(np.array(level_of, dtype=np.int64), kind="stable")
        self.row_of: Int64Array = np.argsort(self.computation_of)
        row_of = self.row_of.tolist()
        before: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        after: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        for earlier, later, lag_ps in graph.dependencies:
            before[row_of[later]].append((row_of[earlier], lag_ps))
            after[row_of[earlier]].append((row_of[later], lag_ps))
        ends = np.cumsum(np.bincount(level_of)).tolist()
        self.levels = [
            Level(slice(begin, end), _arcs(before[begin:end], count), _arcs(after[begin:end], count))
            for begin, end in zip([0, *ends], ends, strict=False)
        ]

    def _list_options(self, graph: EventGraph) -> None:
        sizes = [len(options) for options in graph.options]
        firsts = np.concatenate(([0], np.cumsum(sizes)))
        self.times_ps = np.array([o.time_ps for some in graph.options for o in some], dtype=np.int64)
        self.energies_j = np.array([o.effective_energy_j for some in graph.options for o in some])
        # One sorted array of all options: each profile's times are offset beyond the previous profile's
        # slowest.
        offsets, last = [], 0
        for some in graph.options:
            offsets.append(last)
            last += some[-1].time_ps + 2
        self._keys = self.times_ps + np.repeat(np.array(offsets, dtype=np.int64), sizes)
        profile_of = graph.profile_of[self.computation_of][:, None]
        self._key_offset = np.array(offsets, dtype=np.int64)[profile_of]
        self.fastest: Int64Array = firsts[profile_of]
        self._slowest_ps = self.times_ps[firsts[1:] - 1][profile_of]
        self._firsts = firsts
        self._offsets = offsets

    def _price(self, graph: EventGraph) -> None:
        """Compute the price levels, and the cheapest option at each."""
        steepest_w = max((hull.slopes_uw[0] for hull in graph.hulls if hull.slopes_uw), default=1) / UW_PER_W
        # The highest level is beyond all slopes: for computations that are as fast as they can be.
        prices_w = steepest_w * PRICE_RATIO ** np.arange(3.0 - PRICE_COUNT, 3.0)
        prices_w[0] = 0.0
        cheapest = np.empty((PRICE_COUNT, len(self.times_ps)), dtype=np.int64)
        for first, end in zip(self._firsts, self._firsts[1:], strict=False):
            costs = self.energies_j[first:end] + prices_w[:, None] * (
                self.times_ps[first:end] / PS_PER_SCALED_S
            )
            is_least = costs <= np.minimum.accumulate(costs, axis=1)
            places = np.where(is_least, np.arange(first, end), first)
            cheapest[:, first:end] = np.maximum.accumulate(places, axis=1)
        self._cheapest: Int64Array = cheapest.reshape(-1)
        keys: list[int] = []
        slopes_w: list[float] = []
        for offset, hull, options in zip(self._offsets, graph.hulls, graph.options, strict=True):
            hull_end_ps = options[-1].time_ps
            # One more vertex beyond the slowest option: beyond the hull's last vertex, more time saves
            # nothing.
            keys += [offset + time_ps for time_ps in (*hull.times_ps, hull_end_ps + 1)]
            slopes_w += [np.inf, *(slope_uw / UW_PER_W for slope_uw in hull.slopes_uw), 0.0]
        is_vertex = np.isin(self._keys, keys)
        at_or_before = np.maximum.accumulate(np.where(is_vertex, np.arange(len(is_vertex)), 0))
        self.faster_vertices: Int64Array = np.concatenate(([0], at_or_before[:-1]))
        self.faster_vertices[self._firsts[:-1]] = self._firsts[:-1]
        self._hull_keys = np.array(keys, dtype=np.int64)
        self._hull_prices = prices_w.searchsorted(slopes_w).clip(0, PRICE_COUNT - 1).astype(np.int8)


def latest_of(finishes_ps: Int64Array, before: _Arcs) -> Int64Array | None:
    """Return the earliest starts of a level's computations; None if they wait for nothing."""
    starts_ps: Int64Array | None = None
    for others, lags_ps in before:
        ready_ps = finishes_ps.take(others, axis=0)  # takes a quarter of the time of finishes_ps[others]
        if lags_ps is not None:
            ready_ps += lags_ps
        starts_ps = ready_ps if starts_ps is None else np.maximum(starts_ps, ready_ps, out=starts_ps)
    return starts_ps


def earliest_of(latest_starts_ps: Int64Array, after: _Arcs) -> Int64Array:
    """Return the latest finishes of a level's computations, given the latest starts of their successors.

    The last row is the iteration's end.
    """
    if not after:
        return latest_starts_ps[-1:]
    finishes_ps: Int64Array | None = None
    for others, lags_ps in after:
        needed_ps = latest_starts_ps.take(others, axis=0)
        if lags_ps is not None:
            needed_ps -= lags_ps
        finishes_ps = (
            needed_ps if finishes_ps is None else np.minimum(finishes_ps, needed_ps, out=finishes_ps)
        )
    assert finishes_ps is not None
    return finishes_ps


def _arcs(neighbours: Sequence[Sequence[tuple[int, int]]], padding: int) -> _Arcs:
    degree = max(map(len, neighbours))
    padded = np.array(
        [[*some, *[(padding, 0)] * (degree - len(some))] for some in neighbours], dtype=np.int64
    ).reshape(len(neighbours), degree, 2)
    return tuple(
        (padded[:, k, 0], padded[:, k, 1:] if padded[:, k, 1].any() else None) for k in range(degree)
    )
