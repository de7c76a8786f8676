"""Measured clocks for the sweep's relaxed plans.

Theory of operation
===================

A relaxed plan (:mod:`perseus.solver.sweep`) runs computations for durations between two measured ones. This
module gives each computation of each deadline's plan a measured clock, so that no deadline is missed. The
relaxed plan's energy is the lower bound; the goal is to exceed it as little as possible.

1. *Round.* One after the other, each computation gets a clock that ends it by its relaxed finish; unused time
   passes to the next one. One way is to take the slowest clock that fits. The others price time at about its
   worth to the computation in the relaxed plan, or a few price levels lower, and take a faster clock where
   the time saved outweighs the energy; a later computation can spend that time on a slower clock. No way is
   best everywhere, so all are tried and the best is kept.
2. *Search.* Random changes to parts of the plans that are far from their bound are kept where cheaper
   (:mod:`perseus.solver.block_search`).
3. *Exchange.* Where a little more time saves much energy (a cliff in the profile), a relaxed plan for
   a time between two good plans mixes clocks in every computation, which measured clocks can't follow. There
   is another way to meet that time: run parts of the iteration as in the faster plan and the rest as in the
   slower one, by least cost (a minimum cut, :mod:`perseus.solver.fusion`). So this step mixes each plan far
   from its bound with its neighbours, and with such mixtures of the nearest faster and slower corners of the
   plans' hull. Then plans are searched again, and improvements spread further in the next round.

The plan of the shortest iteration time, and any plan requested for a specific time, is *refined*: all ways of
rounding it are searched, and the best takes over parts of the others, and of the plans for neighbouring
times, where that is cheaper.

``python -m benchmarks.ablation`` measures the benefit of each step. :mod:`perseus.solver.columns` lays out
choices.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perseus.solver.block_search import BlockSearch
from perseus.solver.columns import Choice, Columns, FloatArray, PriceLevels
from perseus.solver.fusion import Fusion
from perseus.solver.graph import EventGraph, Int64Array


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """The search budget.

    A plan's distance from its bound is its energy above the bound, as a share of its whole energy.

    Attributes:
        price_offsets: the ways to round: None takes the slowest clock that fits; a number takes the best
            clock at a price that many levels below the computation's own (:meth:`Columns.price_of`).
        round_tries: tries of each way's plan before only the best is kept.
        search_tries: tries of each plan in a search of all.
        search_above: plans closer to their bound are not searched.
        exchange_above: plans closer to their bound take nothing over from others.
        exchange_rounds: rounds of exchange and search.
        refine_rounds, refine_tries: rounds of refining, and tries in each.
        refine_above: refining ends once a plan is this close to its bound.
        max_cells: computations × plans in work at once, at about 150 bytes each.
        seed: of the random tries.
    """

    price_offsets: tuple[int | None, ...] = (None, 12, 8, 5, 3, 2, 1, 0)
    round_tries: int = 1
    search_tries: int = 6
    search_above: float = 0.001
    exchange_above: float = 0.0018
    exchange_rounds: int = 3
    refine_rounds: int = 5
    refine_tries: int = 20
    refine_above: float = 0.0003
    max_cells: int = 1_000_000
    seed: int = 0


REFINED_BESIDE = 8
"""Number of neighbouring points on either side whose plans are used in refining, as far as they exist."""

MANY_COMPUTATIONS = 4096
"""Problems with more computations count as large."""

USUAL_SEARCH = SearchSettings()
SEARCH_OF_LARGE = SearchSettings(search_tries=30, exchange_above=0.0045, exchange_rounds=1, refine_rounds=1)
"""For large problems: more tries instead of minimum cuts, which are slow with so many events."""


@dataclass(frozen=True, slots=True)
class Target:
    """A deadline, and its point on the relaxed frontier.

    Attributes:
        deadline_ps: the iteration time to meet.
        relaxed_ps: the events' times in the relaxed plan.
        bound_j: the effective energy that no choice can go below.
        energy_j: the same plus the blocking energy.
    """

    deadline_ps: int
    relaxed_ps: Int64Array
    bound_j: float
    energy_j: float


class Realiser:
    """Finds choices over one event graph. The same calls in the same order return the same choices.

    Attributes:
        columns: the graph's layout for many choices.
    """

    def __init__(self, graph: EventGraph, settings: SearchSettings | None = None) -> None:
        is_large = len(graph.computations) > MANY_COMPUTATIONS
        self._settings = settings or (SEARCH_OF_LARGE if is_large else USUAL_SEARCH)
        self.columns = columns = Columns(graph)
        self._start = graph.start_event[columns.computation_of]
        self._finish = graph.finish_event[columns.computation_of]
        self._search = BlockSearch(columns, np.random.default_rng(self._settings.seed))
        self._fusion = Fusion(graph, columns)

    def rounded(self, relaxed_ps: Int64Array) -> Choice:
        """Return the cheapest of all roundings of a relaxed plan, which is given by its events' times."""
        rounded = self._cheapest(self._round(*self._relaxed(relaxed_ps)))
        choice: Choice = self.columns.to_choices(rounded)[0].tolist()
        return choice

    def refine(
        self,
        target: Target,
        others: Sequence[Choice] | NDArray[np.int16] = (),
        report: Callable[[float], None] = lambda _: None,
    ) -> Choice:
        """Return the best choice found for a deadline, costing no more than any of ``others`` that meets it.

        Args:
            target: the deadline.
            others: choices for this and neighbouring deadlines, to start with and to take over from.
            report: called with the share of the work that is done, from 0 to 1.
        """
        settings, deadline_ps = self._settings, target.deadline_ps
        finishes_ps, prices = self._relaxed(target.relaxed_ps)
        choices = self._round(finishes_ps, prices)
        others_ps: Sequence[Int64Array] = ()
        if len(others):
            around = self.columns.to_columns(others)
            others_ps = list(self._fusion.times_ps(around).T)
            in_time = around[:, [other_ps[-1] <= deadline_ps for other_ps in others_ps]]
            choices = np.concatenate((self._cheapest(in_time), choices), axis=1)
        enough_j = target.bound_j + settings.refine_above * target.energy_j
        for turn in range(settings.refine_rounds):
            choices = self._search.search(
                choices,
                np.full(choices.shape[1], deadline_ps),
                np.broadcast_to(prices, choices.shape),
                settings.refine_tries,
            )
            ranked = np.argsort(self.columns.effective_energies_j(choices), kind="stable")
            best_ps, *own_ps = self._fusion.times_ps(choices[:, ranked]).T
            more_ps = (at_end for other_ps in others_ps for at_end in _at_both_ends(other_ps, deadline_ps))
            mixed = self._mix(choices[:, ranked[:1]], best_ps, chain(own_ps, more_ps), deadline_ps, enough_j)
            choices = np.concatenate((mixed.choice, choices), axis=1)
            report((turn + 1) / settings.refine_rounds)
            if mixed.energy_j <= enough_j:
                break
        choice: Choice = self.columns.to_choices(choices)[0].tolist()
        return choice

    def realise(
        self, targets: Sequence[Callable[[], Target]], report: Callable[[float], None] = lambda _: None
    ) -> NDArray[np.int16]:
        """Return a choice for each deadline, one row each; none costs more than the one before.

        The fastest, at which most iterations run, is refined.

        Args:
            targets: a function for each target, by rising deadline; only one target is held at a time.
            report: called with the share of the work that is done, from 0 to 1.
        """
        steps = _Steps(report, 3 + 2 * self._settings.exchange_rounds)
        plans = self._rounded_plans(targets, steps.next())
        self._search_plans(plans, steps.next())
        for _ in range(self._settings.exchange_rounds):
            self._exchange(plans, steps.next())
            self._search_plans(plans, steps.next())
        around = self.columns.to_choices(plans.choices[:, : REFINED_BESIDE + 1])
        fastest = self.refine(targets[0](), around, steps.next())
        plans.choices[:, [0]] = self.columns.to_columns([fastest])
        effective_j = self.columns.effective_energies_j(plans.choices).tolist()
        for index in range(1, len(targets)):
            # More time must not cost more energy.
            if effective_j[index - 1] <= effective_j[index]:
                plans.choices[:, index] = plans.choices[:, index - 1]
                effective_j[index] = effective_j[index - 1]
        report(1.0)
        return self.columns.to_choices(plans.choices)

    def _cheapest(self, choices: Int64Array) -> Int64Array:
        """Return the cheapest column; no column if there is none."""
        return choices[:, np.argsort(self.columns.effective_energies_j(choices), kind="stable")[:1]]

    # --- Rounding -------------------------------------------------------------------------------------------

    def _relaxed(self, relaxed_ps: Int64Array) -> tuple[Int64Array, PriceLevels]:
        """Return a relaxed plan's finishes and its computations' prices of time, each as a column."""
        finishes_ps = relaxed_ps[self._finish][:, None]
        return finishes_ps, self.columns.price_of(finishes_ps - relaxed_ps[self._start][:, None])

    def _round(self, finishes_ps: Int64Array, prices: PriceLevels) -> Int64Array:
        """Return relaxed plans rounded in all ways: first all plans in one way, then all in the next."""
        columns = self.columns
        return np.concatenate(
            [
                columns.within_finishes(
                    finishes_ps, None if offset is None else columns.with_prices(prices - offset)
                )
                for offset in self._settings.price_offsets
            ],
            axis=1,
        )

    def _rounded_plans(
        self, targets: Sequence[Callable[[], Target]], report: Callable[[float], None]
    ) -> "_Plans":
        """Round every relaxed plan in all ways, search a little, and keep the best of each."""
        columns, settings = self.columns, self._settings
        offset_count = len(settings.price_offsets)
        plans = _Plans(columns.row_count, len(targets))
        for some in self._portions(np.arange(len(targets)), offset_count):
            finishes_ps = np.empty((columns.row_count, len(some)), dtype=np.int64)
            for column, index in enumerate(some.tolist()):
                target = targets[index]()
                finishes_ps[:, [column]], plans.prices[:, [index]] = self._relaxed(target.relaxed_ps)
                plans.deadlines_ps[index] = target.deadline_ps
                plans.bounds_j[index], plans.energies_j[index] = target.bound_j, target.energy_j
            prices = plans.prices[:, some]
            found = self._search.search(
                self._round(finishes_ps, prices),
                np.tile(plans.deadlines_ps[some], offset_count),
                np.tile(prices, (1, offset_count)),
                settings.round_tries,
            )
            best = columns.effective_energies_j(found).reshape(offset_count, len(some)).argmin(axis=0)
            plans.choices[:, some] = found[:, best * len(some) + np.arange(len(some))]
            report((some[-1] + 1) / len(targets))
        return plans

    # --- Searching ------------------------------------------------------------------------------------------

    def _search_plans(self, plans: "_Plans", report: Callable[[float], None]) -> None:
        """Search all plans that are far from their bound."""
        far = np.flatnonzero(self._excess_shares(plans) > self._settings.search_above)
        for some in self._portions(far):
            plans.choices[:, some] = self._search.search(
                plans.choices[:, some],
                plans.deadlines_ps[some],
                plans.prices[:, some],
                self._settings.search_tries,
            )
            report(int(np.searchsorted(far, some[-1], "right")) / len(far))

    # --- Mixing ---------------------------------------------------------------------------------------------

    def _exchange(self, plans: "_Plans", report: Callable[[float], None]) -> None:
        """Mix every plan that is far from its bound with others."""
        times_ps = self._fusion.times_ps(plans.choices)
        corners = _hull_corners(times_ps[-1], self.columns.effective_energies_j(plans.choices))
        enough_j = plans.bounds_j + self._settings.exchange_above * plans.energies_j
        for index in np.flatnonzero(self._excess_shares(plans) > self._settings.exchange_above).tolist():
            deadline_ps = int(plans.deadlines_ps[index])
            mixed = self._mix(
                plans.choices[:, [index]],
                times_ps[:, index],
                self._others(times_ps, index, deadline_ps, corners),
                deadline_ps,
                float(enough_j[index]),
            )
            plans.choices[:, [index]], times_ps[:, index] = mixed.choice, mixed.times_ps
            report((index + 1) / len(enough_j))

    def _mix(
        self,
        choice: Int64Array,
        times_ps: Int64Array,
        others_ps: Iterable[Int64Array],
        deadline_ps: int,
        enough_j: float,
    ) -> "_Mixed":
        """Let a plan take over cheaper parts from others, one by one, until its energy is low enough."""
        best = _Mixed(choice, times_ps, float(self.columns.effective_energies_j(choice)[0]))
        for other_ps in others_ps:
            fused_ps = self._fusion.fuse(best.times_ps, other_ps, deadline_ps)
            fused = self._fusion.choice(fused_ps)
            fused_j = float(self.columns.effective_energies_j(fused)[0])
            if fused_j < best.energy_j:
                best = _Mixed(fused, fused_ps, fused_j)
                if fused_j <= enough_j:
                    break
        return best

    def _others(
        self, times_ps: Int64Array, index: int, deadline_ps: int, corners: Sequence[int]
    ) -> Iterator[Int64Array]:
        """Yield the events' times of the plans that may improve one."""
        faster = max((corner for corner in corners if corner < index), default=index)
        slower = min((corner for corner in corners if corner > index), default=index)
        if faster < index < slower and slower - faster > 2:  # otherwise they are the neighbours
            faster_ps, slower_ps = times_ps[:, faster], times_ps[:, slower]
            # Begin as in the faster plan and end as in the slower one, shifted to end in time; and vice
            # versa.
            yield self._fusion.fuse(faster_ps, slower_ps + (deadline_ps - slower_ps[-1]), deadline_ps)
            later_ps = faster_ps + (deadline_ps - faster_ps[-1])
            later_ps[0] = 0  # the iteration's start: the first computations get longer
            yield self._fusion.fuse(later_ps, slower_ps, deadline_ps)
        for neighbour in (index - 1, index + 1):
            if 0 <= neighbour < times_ps.shape[1]:
                yield from _at_both_ends(times_ps[:, neighbour], deadline_ps)

    # --- All plans ------------------------------------------------------------------------------------------

    def _excess_shares(self, plans: "_Plans") -> FloatArray:
        """Return each plan's energy above its bound, as a share of its energy."""
        effective_j = self.columns.effective_energies_j(plans.choices)
        found: FloatArray = (effective_j - plans.bounds_j) / plans.energies_j
        return found

    def _portions(self, which: Int64Array, width: int = 1) -> Iterator[Int64Array]:
        """Split plan indices into portions that fit the memory limit."""
        size = max(1, self._settings.max_cells // (self.columns.row_count * width))
        for begin in range(0, len(which), size):
            yield which[begin : begin + size]


class _Plans:
    """A plan for each deadline: choices and prices as columns, otherwise one value each."""

    def __init__(self, row_count: int, count: int) -> None:
        self.choices: Int64Array = np.empty((row_count, count), dtype=np.int64)
        self.prices: PriceLevels = np.empty((row_count, count), dtype=np.int8)
        self.deadlines_ps: Int64Array = np.empty(count, dtype=np.int64)
        self.bounds_j: FloatArray = np.empty(count)
        self.energies_j: FloatArray = np.empty(count)


class _Mixed(NamedTuple):
    """A plan: its choice (a column), its events' times and its effective energy."""

    choice: Int64Array
    times_ps: Int64Array
    energy_j: float


class _Steps:
    """Reports the progress of steps of similar length."""

    def __init__(self, report: Callable[[float], None], count: int) -> None:
        self._report = report
        self._count = count
        self._done = 0

    def next(self) -> Callable[[float], None]:
        """Return the progress callback for the next step."""
        done = self._done
        self._done += 1
        return lambda share: self._report((done + share) / self._count)


def _at_both_ends(times_ps: Int64Array, deadline_ps: int) -> Iterator[Int64Array]:
    """Yield a plan's times twice: aligned with the iteration's start, and with its end."""
    yield times_ps
    if times_ps[-1] != deadline_ps:
        yield times_ps + (deadline_ps - times_ps[-1])


def _hull_corners(times_ps: Int64Array, effective_j: FloatArray) -> list[int]:
    """Return the indices of the corners of the falling lower hull of (time, energy), by rising time."""
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
