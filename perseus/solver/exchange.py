"""What plans for many deadlines take over from each other.

A relaxed plan for a time between two good plans mixes clocks in every computation, which measured clocks
can't follow where profiles have cliffs. Its time can be had differently: a part of the iteration runs as in
the faster plan and the rest as in the slower one, cut where that costs least (:mod:`perseus.solver.fusion`).
So a few good plans make all between them good; and what a search finds for one deadline is tried for those
beside it.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from perseus.solver.columns import Columns, FloatArray
from perseus.solver.fusion import Fusion
from perseus.solver.graph import Int64Array
from perseus.solver.lanes import Lanes


class Exchange:
    """Improves the choices of lanes by those of others."""

    def __init__(self, columns: Columns, fusion: Fusion) -> None:
        self._columns = columns
        self._fusion = fusion

    def improve(self, lanes: Lanes, enough_share: float, report: Callable[[float], None]) -> None:
        """Mix every deadline's best choice with others, until it is that near its bound.

        With its own other lanes, with the best ones of the deadlines beside it, and with mixtures of the two
        corners that it lies between on the hull of all of them.

        Args:
            lanes: what is improved.
            enough_share: of the energy.
            report: called with the share of the work that is done, from 0 to 1.
        """
        lanes.put_best_first()
        times_ps = self._fusion.times_ps(lanes.choices)
        count = lanes.deadline_count
        corners = _corners(times_ps[-1, :count], lanes.effective_energies_j()[:count])
        for index in lanes.above(enough_share).tolist():
            if index < count:
                others = self._others(lanes, times_ps, index, corners)
                self._improve(lanes, times_ps, index, others, enough_share)
                report((index + 1) / count)

    def _improve(
        self,
        lanes: Lanes,
        times_ps: Int64Array,
        index: int,
        others: Iterator[Int64Array],
        enough_share: float,
    ) -> None:
        best_j = self._columns.effective_energies_j(lanes.choices[:, [index]])[0]
        for other_ps in others:
            fused_ps = self._fusion.fuse(times_ps[:, index], other_ps, int(lanes.deadlines_ps[index]))
            choice = self._fusion.choice(fused_ps)
            found_j = self._columns.effective_energies_j(choice)[0]
            if found_j < best_j:
                best_j, times_ps[:, index], lanes.choices[:, [index]] = found_j, fused_ps, choice
                if lanes.excess_share(index, found_j) <= enough_share:
                    break

    def _others(
        self, lanes: Lanes, times_ps: Int64Array, index: int, corners: Sequence[int]
    ) -> Iterator[Int64Array]:
        """Yield the events' times of the plans that may improve a deadline's."""
        deadline_ps = int(lanes.deadlines_ps[index])
        for lane in lanes.of(index)[1:].tolist():
            yield times_ps[:, lane]
        faster = max((corner for corner in corners if corner < index), default=index)
        slower = min((corner for corner in corners if corner > index), default=index)
        if faster < index < slower and slower - faster > 2:  # else they are the neighbours
            yield from self._mixed(times_ps[:, faster], times_ps[:, slower], deadline_ps)
        for neighbour in (index - 1, index + 1):
            if 0 <= neighbour < lanes.deadline_count:
                yield from _at_both_ends(times_ps[:, neighbour], deadline_ps)

    def _mixed(self, faster_ps: Int64Array, slower_ps: Int64Array, deadline_ps: int) -> Iterator[Int64Array]:
        """Yield the cheapest mixtures of two plans: the faster one first, and the slower one first."""
        yield self._fusion.fuse(faster_ps, slower_ps + (deadline_ps - slower_ps[-1]), deadline_ps)
        later_ps = faster_ps + (deadline_ps - faster_ps[-1])
        later_ps[0] = 0  # what begins the iteration has longer for it
        yield self._fusion.fuse(later_ps, slower_ps, deadline_ps)


def _at_both_ends(times_ps: Int64Array, deadline_ps: int) -> Iterator[Int64Array]:
    """Yield the times of a plan that begins when the iteration does, and that ends when it does."""
    yield times_ps
    if times_ps[-1] != deadline_ps:
        yield times_ps + (deadline_ps - times_ps[-1])


def _corners(times_ps: Int64Array, effective_j: FloatArray) -> list[int]:
    """Return the indices of the lower hull's corners, by rising time, of what falls."""
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
    return corners
