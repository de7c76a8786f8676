"""The speed in each hour that finishes the work in time at the least signal × energy.

A job's power over its speed is a convex, piecewise linear curve (plans mixed over an hour lie on it). So each
hour offers its pieces in order, each with a number of further iterations and their joules. Weighted with the
hour's signal, joules become prices; the cheapest pieces that suffice for the work are chosen. The price of
the last one is the multiplier of the constraint on the work: every hour runs where its marginal joules have
that price.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.errors import InvalidFieldError

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SpeedPoint:
    """An operating point: the iteration time on the frontier's scale, the actual speed, and the power."""

    iteration_time_s: float
    speed_per_s: float
    power_w: float

    @property
    def energy_j(self) -> float:
        """Energy of an iteration."""
        return self.power_w / self.speed_per_s


class SpeedCurve:
    """A job's speed points, and their lower hull of power over speed.

    Points that need more energy per iteration than a faster one are left out: a job with that much time is
    better off finishing earlier.

    Attributes:
        points: fastest first.
    """

    def __init__(self, points: Sequence[SpeedPoint]) -> None:
        """Keep the efficient points of a job, which has at least one.

        Raises:
            InvalidFieldError: there is none.
        """
        if not points:
            raise InvalidFieldError(field="points", expected="at least one", found="none")
        ordered = sorted(points, key=lambda point: -point.speed_per_s)
        kept = [ordered[0]]
        for point in ordered[1:]:
            if point.speed_per_s < kept[-1].speed_per_s and point.energy_j < kept[-1].energy_j:
                kept.append(point)
        self.points = tuple(kept)
        hull: list[SpeedPoint] = []
        for point in reversed(kept):
            while len(hull) >= 2 and _slope_j(hull[-2], hull[-1]) >= _slope_j(hull[-1], point):
                hull.pop()
            hull.append(point)
        self._hull = tuple(hull)
        self._steps_per_s = np.diff([point.speed_per_s for point in hull])
        self._slopes_j = np.array([_slope_j(before, after) for before, after in pairwise(hull)])

    @property
    def slowest_per_s(self) -> float:
        """The lowest speed that saves energy."""
        return self._hull[0].speed_per_s

    @property
    def fastest_per_s(self) -> float:
        """The highest speed."""
        return self._hull[-1].speed_per_s

    def power_w(self, speed_per_s: float) -> float:
        """Return the least mean power at a speed, mixing plans."""
        speeds = [point.speed_per_s for point in self._hull]
        return float(np.interp(speed_per_s, speeds, [point.power_w for point in self._hull]))

    def at_least(self, speed_per_s: float) -> SpeedPoint:
        """Return the slowest point that is at least that fast; the fastest if none is."""
        enough = [point for point in self.points if point.speed_per_s >= speed_per_s * (1 - 1e-12)]
        return enough[-1] if enough else self.points[0]

    def spend(self, durations_s: Floats, signal: Floats, iteration_count: float) -> Floats:
        """Return the speed in each of the next hours that does the work at the least signal × energy.

        Args:
            durations_s: of each hour `[N]`; the first one may have begun already.
            signal: in each hour `[N]`; where it is 0 or less, there is no reason to save energy.
            iteration_count: to be done in all of them together.

        Returns:
            Iterations per second `[N]`: the fastest in all hours if the work can't be done in time, the
            slowest that saves energy if even that suffices.
        """
        # A negative signal pays for power, so those hours run at the fastest speed.
        priced = np.maximum(signal, 0.0)
        prices = priced[:, None] * self._slopes_j
        gained = durations_s[:, None] * self._steps_per_s
        is_free = signal <= 0
        prices[is_free] = -math.inf
        order = np.argsort(prices, axis=None, kind="stable")  # within an hour, pieces stay in their order
        left = iteration_count - self.slowest_per_s * float(durations_s.sum())
        each = gained.ravel()[order]
        before = np.concatenate([np.zeros(1), np.cumsum(each)[:-1]])
        share = np.clip((left - before) / np.maximum(each, 1e-300), 0.0, 1.0)
        share[np.isneginf(prices.ravel()[order])] = 1.0
        taken = np.zeros(prices.size)
        taken[order] = share
        speeds: Floats = self.slowest_per_s + taken.reshape(prices.shape) @ self._steps_per_s
        return speeds


def _slope_j(slower: SpeedPoint, faster: SpeedPoint) -> float:
    """Return the marginal energy of an iteration between two points."""
    return (faster.power_w - slower.power_w) / (faster.speed_per_s - slower.speed_per_s)
