"""Evidence that a figure's level has changed, accumulated iteration by iteration. Pure.

Theory of operation
===================

A source (a pipeline, or the whole job) has an assumed *level*, a log ratio that is 0 at first. For each of a
grid of other levels θ, an iteration's value x is more likely by the ratio

    L(θ) = (g((x - θ) / σ) + h) / (g((x - level) / σ) + h + c),

and the statistic of Shiryaev and Roberts, R(θ) ← (1 + R(θ)) L(θ), accumulates that over the iterations:
wherever a change began, without a window. The mean of R over θ minus the number of iterations has no drift as
long as nothing changes, so it reaches a threshold A not before A iterations on average: that is the stated
error rate, and A is chosen by it. Averaging over several θ makes it unnecessary to guess the size of the
change.

g is Student's density over its maximum, and h the learned probability of a hiccup at least so far above the
level (`hiccups`). If the source's previous value was far above, too, c is the probability that hiccups go on.
So a value is evidence only as far as noise brings its like rarely: a hiccup seen once in 200 values raises R
by 200 at most, and the next one, where half of them go on, by 2. A value that is implausible under both
levels is none. |x - θ| is the distance from the part of the grid that θ stands for. A value below the level
is never evidence for a higher one.

No single value counts for more than `_MAX_SHARE` of the threshold, as a log, whatever was learned.
"""

import math

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.telemetry import FloatColumn
from perseus.service.job.statistics.hiccups import UNSEEN_SHARE
from perseus.service.job.statistics.noise import Noise

MIN_LEVEL = 0.02
LEVELS: FloatColumn = np.concatenate(([0.0], MIN_LEVEL * math.sqrt(2) ** np.arange(12)))
"""Log ratios: of 1 and of 1.02 to 2.5."""

GAP = 0.01
"""Levels closer than this are the same."""

_CELL = 0.2
"""Largest distance of a level from the grid's nearest one, as a share of that: levels are √2 apart.

Half a scale less is enough: g is flat there.
"""

_MAX_SHARE = 0.8
"""The rest has to come from other iterations: for 32 pipelines a factor of 13, as continued hiccups allow
where none has been seen.
"""

_MAX_SHARE_BELOW = 0.5
"""The same for lower levels, so that two values have to agree."""

_MAX = 1e250
"""Bound of the statistic, so that its products stay within the range of a float."""


class SequentialTest:
    """Accumulates evidence for other levels of `count` sources.

    Attributes:
        threshold_above: A for higher levels.
        threshold_below: the same for lower levels.
    """

    def __init__(self, count: int, threshold_above: float, threshold_below: float) -> None:
        self.threshold_above, self.threshold_below = threshold_above, threshold_below
        self._cap_above = _MAX_SHARE * math.log(threshold_above * len(LEVELS))
        self._cap_below = _MAX_SHARE_BELOW * math.log(threshold_below * len(LEVELS))
        self.levels: FloatColumn = np.zeros(count)
        self._evidence = np.zeros((count, len(LEVELS)))

    def add(self, values: FloatColumn, noise: Noise, *, is_learned: bool = False) -> None:
        """Take an iteration: one log ratio per source, NaN for unknown ones.

        `is_learned`: the noise was already given this iteration.
        """
        known = np.flatnonzero(~np.isnan(values))
        own, level = values[known, None], self.levels[known, None]
        # Correlated bulk is weaker evidence; the clustering of hiccups is in their probability.
        freedom, weight = noise.degrees_of_freedom, noise.independence
        scales = noise.scales[known, None]
        begun, continued = noise.hiccups.shares(known, (own - level)[:, 0], is_learned=is_learned)
        begun, continued = begun[:, None], continued[:, None]
        cells = np.maximum(0.0, _CELL * LEVELS - scales / 2)
        widths = np.hypot(scales, cells)
        there = _density(np.maximum(0.0, np.abs(own - LEVELS) - cells) / widths, freedom) ** weight
        here = _density((own - level) / scales, freedom) ** weight
        fits = np.log(there + np.where(own > LEVELS, begun, UNSEEN_SHARE))
        fits -= np.log(here + begun + continued)
        is_above = level < LEVELS
        fits = np.where(is_above == (own < level), np.minimum(fits, 0.0), fits)
        caps = np.where(is_above, self._cap_above, self._cap_below)
        ratios = np.exp(np.clip(fits, -caps, caps))
        self._evidence[known] = np.minimum(_MAX, (1 + self._evidence[known]) * ratios)

    def evidence_above(self) -> FloatColumn:
        """Return each source's evidence for a higher level, to be compared with A."""
        return self._mean(self.levels[:, None] + GAP < LEVELS)

    def evidence_below(self) -> FloatColumn:
        """Return each source's evidence for a lower level; 0 if it has the lowest one."""
        return self._mean(self.levels[:, None] - GAP > LEVELS)

    def set_level(self, source: int, level: float) -> None:
        """Set a source's level from now on, and discard its evidence."""
        self.levels[source] = level
        self._evidence[source] = 0.0

    def restart(self) -> None:
        """Discard all evidence."""
        self._evidence[:] = 0.0

    def _mean(self, is_meant: NDArray[np.bool_]) -> FloatColumn:
        found: FloatColumn = np.where(is_meant, self._evidence, 0.0).sum(axis=1)
        found /= np.maximum(1, is_meant.sum(axis=1))
        return found


def _density(deviations: FloatColumn, freedom: float) -> FloatColumn:
    found: FloatColumn = (1 + deviations**2 / freedom) ** (-(freedom + 1) / 2)
    return found
