"""Measured clocks for many deadlines at once, and with all means for one.

The relaxed plans of all deadlines are rounded in several ways, searched and spliced together
(:mod:`perseus.solver.columns`, :mod:`perseus.solver.block_search`, :mod:`perseus.solver.splicing`). Who is
close to the bound is left alone; those that are wanted most are searched from all roundings, and for longer.

For one deadline several choices are searched for longer. If none comes close to the bound, measured clocks
lie far above the hull (a cliff in the profile), and a relaxed plan mixes what no real plan can mix: then it
is relaxed again on *local* hulls (:mod:`perseus.solver.rounding`), around relaxed plans and around the best
real one, and the best of these plans are searched, too.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perseus.solver.assignment import Choice
from perseus.solver.block_search import BlockSearch
from perseus.solver.columns import Columns, Rungs
from perseus.solver.graph import EventGraph, Int64Array
from perseus.solver.lanes import Lanes
from perseus.solver.rounding import Rounder, around_reaches, relax_around, relax_locally
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

_FIRST_TRIES = 3
"""Before all roundings of a deadline but the best are left."""

_ROUND_COUNT = 3
_TRIES_A_ROUND = 6

_ROUNDINGS = (None, 8, 4, 3, 2, 1)
"""How relaxed plans are rounded: to the slowest options that fit, and to those worth their price, in rungs
below a computation's own (see :meth:`Columns.price_of`): time that is left over goes to a later one, which
may reach the next vertex of its hull with it. None of these is best everywhere."""

_REFINING_ROUND_COUNT = {Relaxing.FINELY: 5, Relaxing.COARSELY: 20, Relaxing.NEVER: 20}
"""Where relaxing takes long, a longer search takes little beside it."""
_TRIES_A_REFINING_ROUND = 20
_FEWEST_ROUNDS = 2
"""So many rounds even where the bound is close; after them this close is enough, as a share of the energy:"""
_CLOSE_TO_T_MIN = 0.0015

_ROUNDING_SHARE = 1e-9
"""Sums of the same energies differ by less, as a share of the energy."""

_FAR_SHARE = 0.5
_WANTED_SHARE = 0.8
"""About the shares of realising after which all means were used, where they are, and after which those that
are wanted most alone are searched."""

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
        self._graph = graph
        self.columns = Columns(graph)
        self._random = np.random.default_rng(_SEED)
        self._search = BlockSearch(self.columns, self._random)

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
        columns = self.columns
        finishes_ps, prices = self._rounding_of(target.relaxed_ps)
        starts = self._roundings(finishes_ps, prices)
        if others:
            starts = np.concatenate((starts, columns.to_columns(others)), axis=1)
        found = self._refined(starts, target, prices, lambda share: report(share / 2))
        if target.relaxing is not Relaxing.NEVER:
            found = self._with_all_means(found, target, prices, lambda share: report((1 + share) / 2))
        report(1.0)
        choice: Choice = columns.to_choices(found)[0].tolist()
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
        columns = self.columns
        lanes = self._begin(targets, wanted)
        final = self._refine_far(lanes, targets, wanted, lambda share: report(_FAR_SHARE * share))

        def search(which: Int64Array, try_count: int, begun: float, ended: float) -> None:
            done = 0
            for some in self._portions(which):
                lanes.choices[:, some] = self._search.search(
                    lanes.choices[:, some], lanes.deadlines_ps[some], lanes.prices[:, some], try_count
                )
                done += len(some)
                report(begun + (ended - begun) * done / len(which))

        rounds = [(_GOOD_ENOUGH, _TRIES_A_ROUND)] * _ROUND_COUNT
        turn, begun = 0, _FAR_SHARE
        while turn < len(rounds):
            share, try_count = rounds[turn]
            ended = begun + (_WANTED_SHARE - _FAR_SHARE) / (_ROUND_COUNT + _CLIFF_ROUND_COUNT)
            search(lanes.above(share), try_count, begun, ended)
            turn, begun = turn + 1, ended
            if turn == _ROUND_COUNT:
                has_cliffs = len(lanes.above(_CLOSE)) > _CLIFF_SHARE * len(lanes.index_of)
                rounds += [(_CLOSE, _STUBBORN_TRIES)] * (_CLIFF_ROUND_COUNT if has_cliffs else 1)
            if turn < len(rounds):  # the last round closes the seams
                splice(
                    columns,
                    lanes.choices,
                    lanes.deadlines_ps,
                    lanes.energies_j,
                    self._random,
                    _MOST_CELLS,
                )
        for number, index in enumerate(sorted(wanted - final)):
            own = lanes.of(index)
            begun = _WANTED_SHARE + (1 - _WANTED_SHARE) * number / len(wanted)
            # What the rounds above were is not done again.
            for _ in range(_REFINING_ROUND_COUNT[targets[index]().relaxing] - _FEWEST_ROUNDS):
                if lanes.excess_shares()[own].min() <= _CLOSE_TO_T_MIN:
                    break
                search(own, _TRIES_A_REFINING_ROUND, begun, begun)
            if lanes.excess_shares()[own].min() <= _ROUNDING_SHARE:
                final.add(index)
        report(1.0)
        choices = lanes.choices[:, [lanes.best(index) for index in range(len(targets))]]
        effective_j = columns.effective_energies_j(choices).tolist()
        for index in range(1, len(targets)):
            # More time must not cost more energy, not even by a rounding error of the sums.
            if effective_j[index - 1] <= effective_j[index]:
                choices[:, index], effective_j[index] = choices[:, index - 1], effective_j[index - 1]
        return Realised(columns.to_choices(choices), frozenset(final))

    def _begin(self, targets: Sequence[Callable[[], Target]], wanted: Set[int]) -> Lanes:
        """Round every relaxed plan in all ways and search a little; keep the best, or all where wanted."""
        columns, kinds = self.columns, len(_ROUNDINGS)
        more = np.repeat(np.array(sorted(wanted), dtype=np.int64), kinds)
        lanes = Lanes(columns, np.concatenate((np.arange(len(targets)), more)))
        for some in self._portions(np.arange(len(targets)), kinds):
            finishes_ps = np.empty((columns.row_count, len(some)), dtype=np.int64)
            for column, index in enumerate(some.tolist()):
                target = targets[index]()
                ends_ps, prices = self._rounding_of(target.relaxed_ps)
                finishes_ps[:, column] = ends_ps[:, 0]
                lanes.set_target(index, target.deadline_ps, target.bound_j, target.energy_j, prices)
            found = self._search.search(
                self._roundings(finishes_ps, lanes.prices[:, some]),
                np.tile(lanes.deadlines_ps[some], kinds),
                np.tile(lanes.prices[:, some], (1, kinds)),
                _FIRST_TRIES,
            )
            found_j = columns.effective_energies_j(found).reshape(kinds, len(some))
            best = found_j.argmin(axis=0)
            lanes.choices[:, some] = found[:, best * len(some) + np.arange(len(some))]
            for column, index in enumerate(some.tolist()):
                if index in wanted:
                    lanes.choices[:, lanes.of(index)[1:]] = found[:, column :: len(some)]
        return lanes

    def _refine_far(
        self,
        lanes: Lanes,
        targets: Sequence[Callable[[], Target]],
        wanted: Set[int],
        report: Callable[[float], None],
    ) -> set[int]:
        """Use all means for what is wanted and far above its bound; return the indices of these."""
        final = set()
        for number, index in enumerate(sorted(wanted)):
            target, lane = targets[index](), [lanes.best(index)]
            far, prices = _FAR[target.relaxing], lanes.prices[:, lane]
            found = lanes.choices[:, lane]
            if self._excess(found, target) > far:  # after few tries; perhaps no longer after more
                found = self._refined(lanes.choices[:, lanes.of(index)], target, prices, lambda _: None)
            if target.relaxing is not Relaxing.NEVER and self._excess(found, target) > far:
                found = self._with_all_means(
                    found,
                    target,
                    prices,
                    lambda share, done=number: report((done + share) / len(wanted)),  # type: ignore[misc]
                )
                final.add(index)
            lanes.choices[:, lane] = found
        return final

    def _with_all_means(
        self,
        found: Int64Array,
        target: Target,
        prices: Rungs,
        report: Callable[[float], None],
    ) -> Int64Array:
        """Return the best choice, as a column, of what was found and what local hulls lead to."""
        rounder = Rounder(self._graph)
        deadline_ps = target.deadline_ps
        is_coarse = target.relaxing is Relaxing.COARSELY
        around_plans = self._relaxed_around(
            found, target, prices, lambda share: report(_RELAXING_SHARE * share / 2)
        )
        relaxations = relax_locally(
            self._graph,
            target.relaxed_ps,
            deadline_ps,
            is_coarse=is_coarse,
            report=lambda share: report(_RELAXING_SHARE * (1 + share) / 2),
        )
        rounded = [
            rounder.round(target.relaxed_ps, deadline_ps, self.columns.to_choices(found).tolist()),
            *(rounder.round(relaxed_ps, deadline_ps) for relaxed_ps in relaxations),
        ]
        finalists = [
            *self.columns.to_choices(around_plans).tolist(),
            *sorted(rounded, key=rounder.effective_energy_j)[: _FINALISTS - 1],
        ]
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

    def _relaxed_around(
        self, found: Int64Array, target: Target, prices: Rungs, report: Callable[[float], None]
    ) -> Int64Array:
        """Search a large neighbourhood of a plan, again and again: what it can become by relaxing it.

        Every computation may move to some options on either side of its own, on their hull; how they move
        together is what a linear program finds, and no trade of a few. It begins at the plan itself, so
        unlike a relaxed plan of all options it starts from what real clocks can do.
        """
        columns = self.columns
        reaches, tolerance = around_reaches(target.relaxing is Relaxing.COARSELY)
        for number, reach in enumerate(reaches):
            relaxed_ps = relax_around(
                self._graph,
                columns.times_ps[found[columns.row_of, 0]],
                target.deadline_ps,
                reach,
                tolerance,
                lambda share, done=number: report((done + share) / len(reaches)),  # type: ignore[misc]
            )
            finishes_ps, _ = self._rounding_of(relaxed_ps)
            starts = np.concatenate((found, self._roundings(finishes_ps, prices)), axis=1)
            searched = self._search.search(
                starts,
                np.full(starts.shape[1], target.deadline_ps),
                np.broadcast_to(prices, starts.shape),
                _TRIES_A_REFINING_ROUND,
            )
            found = searched[:, [int(columns.effective_energies_j(searched).argmin())]]
        return found

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

    def _roundings(self, finishes_ps: Int64Array, prices: Rungs) -> Int64Array:
        """Return relaxed plans' roundings, one kind after the other, a column each."""
        columns = self.columns
        return np.concatenate(
            [
                columns.within_finishes(
                    finishes_ps, None if below is None else columns.with_prices(prices - below)
                )
                for below in _ROUNDINGS
            ],
            axis=1,
        )

    def _rounding_of(self, relaxed_ps: Int64Array) -> tuple[Int64Array, Rungs]:
        """Return a relaxed plan's finishes and prices, as columns."""
        graph, order = self._graph, self.columns.computation_of
        finishes_ps = relaxed_ps[graph.finish_event[order]][:, None]
        starts_ps = relaxed_ps[graph.start_event[order]][:, None]
        return finishes_ps, self.columns.price_of(finishes_ps - starts_ps)

    def _portions(self, which: Int64Array, width: int = 1) -> Iterator[Int64Array]:
        size = max(1, _MOST_CELLS // (self.columns.row_count * width))
        for begin in range(0, len(which), size):
            yield which[begin : begin + size]
