"""From relaxed plans to measured clocks, without ever missing the deadline.

A relaxed plan runs computations for durations between two measured ones. Roundings give each computation a
clock that fits: one the slowest that fits its own planned duration, another the slowest that ends it by its
planned finish, so that what one computation leaves over the next one can use. What is left over after that is
spent where a second of it saves most.

Then a local search looks for trades: one computation a step or a few faster, so that others can be slower and
together save more than it costs. It ends where no such trade is left, or when its effort is used up.

Where the measured clocks lie far above the hull (a cliff in the profile), a relaxed plan mixes clocks that no
real plan can mix. :func:`relax_locally` therefore relaxes again and again on *local* hulls, those of the few
measured clocks around the last relaxed duration, fewer each time.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from perseus.solver.assignment import Assignment, Choice, Neighbourhood
from perseus.solver.graph import EventGraph, Int64Array, convex_hulls
from perseus.solver.profile import PS_PER_S, Option
from perseus.solver.sweep import sweep_frontier

_REACHES = (8, 5, 3, 2, 1)
_REACHES_AROUND = (6, 3, 1)
"""How many options to either side the local hulls reach, relaxation by relaxation: around relaxed plans, and
around real ones."""

_COARSE_REACHES = (8, 4, 2)
_COARSE_REACHES_AROUND = (4, 2)
_COARSE_TOLERANCE = 0.01
"""The same where relaxing takes long, and what hull tolerance it has."""

_STEPS = 3
"""By how many options a trade may make a computation faster."""


class Rounder:
    """Rounds relaxed plans of one event graph. A slower option is always a cheaper one (Pareto)."""

    def __init__(self, graph: EventGraph) -> None:
        self._graph = graph
        self._neighbourhood = Neighbourhood(graph)

    def effective_energy_j(self, choice: Choice) -> float:
        """Return what the chosen options cost together."""
        return sum(
            (energies_j[k] for energies_j, k in zip(self._neighbourhood.energies_j, choice, strict=True)), 0.0
        )

    def round(self, event_times_ps: Int64Array, deadline_ps: int, others: Sequence[Choice] = ()) -> Choice:
        """Return options that meet the deadline, from the events' times in a relaxed plan.

        ``others`` are choices, of this deadline or a shorter one, that may be better once slack is spent.
        They take the place of the second rounding.
        """
        starts_ps = event_times_ps[self._graph.start_event]
        finishes_ps = event_times_ps[self._graph.finish_event]
        candidates = [self._round_durations((finishes_ps - starts_ps).tolist()), *others]
        if not others:
            candidates.append(self._round_finishes(finishes_ps.tolist()))
        return min(
            (self._spend_slack(choice, deadline_ps) for choice in candidates), key=self.effective_energy_j
        )

    def improve(self, choice: Choice, deadline_ps: int, most_updates: float, first: int = 0) -> Choice:
        """Search for trades that save energy, in turn from computation ``first`` on.

        After a trade, those next to whom it changed are looked at again. ``most_updates`` bounds the effort
        (see :class:`Assignment`).
        """
        assignment = Assignment(self._neighbourhood, choice, deadline_ps)
        count = len(choice)
        waiting = deque((first + k) % count for k in range(count))
        in_line = [True] * count
        while waiting and assignment.update_count < most_updates:
            i = waiting.popleft()
            in_line[i] = False
            for changed in self._trade(assignment, i):
                neighbours = self._neighbourhood.before[changed] + self._neighbourhood.after[changed]
                for j in (changed, *(neighbour for neighbour, _ in neighbours)):
                    if not in_line[j]:
                        in_line[j] = True
                        waiting.append(j)
        return assignment.choice

    def _trade(self, assignment: Assignment, i: int) -> Iterable[int]:
        """Make ``i`` faster if others can save more than that costs; return whose options have changed."""
        energies_j, now = self._neighbourhood.energies_j[i], assignment.choice[i]
        for option in range(now - 1, max(-1, now - 1 - _STEPS), -1):
            mark = assignment.mark()
            assignment.choose(i, option)
            saved_j = assignment.spend_slack(assignment.rescheduled_since(mark) - {i})
            if saved_j > (energies_j[option] - energies_j[now]) * (1 + 1e-9):
                return assignment.rechosen_since(mark)
            assignment.undo_to(mark)
        return ()

    def _round_durations(self, planned_ps: list[int]) -> Choice:
        return [
            bisect_right(times_ps, planned) - 1
            for times_ps, planned in zip(self._neighbourhood.times_ps, planned_ps, strict=True)
        ]

    def _round_finishes(self, planned_ps: list[int]) -> Choice:
        finishes_ps: list[int] = []
        choice: Choice = []
        for before, times_ps, planned in zip(
            self._neighbourhood.before, self._neighbourhood.times_ps, planned_ps, strict=True
        ):
            start_ps = max((finishes_ps[i] + lag_ps for i, lag_ps in before), default=0)
            k = bisect_right(times_ps, planned - start_ps) - 1
            choice.append(k)
            finishes_ps.append(start_ps + times_ps[k])
        return choice

    def _spend_slack(self, choice: Sequence[int], deadline_ps: int) -> Choice:
        assignment = Assignment(self._neighbourhood, choice, deadline_ps)
        assignment.spend_slack(range(len(choice)))
        return assignment.choice


def relax_locally(
    graph: EventGraph,
    event_times_ps: Int64Array,
    deadline_ps: int,
    *,
    is_coarse: bool,
    report: Callable[[float], None],
) -> Iterator[Int64Array]:
    """Relax for one deadline again and again, on local hulls around the relaxed plan before.

    Args:
        graph: the iteration.
        event_times_ps: of the first relaxed plan.
        deadline_ps: the iteration time.
        is_coarse: relax less often, and with a hull tolerance, where it takes long.
        report: called with the share of the relaxations that is done, from 0 to 1.

    Yields:
        The events' times.
    """
    reaches, tolerance = (_COARSE_REACHES, _COARSE_TOLERANCE) if is_coarse else (_REACHES, 0.0)
    for number, reach in enumerate(reaches):
        durations_ps = event_times_ps[graph.finish_event] - event_times_ps[graph.start_event]
        local = with_local_hulls(graph, durations_ps, reach, tolerance)
        sweep = sweep_frontier(
            local,
            lambda share, done=number: report((done + share) / len(reaches)),  # type: ignore[misc]
            stop_s=deadline_ps / PS_PER_S,
        )
        event_times_ps = sweep.event_times_at(deadline_ps)
        yield event_times_ps


def around_reaches(is_coarse: bool) -> tuple[Sequence[int], float]:
    """Return how far to relax around real plans, one time after the other, and with what hull tolerance."""
    return (_COARSE_REACHES_AROUND, _COARSE_TOLERANCE) if is_coarse else (_REACHES_AROUND, 0.0)


def relax_around(
    graph: EventGraph,
    durations_ps: Int64Array,
    deadline_ps: int,
    reach: int,
    hull_tolerance: float,
    report: Callable[[float], None],
) -> Int64Array:
    """Return the events' times in a relaxed plan on local hulls around a real one that keeps the deadline."""
    local = with_local_hulls(graph, durations_ps, reach, hull_tolerance)
    sweep = sweep_frontier(local, report, stop_s=deadline_ps / PS_PER_S)
    return sweep.event_times_at(deadline_ps)


def with_local_hulls(
    graph: EventGraph, durations_ps: Int64Array, reach: int, hull_tolerance: float = 0.0
) -> EventGraph:
    """Return the graph with each computation planned on the hull of the options around its duration.

    ``reach`` options on either side; the option that fits the duration is always among them, so that what was
    feasible stays it.
    """
    index_of: dict[tuple[int, int, int], int] = {}
    options: list[tuple[Option, ...]] = []
    profile_of = np.empty_like(graph.profile_of)
    times_ps = [[option.time_ps for option in some] for some in graph.options]
    for i, (p, duration_ps) in enumerate(zip(graph.profile_of.tolist(), durations_ps.tolist(), strict=True)):
        fits = bisect_right(times_ps[p], duration_ps) - 1
        slower = fits + (times_ps[p][fits] != duration_ps)
        window = (p, max(0, slower - reach), fits + reach + 1)
        if window not in index_of:
            index_of[window] = len(options)
            options.append(graph.options[p][window[1] : window[2]])
        profile_of[i] = index_of[window]
    return replace(
        graph,
        profile_of=profile_of,
        options=tuple(options),
        hulls=convex_hulls(options, profile_of, hull_tolerance),
    )
