"""The highest iteration of many ranks, kept as they move: no look at each of them. Pure."""

from collections import Counter


class IterationCounts:
    """How many ranks are at each iteration: few numbers, as ranks keep close together.

    The highest falls when the ranks that are there leave, or join again at a lower one.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, iteration: int) -> None:
        """A rank is at an iteration now."""
        self._counts[iteration] += 1

    def remove(self, iteration: int) -> None:
        """A rank is there no more."""
        self._counts[iteration] -= 1
        assert self._counts[iteration] >= 0
        if not self._counts[iteration]:
            del self._counts[iteration]

    def highest(self) -> int:
        """Return the highest iteration that a rank is at, -1 if there is none."""
        return max(self._counts, default=-1)
