"""How durations follow work: duration ∝ work ** exponent. Pure; agent and coordinator use it."""

import math

MAX_EXPONENT = 2.0
"""Attention's, in the length of a sequence."""

_PRIOR = 1e-3
"""Sum of squared logarithms behind an exponent of 1: as of two durations whose work differs by 5 %."""


class WorkExponent:
    """The exponent, by least squares of logarithms within groups of durations that only work makes differ.

    It is as uncertain as work hardly varies, and matters as little then.
    """

    def __init__(self, exponent: float = 1.0, weight: float = _PRIOR) -> None:
        """Begin with an exponent; `weight`: the sum of squared logarithms of work that it counts as."""
        self._products, self._squares = exponent * weight, weight
        self.begin_group()

    @property
    def value(self) -> float:
        """The exponent, from 0 to `MAX_EXPONENT`."""
        return min(MAX_EXPONENT, max(0.0, self._products / self._squares))

    def begin_group(self) -> None:
        """Begin another group: under other clocks, or of other computations."""
        self._count, self._mean_log_work, self._mean_log_s = 0, 0.0, 0.0

    def add(self, work: float, duration_s: float) -> None:
        """Add a duration to the current group."""
        self._count += 1
        distance = math.log(work) - self._mean_log_work
        self._mean_log_work += distance / self._count
        self._mean_log_s += (math.log(duration_s) - self._mean_log_s) / self._count
        self._products += distance * (math.log(duration_s) - self._mean_log_s)
        self._squares += distance * (math.log(work) - self._mean_log_work)
