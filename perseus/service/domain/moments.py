"""Means and the squared deviations from them."""

import math


def standard_error(m2: float, count: int) -> float:
    """Return the standard error of the mean of values; 0 for a single one.

    `m2` is the sum of their squared deviations from the mean.
    """
    return math.sqrt(max(m2, 0.0) / (count - 1) / count) if count > 1 else 0.0
