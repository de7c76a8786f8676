"""Measured clocks for many deadlines at once, and with all means for one.

The relaxed plans of all deadlines are rounded in several ways (:mod:`perseus.solver.rounding`), searched
(:mod:`perseus.solver.block_search`), and take over from each other what suits them
(:mod:`perseus.solver.exchange`). Who is close to the bound is left alone. What is wanted most and what is
farthest from its bound gets all means (:mod:`perseus.solver.refinement`), and others may take over from it.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perseus.solver.block_search import BlockSearch
from perseus.solver.columns import Choice, Columns
from perseus.solver.exchange import Exchange
from perseus.solver.fusion import Fusion
from perseus.solver.graph import EventGraph, Int64Array
from perseus.solver.lanes import Lanes
from perseus.solver.refinement import Refiner
from perseus.solver.rounding import ROUNDING_COUNT, Roundings
from perseus.solver.target import Relaxing, Target

_SEED = 0

_FIRST_TRIES = 1
"""Before all roundings of a deadline but the best are left."""

_GOOD_ENOUGH = 0.001
"""A choice this close to its bound, as a share of the energy, is searched no longer."""


@dataclass(frozen=True, slots=True)
class _Pains:
    """How much is done for all deadlines.

    Attributes:
        try_count: of a round of searching.
        close_share: who is as close to its bound, as a share of the energy, takes over nothing from others,
            and is not searched once more where it is wanted.
    """

    try_count: int
    close_share: float


_FEW_TRIES = _Pains(6, 0.0018)
_PAINS = {
    Relaxing.FINELY: _FEW_TRIES,
    Relaxing.COARSELY: _FEW_TRIES,
    # A cut of so many events takes as long as many tries.
    Relaxing.NEVER: _Pains(30, 0.0045),
}

_ROUNDING_SHARE = 1e-9
"""Sums of the same energies differ by less, as a share of the energy."""

_BEGUN_SHARE = 0.2
"""About the share of realising after which all is rounded."""

_MOST_CELLS = 1_000_000
"""How many cells are searched at a time, at about 150 bytes each."""


class Realised(NamedTuple):
    """What was found for many deadlines.

    Attributes:
        choices: a row each.
        final: the indices of those that no other means could make better: all were used, or they are at
            their bound.
    """

    choices: NDArray[np.int16]
    final: frozenset[int]


class Realiser:
    """Finds choices over one event graph. The same calls in the same order find the same.

    Attributes:
        columns: the graph's layout for many choices.
    """

    def __init__(self, graph: EventGraph) -> None:
        self.columns = Columns(graph)
        self._search = BlockSearch(self.columns, np.random.default_rng(_SEED))
        self._roundings = Roundings(graph, self.columns)
        fusion = Fusion(graph, self.columns)
        self._exchange = Exchange(self.columns, fusion)
        self._refiner = Refiner(graph, self.columns, self._search, fusion, self._roundings)

    def refine(
        self,
        target: Target,
        others: Sequence[Choice] = (),
        report: Callable[[float], None] = lambda _: None,
    ) -> Choice:
        """Return the best choice found for one deadline by all means that the target allows.

        It costs no more than any of the others.

        Args:
            target: the deadline.
            others: choices, of this deadline or a shorter one, that may be better.
            report: called with the share of the work that is done, from 0 to 1.
        """
        finishes_ps, prices = self._roundings.of(target.relaxed_ps)
        starts = self._roundings.round(finishes_ps, prices)
        if others:
            starts = np.concatenate((starts, self.columns.to_columns(others)), axis=1)
        found = self._refiner.refine(starts, target, prices, report)
        choice: Choice = self.columns.to_choices(found)[0].tolist()
        return choice

    def realise(
        self,
        targets: Sequence[Callable[[], Target]],
        wanted: Set[int],
        report: Callable[[float], None] = lambda _: None,
    ) -> Realised:
        """Return a choice for each deadline; none costs more than the one before.

        Args:
            targets: what makes each of them, by rising deadline; one is held at a time.
            wanted: those that are searched for longer, by index.
            report: called with the share of the work that is done, from 0 to 1.
        """
        pains = _PAINS[targets[0]().relaxing]
        lanes = self._begin(targets, wanted, lambda share: report(_BEGUN_SHARE * share))
        steps = _Steps(report, _BEGUN_SHARE, len(wanted) + 6)
        self._search_all(lanes, pains, steps.next())
        final = {
            index for index in sorted(wanted) if self._refine(lanes, index, targets[index](), steps.next())
        }
        self._exchange_and_search(lanes, pains, steps)
        # What is found for the farthest makes others better, too. To refine more of them gains little.
        farthest = lanes.farthest(final)
        if self._refine(lanes, farthest, targets[farthest](), steps.next()):
            final.add(farthest)
            self._exchange_and_search(lanes, pains, steps)
        for index in sorted(wanted - final):
            if lanes.excess_shares()[lanes.of(index)].min() > pains.close_share:
                self._search_once_more(lanes, index, targets[index]())
        lanes.put_best_first()
        excess_shares = lanes.excess_shares()
        final |= {index for index in wanted if excess_shares[index] <= _ROUNDING_SHARE}
        report(1.0)
        choices = lanes.choices[:, : len(targets)]
        effective_j = self.columns.effective_energies_j(choices).tolist()
        for index in range(1, len(targets)):
            # More time must not cost more energy, not even by a rounding error of the sums.
            if effective_j[index - 1] <= effective_j[index]:
                choices[:, index], effective_j[index] = choices[:, index - 1], effective_j[index - 1]
        return Realised(self.columns.to_choices(choices), frozenset(final))

    def _begin(
        self,
        targets: Sequence[Callable[[], Target]],
        wanted: Set[int],
        report: Callable[[float], None],
    ) -> Lanes:
        """Round every relaxed plan in all ways and search a little; keep the best, or all where wanted."""
        columns = self.columns
        more = np.repeat(np.array(sorted(wanted), dtype=np.int64), ROUNDING_COUNT)
        lanes = Lanes(columns, np.concatenate((np.arange(len(targets)), more)))
        for some in self._portions(np.arange(len(targets)), ROUNDING_COUNT):
            finishes_ps = np.empty((columns.row_count, len(some)), dtype=np.int64)
            for column, index in enumerate(some.tolist()):
                target = targets[index]()
                ends_ps, prices = self._roundings.of(target.relaxed_ps)
                finishes_ps[:, column] = ends_ps[:, 0]
                lanes.set_target(index, target.deadline_ps, target.bound_j, target.energy_j, prices)
            found = self._search.search(
                self._roundings.round(finishes_ps, lanes.prices[:, some]),
                np.tile(lanes.deadlines_ps[some], ROUNDING_COUNT),
                np.tile(lanes.prices[:, some], (1, ROUNDING_COUNT)),
                _FIRST_TRIES,
            )
            found_j = columns.effective_energies_j(found).reshape(ROUNDING_COUNT, len(some))
            best = found_j.argmin(axis=0)
            lanes.choices[:, some] = found[:, best * len(some) + np.arange(len(some))]
            for column, index in enumerate(some.tolist()):
                if index in wanted:
                    lanes.choices[:, lanes.of(index)[1:]] = found[:, column :: len(some)]
            report((some[-1] + 1) / len(targets))
        return lanes

    def _refine(self, lanes: Lanes, index: int, target: Target, report: Callable[[float], None]) -> bool:
        """Use all means for a deadline's choices, if the best is far from its bound; tell whether it was."""
        own = lanes.of(index)
        is_far = self._refiner.is_far(lanes.choices[:, [lanes.best(index)]], target)
        if is_far:
            lanes.choices[:, own[:1]] = self._refiner.refine(
                lanes.choices[:, own], target, lanes.prices[:, own[:1]], report
            )
        report(1.0)
        return is_far

    def _search_once_more(self, lanes: Lanes, index: int, target: Target) -> None:
        own = lanes.of(index)
        lanes.choices[:, own[:1]] = self._refiner.search(
            lanes.choices[:, own], target, lanes.prices[:, own[:1]]
        )

    def _exchange_and_search(self, lanes: Lanes, pains: _Pains, steps: "_Steps") -> None:
        self._exchange.improve(lanes, pains.close_share, steps.next())
        self._search_all(lanes, pains, steps.next())

    def _search_all(self, lanes: Lanes, pains: _Pains, report: Callable[[float], None]) -> None:
        which, done = lanes.above(_GOOD_ENOUGH), 0
        for some in self._portions(which):
            lanes.choices[:, some] = self._search.search(
                lanes.choices[:, some], lanes.deadlines_ps[some], lanes.prices[:, some], pains.try_count
            )
            done += len(some)
            report(done / len(which))

    def _portions(self, which: Int64Array, width: int = 1) -> Iterator[Int64Array]:
        size = max(1, _MOST_CELLS // (self.columns.row_count * width))
        for begin in range(0, len(which), size):
            yield which[begin : begin + size]


class _Steps:
    """Tells the progress of steps of about equal length."""

    def __init__(self, report: Callable[[float], None], begun: float, count: int) -> None:
        self._report = report
        self._begun = begun
        self._width = (1 - begun) / count

    def next(self) -> Callable[[float], None]:
        """Return what to tell the share of the next step to."""
        begun = self._begun
        self._begun += self._width
        return lambda share: self._report(begun + self._width * share)
