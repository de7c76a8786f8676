"""The highest iteration of many ranks, kept up to date without visiting each rank. Pure."""

from collections import Counter


class IterationCounts:
    """The number of ranks at each iteration: few entries, as ranks stay close together.

    The highest falls when the ranks at it leave, or join again at a lower one.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, iteration: int) -> None:
        """Add a rank at an iteration."""
        self._counts[iteration] += 1

    def remove(self, iteration: int) -> None:
        """Remove a rank from an iteration."""
        self._counts[iteration] -= 1
        assert self._counts[iteration] >= 0
        if not self._counts[iteration]:
            del self._counts[iteration]

    def highest(self) -> int:
        """Return the highest iteration of any rank, -1 if there is none."""
        return max(self._counts, default=-1)
