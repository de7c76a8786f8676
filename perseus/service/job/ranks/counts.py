"""Figures over many ranks, kept up to date without visiting each rank. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def move(counts: Counter[T], before: Iterable[T], after: Iterable[T]) -> bool:
    """Count values in place of others; return whether the counted values are others than before.

    A value that is no longer counted is dropped.
    """
    is_other = False
    for value in after:
        is_other |= value not in counts
        counts[value] += 1
    for value in before:
        counts[value] -= 1
        assert counts[value] >= 0
        if not counts[value]:
            del counts[value]
            is_other = True
    return is_other


class IterationCounts:
    """The number of ranks at each iteration: few entries, as ranks stay close together.

    The highest falls when the ranks at it leave, or join again at a lower one.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def move(self, before: Iterable[int], after: Iterable[int]) -> None:
        """Count a rank at an iteration in place of another; either may be missing."""
        move(self._counts, before, after)

    def reached_by(self, rank_count: int) -> int:
        """Return the highest iteration that this many ranks have reached, -1 if fewer ranks have begun."""
        for iteration in sorted(self._counts, reverse=True):
            rank_count -= self._counts[iteration]
            if rank_count <= 0:
                return iteration
        return -1

    def highest(self, limit: int) -> int:
        """Return the highest iteration of any rank up to a limit, -1 if there is none."""
        return max((iteration for iteration in self._counts if iteration <= limit), default=-1)
