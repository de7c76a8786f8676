"""From relaxed plans to measured clocks, without ever missing the deadline.

A relaxed plan runs computations for durations between two measured ones. Two roundings are made, and the
cheaper one is kept: one gives each computation the slowest clock that fits its own planned duration, the
other the slowest clock that ends it by its planned finish, so that what one computation leaves over the next
one can use. What is left over after that is spent where a second of it saves most, looking at all of a
computation's slower clocks, not just the next.
"""

import heapq
from bisect import bisect_right

from perseus.solver.graph import EventGraph, Int64Array

Choice = list[int]
"""Per computation, the index of its chosen option."""

Arc = tuple[int, int]
"""A neighbour's index and the lag in picoseconds between the two."""


class Rounder:
    """Rounds relaxed plans of one event graph. A slower option is always a cheaper one (Pareto)."""

    def __init__(self, graph: EventGraph) -> None:
        count = len(graph.computations)
        times_ps = [[option.time_ps for option in options] for options in graph.options]
        energies_j = [[option.effective_energy_j for option in options] for options in graph.options]
        self._times_ps = [times_ps[p] for p in graph.profile_of]
        self._energies_j = [energies_j[p] for p in graph.profile_of]
        self._before: list[list[Arc]] = [[] for _ in range(count)]
        self._after: list[list[Arc]] = [[] for _ in range(count)]
        for earlier, later, lag_ps in graph.dependencies:
            self._before[later].append((earlier, lag_ps))
            self._after[earlier].append((later, lag_ps))

    def effective_energy_j(self, choice: Choice) -> float:
        """Return what the chosen options cost together."""
        return sum((energies_j[k] for energies_j, k in zip(self._energies_j, choice, strict=True)), 0.0)

    def round(self, starts_ps: Int64Array, finishes_ps: Int64Array, deadline_ps: int) -> Choice:
        """Return options that meet the deadline, from each computation's relaxed start and finish."""
        candidates = (
            self._round_durations((finishes_ps - starts_ps).tolist()),
            self._round_finishes(finishes_ps.tolist()),
        )
        return min(
            (self._spend_slack(choice, deadline_ps) for choice in candidates), key=self.effective_energy_j
        )

    def _round_durations(self, planned_ps: list[int]) -> Choice:
        return [
            bisect_right(times_ps, planned) - 1
            for times_ps, planned in zip(self._times_ps, planned_ps, strict=True)
        ]

    def _round_finishes(self, planned_ps: list[int]) -> Choice:
        finishes_ps: list[int] = []
        choice: Choice = []
        for before, times_ps, planned in zip(self._before, self._times_ps, planned_ps, strict=True):
            start_ps = max((finishes_ps[i] + lag_ps for i, lag_ps in before), default=0)
            k = bisect_right(times_ps, planned - start_ps) - 1
            choice.append(k)
            finishes_ps.append(start_ps + times_ps[k])
        return choice

    def _spend_slack(self, choice: Choice, deadline_ps: int) -> Choice:
        """Slow computations down while the iteration still ends by the deadline, the best bargain first.

        Slack only ever shrinks, so an outdated bargain in the heap is never better than it seems: it is
        looked at again when its turn comes.
        """
        choice = list(choice)
        slack = _Slack(self._before, self._after, self._durations_ps(choice), deadline_ps)
        bargains = [
            bargain for i, k in enumerate(choice) if (bargain := self._best_bargain(i, k, slack.of(i)))
        ]
        heapq.heapify(bargains)
        while bargains:
            _, i, k = seen = bargains[0]
            bargain = self._best_bargain(i, choice[i], slack.of(i))
            if bargain == seen:
                choice[i] = k
                slack.lengthen(i, self._times_ps[i][k])
                bargain = self._best_bargain(i, k, slack.of(i))
            if bargain:
                heapq.heapreplace(bargains, bargain)
            else:
                heapq.heappop(bargains)
        return choice

    def _best_bargain(self, i: int, k: int, slack_ps: int) -> tuple[float, int, int] | None:
        """Return (minus the joules saved per ps, i, option) of i's best slower option within the slack."""
        times_ps, energies_j = self._times_ps[i], self._energies_j[i]
        last = bisect_right(times_ps, times_ps[k] + slack_ps)
        if last == k + 1:
            return None
        return min(
            ((energies_j[slower] - energies_j[k]) / (times_ps[slower] - times_ps[k]), i, slower)
            for slower in range(k + 1, last)
        )

    def _durations_ps(self, choice: Choice) -> list[int]:
        return [times_ps[k] for times_ps, k in zip(self._times_ps, choice, strict=True)]


class _Slack:
    """How much longer each computation may take, kept up to date while some get longer.

    Neighbours are (index, lag in ps) and follow the order of the indices.
    """

    def __init__(
        self, before: list[list[Arc]], after: list[list[Arc]], durations_ps: list[int], deadline_ps: int
    ) -> None:
        self._before, self._after, self._durations_ps, self._deadline_ps = (
            before,
            after,
            durations_ps,
            deadline_ps,
        )
        count = len(durations_ps)
        self._earliest_ps = [0] * count
        self._latest_ps = [0] * count
        for i in range(count):
            self._earliest_ps[i] = self._earliest_finish_ps(i)
        for i in reversed(range(count)):
            self._latest_ps[i] = self._latest_finish_ps(i)

    def of(self, i: int) -> int:
        """Return by how much ``i`` may get longer, in picoseconds."""
        return self._latest_ps[i] - self._earliest_ps[i]

    def lengthen(self, i: int, duration_ps: int) -> None:
        """Give ``i`` a longer duration and update those after and before it whom it matters to."""
        self._durations_ps[i] = duration_ps
        later = [i]
        while later:
            j = heapq.heappop(later)
            finish_ps = self._earliest_finish_ps(j)
            if finish_ps > self._earliest_ps[j]:
                self._earliest_ps[j] = finish_ps
                for after, _ in self._after[j]:
                    heapq.heappush(later, after)
        earlier = [-before for before, _ in self._before[i]]
        heapq.heapify(earlier)
        while earlier:
            j = -heapq.heappop(earlier)
            finish_ps = self._latest_finish_ps(j)
            if finish_ps < self._latest_ps[j]:
                self._latest_ps[j] = finish_ps
                for before, _ in self._before[j]:
                    heapq.heappush(earlier, -before)

    def _earliest_finish_ps(self, i: int) -> int:
        start_ps = 0
        for before, lag_ps in self._before[i]:
            ready_ps = self._earliest_ps[before] + lag_ps
            if ready_ps > start_ps:
                start_ps = ready_ps
        return start_ps + self._durations_ps[i]

    def _latest_finish_ps(self, i: int) -> int:
        finish_ps = self._deadline_ps
        for after, lag_ps in self._after[i]:
            needed_ps = self._latest_ps[after] - self._durations_ps[after] - lag_ps
            if needed_ps < finish_ps:
                finish_ps = needed_ps
        return finish_ps
