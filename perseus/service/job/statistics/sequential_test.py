"""Evidence that a figure's level has changed, accumulated iteration by iteration. Pure.

Theory of operation
===================

A source (a pipeline, or the whole job) has an assumed *level*, a log ratio that is 0 at first. For each of a
grid of other levels θ, an iteration's value x is more likely by the ratio

    L(θ) = f((x - θ) / σ) / f((x - level) / σ),

and the statistic of Shiryaev and Roberts, R(θ) ← (1 + R(θ)) L(θ), accumulates that over the iterations:
wherever a change began, without a window. The mean of R over θ minus the number of iterations has no drift as
long as nothing changes, so it reaches a threshold A not before A iterations on average: that is the stated
error rate, and A is chosen by it. Averaging over several θ makes it unnecessary to guess the size of the
change.

f is Student's density: with heavy tails, a value far from everything is hardly evidence for anything. And no
single value counts for more than about half of the threshold, so at least two have to agree.
"""

import math

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.telemetry import FloatColumn
from perseus.service.job.statistics.noise import Noise

MIN_LEVEL = 0.02
LEVELS: FloatColumn = np.concatenate(([0.0], MIN_LEVEL * math.sqrt(2) ** np.arange(12)))
"""Log ratios: of 1 and of 1.02 to 2.5."""

GAP = 0.01
"""Levels closer than this are the same."""

_MAX = 1e250
"""Bound of the statistic, so that its products stay within the range of a float."""


class SequentialTest:
    """Accumulates evidence for other levels of `count` sources.

    Attributes:
        threshold_above: A for higher levels. An iteration's weight is bounded so that two can reach it, but
            not one.
        threshold_below: the same for lower levels.
    """

    def __init__(self, count: int, threshold_above: float, threshold_below: float) -> None:
        self.threshold_above, self.threshold_below = threshold_above, threshold_below
        self._cap_above, self._cap_below = (
            math.log(threshold * len(LEVELS)) / 2 for threshold in (threshold_above, threshold_below)
        )
        self.levels: FloatColumn = np.zeros(count)
        self._evidence = np.zeros((count, len(LEVELS)))

    def add(self, values: FloatColumn, noise: Noise) -> None:
        """Take an iteration: one log ratio per source, NaN for unknown ones."""
        known = np.flatnonzero(~np.isnan(values))
        own = values[known]
        freedom = noise.degrees_of_freedom
        scales = noise.scales[known]
        fits = _log_density((own[:, None] - LEVELS) / scales[:, None], freedom)
        fits -= _log_density((own - self.levels[known]) / scales, freedom)[:, None]
        caps = np.where(self.levels[known, None] < LEVELS, self._cap_above, self._cap_below)
        ratios = np.exp(np.clip(noise.independence * fits, -caps, caps))
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


def _log_density(deviations: FloatColumn, freedom: float) -> FloatColumn:
    found: FloatColumn = -(freedom + 1) / 2 * np.log1p(deviations**2 / freedom)
    return found
