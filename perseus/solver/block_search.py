"""Local search over many choices at once: change parts of the iteration, and keep cheaper ones.

A try speeds up random computations and gives the freed time to their neighbours, each of which takes as much
as is worth its price (see :meth:`Columns.price_of`). For this, the iteration is cut into blocks of levels.
Within a block, computations start when their predecessors are done, and end before their successors must
start. So each block improves independently, and a try of the whole iteration is as many independent tries as
it has blocks, in every column. Deadlines that are met stay met.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from perseus.solver.columns import Columns, PriceLevels, earliest_of, latest_of
from perseus.solver.graph import Int64Array

_BYTE = 256


class _Move(NamedTuple):
    """The settings of a try.

    Attributes:
        block_levels: levels per block.
        faster_share: share of the computations that are sped up.
        max_steps: options by which they are sped up, at most; 0 moves them to the next vertex of their hull,
            across options that no single trade pays for.
        price_levels_below: the price, in levels below a computation's own (see :meth:`Columns.price_of`);
            None for no price.
    """

    block_levels: int
    faster_share: float
    max_steps: int
    price_levels_below: int | None


_SEARCH_MOVES = (
    _Move(4, 0.1, 2, 4),
    _Move(8, 0.05, 2, 7),
    _Move(16, 0.1, 1, 3),
    _Move(8, 0.5, 0, 2),
    _Move(8, 0.1, 2, None),
)
"""Tried in turn."""


class BlockSearch:
    """Reduces the cost of choices over one event graph; deterministic for the same generator and calls."""

    def __init__(self, columns: Columns, random: np.random.Generator) -> None:
        self._columns = columns
        self._random = random
        self._try_count = 0

    def search(
        self, choices: Int64Array, deadlines_ps: Int64Array, prices: PriceLevels, try_count: int
    ) -> Int64Array:
        """Return choices that cost no more and meet the deadlines, after ``try_count`` tries.

        Args:
            choices: one per column, within their deadlines.
            deadlines_ps: one per column.
            prices: per cell, as returned by :meth:`Columns.price_of`.
            try_count: tries of every block.
        """
        for _ in range(try_count):
            how = _SEARCH_MOVES[self._try_count % len(_SEARCH_MOVES)]
            self._try_count += 1
            choices = self._tried(choices, deadlines_ps, prices, how)
        return choices

    def _tried(
        self, choices: Int64Array, deadlines_ps: Int64Array, prices: PriceLevels, how: _Move
    ) -> Int64Array:
        columns = self._columns
        blocks = self._blocks(how.block_levels)
        price_levels = (
            None if how.price_levels_below is None else columns.with_prices(prices - how.price_levels_below)
        )
        # Two halves side by side: the tried choices and the present ones.
        count = choices.shape[1]
        durations_ps = np.concatenate(
            (columns.times_ps[self._faster(choices, how)], columns.times_ps[choices]), axis=1
        )
        latest_ps = self._latest_finishes_ps(durations_ps, deadlines_ps, blocks)
        tried = np.empty_like(choices)
        finishes_ps = np.zeros((columns.row_count + 1, 2 * count), dtype=np.int64)
        for first, end in blocks:
            for level in columns.levels[first:end]:
                rows = level.rows
                starts_ps = latest_of(finishes_ps, level.before)
                if starts_ps is None:
                    starts_ps = np.zeros((rows.stop - rows.start, 2 * count), dtype=np.int64)
                tried_starts_ps = starts_ps[:, :count]
                found = columns.slowest_within(rows, latest_ps[rows] - tried_starts_ps, price_levels)
                tried[rows] = found
                np.add(tried_starts_ps, columns.times_ps[found], out=finishes_ps[rows, :count])
                np.add(starts_ps[:, count:], durations_ps[rows, count:], out=finishes_ps[rows, count:])
            rows = slice(columns.levels[first].rows.start, columns.levels[end - 1].rows.stop)
            kept_j, tried_j = (columns.energies_j[some[rows]].sum(axis=0) for some in (choices, tried))
            kept = np.flatnonzero(tried_j >= kept_j)
            tried[rows, kept] = choices[rows, kept]
            finishes_ps[rows, kept] = finishes_ps[rows, count + kept]
            finishes_ps[rows, count:] = finishes_ps[rows, :count]
        return tried

    def _faster(self, choices: Int64Array, how: _Move) -> Int64Array:
        drawn = self._random.integers(0, _BYTE, size=choices.shape, dtype=np.uint8)
        if not how.max_steps:
            is_faster = drawn < round(how.faster_share * _BYTE)
            return np.where(is_faster, self._columns.faster_vertices[choices], choices)
        faster = choices.copy()
        for step in range(how.max_steps):
            faster -= drawn < round(how.faster_share * _BYTE / (step + 1))
        return np.maximum(faster, self._columns.fastest, out=faster)

    def _blocks(self, block_levels: int) -> list[tuple[int, int]]:
        """Cut the levels into blocks, the first and last perhaps smaller; return their (first, end)."""
        count = len(self._columns.levels)
        cuts = [0, *range(1 + int(self._random.integers(block_levels)), count, block_levels), count]
        return [(first, end) for first, end in pairwise(cuts) if first < end]

    def _latest_finishes_ps(
        self, durations_ps: Int64Array, deadlines_ps: Int64Array, blocks: list[tuple[int, int]]
    ) -> Int64Array:
        """Return the latest finishes of the tried half, if nothing changes after each block."""
        columns = self._columns
        count = len(deadlines_ps)
        latest_ps = np.empty((columns.row_count, count), dtype=np.int64)
        starts_ps = np.empty((columns.row_count + 1, 2 * count), dtype=np.int64)
        starts_ps[-1] = np.concatenate((deadlines_ps, deadlines_ps))
        for first, end in reversed(blocks):
            for level in reversed(columns.levels[first:end]):
                finishes_ps = earliest_of(starts_ps, level.after)
                latest_ps[level.rows] = finishes_ps[:, :count]
                np.subtract(finishes_ps, durations_ps[level.rows], out=starts_ps[level.rows])
            rows = slice(columns.levels[first].rows.start, columns.levels[end - 1].rows.stop)
            starts_ps[rows, :count] = starts_ps[rows, count:]
        return latest_ps
