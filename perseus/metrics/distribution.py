"""A histogram of durations: a few integers, whatever the number of durations. Pure."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Distribution:
    """Counts durations by upper bounds, in rising order, seconds. Adding one costs a bisection.

    Attributes:
        count: the number of durations.
        total_s: their sum.
    """

    __slots__ = ("_bounds_s", "_counts", "count", "total_s")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(self._bounds_s) + 1)
        self.count = 0
        self.total_s = 0.0

    def add(self, duration_s: float) -> None:
        """Count a duration; one that equals a bound counts below it."""
        self._counts[bisect_left(self._bounds_s, duration_s)] += 1
        self.count += 1
        self.total_s += duration_s

    def cumulative(self) -> list[tuple[float, int]]:
        """Return, for each bound and for infinity, how many durations did not exceed it."""
        return list(zip((*self._bounds_s, float("inf")), accumulate(self._counts), strict=True))
