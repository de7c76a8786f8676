"""Plans put together from two others: one's choices for a stretch of the iteration, the other's for the rest.

A relaxed plan for a time between two good plans mixes clocks in every computation, which measured clocks
can't follow where profiles have cliffs. Its time can be had differently: a part of the iteration runs as in
the faster plan and the rest as in the slower one. What that costs lies close to the straight line between the
two, but for the seams.
"""

import numpy as np

from perseus.solver.columns import Columns, FloatArray
from perseus.solver.graph import Int64Array

_WORTH_SHARE = 0.0002
"""Of a column's energy: what the straight line must promise, so that splicing is tried."""

_SEAM_COUNT = 4
"""How many places are tried for the stretch: the begin, the end, and others at random."""


def splice(
    columns: Columns,
    choices: Int64Array,
    deadlines_ps: Int64Array,
    energies_j: FloatArray,
    random: np.random.Generator,
    most_cells: int,
) -> None:
    """Put cheaper choices, put together from others, in the place of columns for which there are any.

    Args:
        columns: what the choices are over.
        choices: a column each, within their deadlines; changed.
        deadlines_ps: one a column.
        energies_j: about what an iteration of each column costs in all: what a saving is measured by.
        random: where stretches begin.
        most_cells: about how many cells are spliced at a time.
    """
    times_ps, effective_j = columns.iteration_times_ps(choices), columns.effective_energies_j(choices)
    corners = _hull(times_ps, effective_j)
    line_j = np.interp(deadlines_ps, times_ps[corners], effective_j[corners])
    targets = np.flatnonzero(effective_j - line_j > _WORTH_SHARE * energies_j)
    if len(corners) < 2:
        return
    piece = np.clip(times_ps[corners].searchsorted(deadlines_ps, "right") - 1, 0, len(corners) - 2)
    corner_choices = choices[:, corners]  # as they are now: some of them may be targets, too
    size = max(1, most_cells // (columns.row_count * _SEAM_COUNT))
    for begin in range(0, len(targets), size):
        some = targets[begin : begin + size]
        faster = np.repeat(piece[some], _SEAM_COUNT)
        spliced = _spliced(
            columns,
            corner_choices[:, faster],
            corner_choices[:, faster + 1],
            np.repeat(deadlines_ps[some], _SEAM_COUNT),
            random,
        )
        spliced_j = columns.effective_energies_j(spliced).reshape(-1, _SEAM_COUNT)
        best = spliced_j.argmin(axis=1)
        better = np.flatnonzero(spliced_j[np.arange(len(best)), best] < effective_j[some])
        choices[:, some[better]] = spliced[:, better * _SEAM_COUNT + best[better]]


def _spliced(
    columns: Columns,
    faster: Int64Array,
    slower: Int64Array,
    deadlines_ps: Int64Array,
    random: np.random.Generator,
) -> Int64Array:
    """Return each pair's splice with the shortest stretch of the faster one that keeps the deadline."""
    row_count, count = faster.shape
    begins = np.asarray(random.integers(row_count, size=count))
    begins[np.arange(count) % _SEAM_COUNT < 2] = 0
    rows = np.arange(row_count)[:, None]
    # How far each row is into the stretch, from its first or from its last, all round the iteration.
    places = np.where(np.arange(count) % 2, row_count - 1 - rows, rows)
    places = (places - begins) % row_count
    faster_ps, slower_ps = columns.times_ps[faster], columns.times_ps[slower]
    too_short, enough = np.full(count, -1), np.full(count, row_count)
    while (enough - too_short > 1).any():
        length = (too_short + enough) // 2
        durations_ps = np.where(places < length, faster_ps, slower_ps)
        is_enough = columns.earliest_finishes_ps(durations_ps).max(axis=0) <= deadlines_ps
        enough, too_short = np.where(is_enough, length, enough), np.where(is_enough, too_short, length)
    return np.where(places < enough, faster, slower)


def _hull(times_ps: Int64Array, effective_j: FloatArray) -> Int64Array:
    """Return the corners of the lower hull of what falls, by rising time."""
    corners: list[int] = []
    for one in np.lexsort((effective_j, times_ps)).tolist():
        if corners and effective_j[one] >= effective_j[corners[-1]]:
            continue
        while len(corners) >= 2:
            first, second = corners[-2:]
            saved_first = (effective_j[first] - effective_j[second]) * float(times_ps[one] - times_ps[second])
            saved_second = (effective_j[second] - effective_j[one]) * float(
                times_ps[second] - times_ps[first]
            )
            if saved_second < saved_first:
                break
            corners.pop()
        corners.append(one)
    return np.array(corners, dtype=np.int64)
