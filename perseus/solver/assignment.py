"""A choice of options in the making: who has how much slack, while computations get faster and slower.

Every change is journalled, so that a try that does not pay is taken back at the cost of what it touched.
"""

import heapq
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence

from perseus.solver.graph import EventGraph

Choice = list[int]
"""Per computation, the index of its chosen option."""

Arc = tuple[int, int]
"""A neighbour's index and the lag in picoseconds between the two."""


class Neighbourhood:
    """One event graph as plain lists: each computation's options and whom it waits for and is awaited by.

    ``before`` and ``after`` follow the order of the indices: who is before has a lower index.
    """

    def __init__(self, graph: EventGraph) -> None:
        times_ps = [[option.time_ps for option in options] for options in graph.options]
        energies_j = [[option.effective_energy_j for option in options] for options in graph.options]
        self.times_ps: list[list[int]] = [times_ps[p] for p in graph.profile_of]
        self.energies_j: list[list[float]] = [energies_j[p] for p in graph.profile_of]
        self.before: list[list[Arc]] = [[] for _ in graph.computations]
        self.after: list[list[Arc]] = [[] for _ in graph.computations]
        for earlier, later, lag_ps in graph.dependencies:
            self.before[later].append((earlier, lag_ps))
            self.after[earlier].append((later, lag_ps))


class Assignment:
    """A chosen option for every computation, and each computation's earliest and latest finish.

    Attributes:
        choice: per computation, the index of its option.
    """

    def __init__(self, neighbourhood: Neighbourhood, choice: Sequence[int], deadline_ps: int) -> None:
        self._neighbourhood, self._deadline_ps = neighbourhood, deadline_ps
        self.choice = list(choice)
        self._durations_ps = [times_ps[k] for times_ps, k in zip(neighbourhood.times_ps, choice, strict=True)]
        self._earliest_ps = [0] * len(choice)
        self._latest_ps = [0] * len(choice)
        self._journal: list[tuple[list[int], int, int]] = []
        """Undoing an entry (values, i, old) sets values[i] back to old."""
        for i in range(len(choice)):
            self._earliest_ps[i] = self._earliest_finish_ps(i)
        for i in reversed(range(len(choice))):
            self._latest_ps[i] = self._latest_finish_ps(i)

    def slack_ps(self, i: int) -> int:
        """Return by how much ``i`` may get longer."""
        return self._latest_ps[i] - self._earliest_ps[i]

    def choose(self, i: int, option: int) -> None:
        """Give ``i`` another option and update those after and before it whom it matters to."""
        self._set(self.choice, i, option)
        self._set(self._durations_ps, i, self._neighbourhood.times_ps[i][option])
        later = [i]
        while later:
            j = heapq.heappop(later)
            while later and later[0] == j:
                heapq.heappop(later)
            finish_ps = self._earliest_finish_ps(j)
            if finish_ps != self._earliest_ps[j]:
                self._set(self._earliest_ps, j, finish_ps)
                for after, _ in self._neighbourhood.after[j]:
                    heapq.heappush(later, after)
        earlier = [-before for before, _ in self._neighbourhood.before[i]]
        heapq.heapify(earlier)
        while earlier:
            j = -heapq.heappop(earlier)
            while earlier and earlier[0] == -j:
                heapq.heappop(earlier)
            finish_ps = self._latest_finish_ps(j)
            if finish_ps != self._latest_ps[j]:
                self._set(self._latest_ps, j, finish_ps)
                for before, _ in self._neighbourhood.before[j]:
                    heapq.heappush(earlier, -before)

    def spend_slack(self, computations: Iterable[int]) -> float:
        """Slow these down while the iteration still ends by the deadline, the best bargain first.

        All of a computation's slower options are looked at, not just the next. Slack only shrinks on the
        way, so an outdated bargain in the heap is never better than it seems: it is looked at again when its
        turn comes.

        Returns:
            The joules saved.
        """
        saved_j = 0.0
        bargains = [bargain for i in computations if (bargain := self._best_bargain(i))]
        heapq.heapify(bargains)
        while bargains:
            _, i, option = seen = bargains[0]
            bargain = self._best_bargain(i)
            if bargain == seen:
                energies_j = self._neighbourhood.energies_j[i]
                saved_j += energies_j[self.choice[i]] - energies_j[option]
                self.choose(i, option)
                bargain = self._best_bargain(i)
            if bargain:
                heapq.heapreplace(bargains, bargain)
            else:
                heapq.heappop(bargains)
        return saved_j

    def mark(self) -> int:
        """Return a mark of the present state, for :meth:`undo_to` and the like."""
        return len(self._journal)

    def undo_to(self, mark: int) -> None:
        """Take back all changes since the mark."""
        while len(self._journal) > mark:
            values, i, old = self._journal.pop()
            values[i] = old

    def rescheduled_since(self, mark: int) -> set[int]:
        """Return the computations whose earliest or latest finish has changed since the mark."""
        return {i for values, i, _ in self._journal[mark:] if values is not self.choice}

    def rechosen_since(self, mark: int) -> Collection[int]:
        """Return the computations whose option has changed since the mark, in the order of the changes."""
        return dict.fromkeys(i for values, i, _ in self._journal[mark:] if values is self.choice)

    def _set(self, values: list[int], i: int, value: int) -> None:
        self._journal.append((values, i, values[i]))
        values[i] = value

    def _best_bargain(self, i: int) -> tuple[float, int, int] | None:
        """Return (minus the joules saved per ps, i, option) of i's best slower option within its slack."""
        times_ps, energies_j, k = (
            self._neighbourhood.times_ps[i],
            self._neighbourhood.energies_j[i],
            self.choice[i],
        )
        end = bisect_right(times_ps, times_ps[k] + self._latest_ps[i] - self._earliest_ps[i])
        if end == k + 1:
            return None
        return min(
            ((energies_j[slower] - energies_j[k]) / (times_ps[slower] - times_ps[k]), i, slower)
            for slower in range(k + 1, end)
        )

    def _earliest_finish_ps(self, i: int) -> int:
        start_ps = 0
        for before, lag_ps in self._neighbourhood.before[i]:
            ready_ps = self._earliest_ps[before] + lag_ps
            if ready_ps > start_ps:
                start_ps = ready_ps
        return start_ps + self._durations_ps[i]

    def _latest_finish_ps(self, i: int) -> int:
        finish_ps = self._deadline_ps
        for after, lag_ps in self._neighbourhood.after[i]:
            needed_ps = self._latest_ps[after] - self._durations_ps[after] - lag_ps
            if needed_ps < finish_ps:
                finish_ps = needed_ps
        return finish_ps
