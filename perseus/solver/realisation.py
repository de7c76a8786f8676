"""Measured clocks for many deadlines at once, and with all means for one.

The relaxed plans of all deadlines are rounded, searched and spliced together (:mod:`perseus.solver.columns`,
:mod:`perseus.solver.block_search`, :mod:`perseus.solver.splicing`). Who is close to the bound is left alone.

For one deadline several choices are searched for longer. If none comes close to the bound, measured clocks
lie far above the hull (a cliff in the profile), and a relaxed plan mixes what no real plan can mix: then it
is relaxed again on *local* hulls (:mod:`perseus.solver.rounding`), and the best of these plans are searched,
too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perseus.solver.assignment import Choice
from perseus.solver.block_search import BlockSearch
from perseus.solver.columns import Columns, Rungs
from perseus.solver.graph import EventGraph, Int64Array
from perseus.solver.rounding import Rounder, relax_locally
from perseus.solver.splicing import splice


class Relaxing(Enum):
    """How a plan may be relaxed again, on local hulls: as far as that does not take too long."""

    FINELY = "finely"
    COARSELY = "coarsely"
    NEVER = "never"


_SEED = 0

_GOOD_ENOUGH = 0.001
"""A choice this close to its bound, as a share of the energy, is searched no longer."""

_CLOSE = 0.0018
"""One that is not as close after some rounds, as a share of the energy, is searched further."""

_FAR = {Relaxing.FINELY: 0.003, Relaxing.COARSELY: 0.005, Relaxing.NEVER: float("inf")}
"""One that is as far after the search, as a share of the energy, is worth all other means."""

_ROUNDING_SHARE = 1e-9
"""Sums of the same energies differ by less, as a share of the energy."""

_ROUND_COUNT = 3
_TRIES_A_ROUND = 6

_REFINED_COUNT = 4
_REFINING_ROUND_COUNT = {Relaxing.FINELY: 5, Relaxing.COARSELY: 20, Relaxing.NEVER: 20}
"""Where relaxing takes long, a longer search takes little beside it."""
_TRIES_A_REFINING_ROUND = 20
_FEWEST_ROUNDS = 2
"""So many rounds even where the bound is close; after them this close is enough, as a share of the energy:"""
_CLOSE_TO_T_MIN = 0.0015

_FINALISTS = 4
"""How many choices are searched in the end, where all means are used."""

_RELAXING_SHARE = 0.7
"""About the share of that which relaxing on local hulls takes."""

_STUBBORN_TRIES = 30
"""How many more those get that are not close after all."""

_CLIFF_SHARE = 0.25
_CLIFF_ROUND_COUNT = 5
"""Where so many of the points are not close, profiles have cliffs: they get so many rounds more."""

_MOST_CELLS = 1_000_000
"""How many cells are searched at a time, at about 150 bytes each."""


@dataclass(frozen=True, slots=True)
class Target:
    """A deadline, and what is known of it.

    Attributes:
        deadline_ps: the iteration time to keep.
        relaxed_ps: the events' times in the relaxed plan.
        bound_j: the effective energy that no choice can go below.
        energy_j: the same and what the GPUs draw while they wait.
        relaxing: how it may be relaxed again.
    """

    deadline_ps: int
    relaxed_ps: Int64Array
    bound_j: float
    energy_j: float
    relaxing: Relaxing


class Refined(NamedTuple):
    """What was found for one deadline.

    Attributes:
        choice: the best one.
        is_final: whether there are no other means that could make it better: all were used, or it is at its
            bound.
    """

    choice: Choice
    is_final: bool


class Realiser:
    """Finds choices over one event graph. The same calls in the same order find the same.

    Attributes:
        columns: the graph's layout for many choices.
    """

    def __init__(self, graph: EventGraph) -> None:
        self._graph = graph
        self.columns = Columns(graph)
        self._random = np.random.default_rng(_SEED)
        self._search = BlockSearch(self.columns, self._random)

    def refine(
        self,
        target: Target,
        others: Sequence[Choice] = (),
        *,
        is_thorough: bool,
        report: Callable[[float], None] = lambda _: None,
    ) -> Refined:
        """Return the best choice found for one deadline, which costs no more than any of the others.

        Args:
            target: the deadline.
            others: choices, of this deadline or a shorter one, that may be better.
            is_thorough: use all means that the target allows even if the search comes close to the bound.
            report: called with the share of the work that is done, from 0 to 1.
        """
        columns = self.columns
        finishes_ps, prices = self._rounding_of(target.relaxed_ps)
        rounded = columns.within_finishes(finishes_ps)
        starts = np.repeat(rounded, _REFINED_COUNT, axis=1)
        if others:
            starts = np.concatenate((starts, columns.to_columns(others)), axis=1)
        found = self._refined(starts, target, prices, lambda share: report(share / 2))
        relaxing = target.relaxing
        is_far = self._excess(found, target) > _FAR[relaxing]
        if has_all := relaxing is not Relaxing.NEVER and (is_thorough or is_far):
            found = self._with_all_means(found, others, target, prices, lambda share: report((1 + share) / 2))
        report(1.0)
        is_final = has_all or self._excess(found, target) <= _ROUNDING_SHARE
        return Refined(columns.to_choices(found)[0].tolist(), is_final)

    def realise(
        self,
        targets: Sequence[Callable[[], Target]],
        refined: Mapping[int, Choice],
        report: Callable[[float], None] = lambda _: None,
    ) -> NDArray[np.int16]:
        """Return a choice for each deadline, a row each; none costs more than the one before.

        Args:
            targets: what makes each of them, by rising deadline; one is held at a time.
            refined: choices that are known for some, by index.
            report: called with the share of the work that is done, from 0 to 1.
        """
        columns = self.columns
        count = len(targets)
        shape = columns.row_count, count
        choices, prices = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int8)
        deadlines_ps = np.empty(count, dtype=np.int64)
        bounds_j, energies_j = np.empty(count), np.empty(count)
        for some in self._portions(np.arange(count)):
            finishes_ps = np.empty((columns.row_count, len(some)), dtype=np.int64)
            for column, index in enumerate(some.tolist()):
                target = targets[index]()
                deadlines_ps[index] = target.deadline_ps
                bounds_j[index], energies_j[index] = target.bound_j, target.energy_j
                ends_ps, prices[:, index : index + 1] = self._rounding_of(target.relaxed_ps)
                finishes_ps[:, column] = ends_ps[:, 0]
            choices[:, some] = columns.within_finishes(finishes_ps)
        for index, choice in refined.items():
            choices[:, index] = columns.to_columns([choice])[:, 0]

        def above(share: float) -> Int64Array:
            excess_j = columns.effective_energies_j(choices) - bounds_j
            is_above = excess_j > share * energies_j
            is_above[list(refined)] = False
            return np.flatnonzero(is_above)

        def search(open_columns: Int64Array, try_count: int) -> None:
            done = 0
            for some in self._portions(open_columns):
                choices[:, some] = self._search.search(
                    choices[:, some], deadlines_ps[some], prices[:, some], try_count
                )
                done += len(some)
                report((turn + done / len(open_columns)) / (_ROUND_COUNT + _CLIFF_ROUND_COUNT))

        turn = 0
        rounds = [(_GOOD_ENOUGH, _TRIES_A_ROUND)] * _ROUND_COUNT
        while turn < len(rounds):
            share, try_count = rounds[turn]
            search(above(share), try_count)
            turn += 1
            if turn == _ROUND_COUNT:
                has_cliffs = len(above(_CLOSE)) > _CLIFF_SHARE * count
                rounds += [(_CLOSE, _STUBBORN_TRIES)] * (_CLIFF_ROUND_COUNT if has_cliffs else 1)
            if turn < len(rounds):  # the last round closes the seams
                splice(columns, choices, deadlines_ps, energies_j, self._random, _MOST_CELLS)
        report(1.0)
        effective_j = columns.effective_energies_j(choices).tolist()
        for index in range(1, count):
            # More time must not cost more energy, not even by a rounding error of the sums.
            if effective_j[index - 1] <= effective_j[index]:
                choices[:, index], effective_j[index] = choices[:, index - 1], effective_j[index - 1]
        return columns.to_choices(choices)

    def _with_all_means(
        self,
        found: Int64Array,
        others: Sequence[Choice],
        target: Target,
        prices: Rungs,
        report: Callable[[float], None],
    ) -> Int64Array:
        """Return the best choice, as a column, of what was found, the others, and what local hulls lead
        to."""
        rounder = Rounder(self._graph)
        deadline_ps = target.deadline_ps
        relaxations = relax_locally(
            self._graph,
            target.relaxed_ps,
            deadline_ps,
            is_coarse=target.relaxing is Relaxing.COARSELY,
            report=lambda share: report(_RELAXING_SHARE * share),
        )
        rounded = [
            rounder.round(target.relaxed_ps, deadline_ps, others),
            *(rounder.round(relaxed_ps, deadline_ps) for relaxed_ps in relaxations),
        ]
        finalists = sorted(rounded, key=rounder.effective_energy_j)[:_FINALISTS]
        traded = []
        for choice in finalists:
            traded.append(rounder.improve(choice, deadline_ps, float("inf")))
            report(_RELAXING_SHARE)
        searched = self._refined(
            np.concatenate((found, self.columns.to_columns(traded)), axis=1),
            target,
            prices,
            lambda share: report(_RELAXING_SHARE + (1 - _RELAXING_SHARE) * share),
        )
        (choice,) = self.columns.to_choices(searched).tolist()
        improved = rounder.improve(choice, deadline_ps, float("inf"))
        return self.columns.to_columns([improved])

    def _refined(
        self, choices: Int64Array, target: Target, prices: Rungs, report: Callable[[float], None]
    ) -> Int64Array:
        """Search from several starts for one deadline; return the best, as a column."""
        round_count = _REFINING_ROUND_COUNT[target.relaxing]
        for turn in range(round_count):
            choices = self._search.search(
                choices,
                np.full(choices.shape[1], target.deadline_ps),
                np.broadcast_to(prices, choices.shape),
                _TRIES_A_REFINING_ROUND,
            )
            report((turn + 1) / round_count)
            if self._excess(choices, target) <= (_GOOD_ENOUGH if turn < _FEWEST_ROUNDS else _CLOSE_TO_T_MIN):
                break
        return choices[:, [int(self.columns.effective_energies_j(choices).argmin())]]

    def _excess(self, choices: Int64Array, target: Target) -> float:
        """Return how far the best choice is above the bound, as a share of the energy."""
        least_j = float(self.columns.effective_energies_j(choices).min())
        return (least_j - target.bound_j) / target.energy_j

    def _rounding_of(self, relaxed_ps: Int64Array) -> tuple[Int64Array, Rungs]:
        """Return a relaxed plan's finishes and prices, as columns."""
        graph, order = self._graph, self.columns.computation_of
        finishes_ps = relaxed_ps[graph.finish_event[order]][:, None]
        starts_ps = relaxed_ps[graph.start_event[order]][:, None]
        return finishes_ps, self.columns.price_of(finishes_ps - starts_ps)

    def _portions(self, which: Int64Array) -> Iterator[Int64Array]:
        size = max(1, _MOST_CELLS // self.columns.row_count)
        for begin in range(0, len(which), size):
            yield which[begin : begin + size]
