"""One deadline's plan, by all means.

Several choices are searched at once (:mod:`perseus.solver.block_search`), and the best one takes over from
the others what suits it (:mod:`perseus.solver.fusion`). If it does not come close to the bound, it is relaxed
again on local hulls (:mod:`perseus.solver.local_hulls`), and what these relaxed plans are rounded to is
searched and mixed with it, again and again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from perseus.solver.block_search import BlockSearch
from perseus.solver.columns import Columns, Rungs
from perseus.solver.fusion import Fusion
from perseus.solver.graph import EventGraph, Int64Array
from perseus.solver.local_hulls import relax_around
from perseus.solver.rounding import Roundings
from perseus.solver.target import Relaxing, Target

_ENOUGH_SHARE = 0.0003
"""A choice this close to its bound, as a share of the energy, is searched no longer."""

_ROUND_COUNT = 5
_TRIES_A_ROUND = 20


@dataclass(frozen=True, slots=True)
class _Means:
    """What is worth its time where relaxing takes as long as it does.

    Attributes:
        far_share: who is as far from its bound, as a share of the energy, is worth all other means.
        close_share: who is as close, having got them, is not relaxed again.
        reaches: how many options to either side the local hulls reach, one time after the other.
    """

    far_share: float
    close_share: float
    reaches: tuple[int, ...]


_MEANS = {
    Relaxing.FINELY: _Means(0.003, 0.001, (8, 4, 2, 8, 4, 2)),
    Relaxing.COARSELY: _Means(0.005, 0.005, (8, 4, 2)),
    Relaxing.NEVER: _Means(math.inf, math.inf, ()),
}

_HULL_TOLERANCE = 0.005
"""Of local hulls: exact ones take several times as long, and lead to no better plans."""

_SEARCHING_SHARE = 0.2
"""About the share of the work that is done before anything is relaxed again."""


class Refiner:
    """Finds choices over one event graph, as columns."""

    def __init__(
        self, graph: EventGraph, columns: Columns, search: BlockSearch, fusion: Fusion, roundings: Roundings
    ) -> None:
        self._graph = graph
        self._columns = columns
        self._search = search
        self._fusion = fusion
        self._roundings = roundings

    def is_far(self, choice: Int64Array, target: Target) -> bool:
        """Tell whether a choice, a column, is so far above its bound that it is worth all means."""
        return self._excess_share(choice, target) > _MEANS[target.relaxing].far_share

    def refine(
        self, choices: Int64Array, target: Target, prices: Rungs, report: Callable[[float], None]
    ) -> Int64Array:
        """Return the best choice, as a column, that all means lead to from some that keep the deadline.

        Args:
            choices: a column each.
            target: the deadline.
            prices: the relaxed plan's, a column (:meth:`Columns.price_of`).
            report: called with the share of the work that is done, from 0 to 1.
        """
        for turn in range(_ROUND_COUNT):
            choices = self._searched(choices, target, prices)
            best = self._fused(choices, target)
            report(_SEARCHING_SHARE * (turn + 1) / _ROUND_COUNT)
            if self._excess_share(best, target) <= _ENOUGH_SHARE:
                break
            choices = np.concatenate((best, choices), axis=1)
        means = _MEANS[target.relaxing]
        if self._excess_share(best, target) > means.close_share:
            best = self._relaxed(
                best,
                target,
                prices,
                means.reaches,
                lambda share: report(_SEARCHING_SHARE + (1 - _SEARCHING_SHARE) * share),
            )
        report(1.0)
        return best

    def search(self, choices: Int64Array, target: Target, prices: Rungs) -> Int64Array:
        """Return the best choice, as a column, that one round of searching and mixing leads to."""
        return self._fused(self._searched(choices, target, prices), target)

    def _relaxed(
        self,
        best: Int64Array,
        target: Target,
        prices: Rungs,
        reaches: tuple[int, ...],
        report: Callable[[float], None],
    ) -> Int64Array:
        """Return the best choice that relaxing again around one leads to."""
        columns = self._columns
        for number, reach in enumerate(reaches):
            relaxed_ps = relax_around(
                self._graph,
                columns.times_ps[best[columns.row_of, 0]],
                target.deadline_ps,
                reach,
                _HULL_TOLERANCE,
                lambda share, done=number: report((done + share) / len(reaches)),  # type: ignore[misc]
            )
            finishes_ps, _ = self._roundings.of(relaxed_ps)
            choices = np.concatenate((best, self._roundings.round(finishes_ps, prices)), axis=1)
            best = self.search(choices, target, prices)
        return best

    def _searched(self, choices: Int64Array, target: Target, prices: Rungs) -> Int64Array:
        return self._search.search(
            choices,
            np.full(choices.shape[1], target.deadline_ps),
            np.broadcast_to(prices, choices.shape),
            _TRIES_A_ROUND,
        )

    def _fused(self, choices: Int64Array, target: Target) -> Int64Array:
        """Return the best choice, mixed with the others by rising energy."""
        energies_j = self._columns.effective_energies_j(choices)
        first, *others = np.argsort(energies_j, kind="stable").tolist()
        best, best_j = choices[:, [first]], energies_j[first]
        times_ps = self._fusion.times_ps(choices)
        best_ps = times_ps[:, first]
        for other in others:
            fused_ps = self._fusion.fuse(best_ps, times_ps[:, other], target.deadline_ps)
            choice = self._fusion.choice(fused_ps)
            fused_j = self._columns.effective_energies_j(choice)[0]
            if fused_j < best_j:
                best, best_j, best_ps = choice, fused_j, fused_ps
        return best

    def _excess_share(self, choice: Int64Array, target: Target) -> float:
        return target.excess_share(float(self._columns.effective_energies_j(choice)[0]))
