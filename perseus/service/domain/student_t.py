"""Student's distribution, for intervals: what is compared is so few that 1.96 errors are too few."""

import math
from functools import lru_cache
from statistics import NormalDist

_MANY = 100
"""From so many degrees of freedom on, an expansion is right to five digits, and quick."""

_PRECISION = 1e-10


@lru_cache(maxsize=4096)
def interval_factor(freedom: float, confidence: float = 0.95) -> float:
    """Return half the width of an interval of that confidence, in standard errors.

    `freedom` may be any fraction from 1 on, as Welch's and Satterthwaite's are. Newton's method from the
    normal distribution's quantile, which is smaller: the distribution is concave above 0, so each step ends
    below the quantile, too.
    """
    share = (1 + confidence) / 2
    factor = NormalDist().inv_cdf(share)
    if freedom >= _MANY:  # Fisher's, about the normal distribution (A&S 26.7.5)
        terms = (factor**3 + factor) / 4, (5 * factor**5 + 16 * factor**3 + 3 * factor) / 96
        return factor + math.fsum(term / freedom**order for order, term in enumerate(terms, 1))
    while True:
        tail = _tail(factor, freedom)
        step = (tail - (1 - share)) / _density(factor, freedom)
        factor += step
        if step <= _PRECISION * factor:
            return factor


def _log_beta(freedom: float) -> float:
    return math.lgamma(freedom / 2) + math.lgamma(0.5) - math.lgamma((freedom + 1) / 2)


def _density(t: float, freedom: float) -> float:
    log = -_log_beta(freedom) - (freedom + 1) / 2 * math.log1p(t * t / freedom)
    return math.exp(log) / math.sqrt(freedom)


def _tail(t: float, freedom: float) -> float:
    """Return the probability of more than t: half of the incomplete beta function (A&S 26.7.1, 26.5.8)."""
    a, b, x = freedom / 2, 0.5, freedom / (freedom + t * t)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) - _log_beta(freedom))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a / 2
    return (1 - front * _fraction(b, a, 1 - x) / b) / 2


def _fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction, from its first convergent on, by Steed's recurrence."""
    value = step = divisor = 1.0
    number = 0
    while number == 0 or abs(step) > _PRECISION * value:
        half, is_odd = divmod(number + 1, 2)
        if is_odd:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        divisor = 1 / (1 + term * divisor)
        step *= divisor - 1
        value += step
        number += 1
    return value
