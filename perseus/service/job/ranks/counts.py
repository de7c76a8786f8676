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

    def add(self, iteration: int) -> None:
        """Add a rank at an iteration."""
        move(self._counts, (), (iteration,))

    def remove(self, iteration: int) -> None:
        """Remove a rank from an iteration."""
        move(self._counts, (iteration,), ())

    def highest(self) -> int:
        """Return the highest iteration of any rank, -1 if there is none."""
        return max(self._counts, default=-1)
