"""Student's distribution, for intervals: baselines are so short that 1.96 errors are too few."""

import math

_NORMAL = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""

_ONE, _TWO = 12.706204736174694, 4.302652729749464
"""The same quantile of Student's distribution with 1 and 2 degrees of freedom."""


def interval_factor(freedom: float) -> float:
    """Return half the width of a 95 % interval, in standard errors.

    This is the 97.5 % quantile of Student's distribution with `freedom` degrees of freedom, 1 or more and any
    fraction, as Welch's and Satterthwaite's are. From 3 on it uses Fisher's expansion about the normal
    distribution to the fourth order (Abramowitz and Stegun, 26.7.5): 0.12 % too small for 3, 0.01 % for 5.
    Below 3 it interpolates linearly in 1 / freedom, which errs above the curve.
    """
    if freedom >= 3:
        return _expansion(freedom)
    minimum, at_least, at_next = (1, _ONE, _TWO) if freedom < 2 else (2, _TWO, _expansion(3))
    share = (1 / minimum - 1 / freedom) / (1 / minimum - 1 / (minimum + 1))
    return at_least + share * (at_next - at_least)


def _expansion(freedom: float) -> float:
    z = _NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92_160,
    )
    return z + math.fsum(term / freedom**order for order, term in enumerate(terms, 1))
