"""How much a figure jumps from one iteration to the next: learned, and never taken to be nothing. Pure.

What is judged by evidence (stragglers, promises) is a log ratio: 0 where all is as expected. Its noise is
learned from how far each iteration lies from the level that it had before, all pipelines of a job together:
a decaying histogram of these distances, in bins of equal ratio. Its median is the scale, whatever a few
outliers and a few stragglers do. Where the latest iterations, or those of one source, are much noisier than
the rest, theirs counts.

Before anything was seen there is a prior: some distances as wide as those of the jumpiest job known, where
the slowest of 32 pipelines takes 1.35 × the median. They are outvoted after about as many iterations.

Its tail says how heavy the noise's is, as the degrees of freedom of Student's distribution: few until so much
was seen that they can be ruled out.

What repeats itself from one iteration to the next is worth less as evidence than as much that doesn't: by
(1 - ρ) / (1 + ρ), where ρ is the correlation of one iteration with the next.
"""

import math

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.telemetry import FloatColumn

PRIOR = 0.1
"""A distance of the prior."""

PRIOR_COUNT = 4.0

MIN_SCALE = 0.0015
"""Noise below this is not told apart: standard deviation of the log ratio."""

_MEMORY = 200
"""Iterations after which what was learned counts by 1/e."""

_SHORT_MEMORY = 8
_MIN_SOURCES = 4
"""Sources of which one that steps, and what that does to the others, is not the most."""

_MUCH_NOISIER = 1.5
"""How much noisier than all together the latest iterations have to be."""

_OWN_CHANGES = 9
_OWN_NOISIER = 3.0
"""The same for one source, of which less is known."""

_DEVIATION_PER_CHANGE = 1.05
"""Standard deviation of normal noise over the median absolute difference of two of its values."""

_LEVEL_COUNT = 16
"""Iterations of which a level is about the mean. What is expected, 0, counts for the first of them."""

_TRIM = 3.0
"""Distances that say nothing of the correlation, in scales: they are events, not noise."""

_MEDIAN_OF_NORMAL = 0.6745

MIN_FREEDOM, MAX_FREEDOM = 5.0, 30.0

_FAR = 4.0
"""Distances in the tail, in scales."""

_FREEDOMS = np.array([MAX_FREEDOM, 20.0, 10.0, 7.0, MIN_FREEDOM])
_FAR_SHARES = np.array([0.00033, 0.00058, 0.0020, 0.0039, 0.0077])
"""The share in the tail by degrees of freedom, the scale being that of the median."""

_UNSEEN = 2.0
"""Distances in the tail that may yet come: with none seen, 1 - 1/e² of the time their share is no greater."""

_LOWEST, _HIGHEST, _BINS_PER_E = 1e-4, 4.0, 12
_BIN_COUNT = math.ceil(math.log(_HIGHEST / _LOWEST) * _BINS_PER_E) + 1


class Noise:
    """The noise of one job's figure, pooled over its `count` sources (pipelines; 1 for the whole job).

    Attributes:
        scale: standard deviation of what the sources have in common.
        scales: that of each, shape (sources,).
    """

    def __init__(self, count: int) -> None:
        self._levels = np.zeros(count)
        self._level_counts = np.ones(count)
        self._before = np.full(count, np.nan)
        self._counts = np.zeros(_BIN_COUNT)
        self._counts[_bins(np.array([PRIOR]))] = PRIOR_COUNT
        self._recent_counts = np.zeros(_BIN_COUNT)
        self._latest = np.full(count, np.nan)
        self._changes = np.zeros((_OWN_CHANGES, count))
        self._row = 0
        self._product = self._square = self._pair_count = 0.0
        self.scale = _scale(self._counts)
        self.scales: FloatColumn = np.full(count, self.scale)

    @property
    def independence(self) -> float:
        """What an iteration's evidence is worth, from 0 to 1; 1 where iterations are independent."""
        # The noise that there is at least is taken to be independent.
        square = self._square + (1 + self._pair_count) * MIN_SCALE**2
        correlation = self._product / square - 2 / math.sqrt(1 + self._pair_count)
        correlation = min(0.95, max(0.0, correlation))
        return (1 - correlation) / (1 + correlation)

    @property
    def degrees_of_freedom(self) -> float:
        """Student's, from 5 (heavy tails, or unknown) to 30 (as good as normal)."""
        far = _bins(np.array([_FAR * self.scale]))[0] + 1
        share = (self._counts[far:].sum() + _UNSEEN) / self._counts.sum()
        return float(np.interp(math.log(share), np.log(_FAR_SHARES), _FREEDOMS))

    def add(self, values: FloatColumn) -> None:
        """Take an iteration: one log ratio per source, NaN for what is not known."""
        distances = values - self._levels
        is_known = ~np.isnan(distances)
        known = distances[is_known]
        self._level_counts[is_known] = np.minimum(_LEVEL_COUNT, self._level_counts[is_known] + 1)
        self._levels[is_known] += known / self._level_counts[is_known]
        decay = 1 - 1 / _MEMORY
        in_bins = np.bincount(_bins(np.abs(known)), minlength=_BIN_COUNT)
        self._counts = decay * self._counts + in_bins
        self._recent_counts = (1 - 1 / _SHORT_MEMORY) * self._recent_counts + in_bins
        self._add_pairs(distances, decay)
        long, short = _scale(self._counts), _scale(self._recent_counts)
        is_noisier = len(values) >= _MIN_SOURCES and short > _MUCH_NOISIER * long
        self.scale = short if is_noisier else long
        own = self._own_scales(values)
        self.scales = np.where(own > _OWN_NOISIER * self.scale, own, self.scale)

    def set_level(self, source: int, level: float) -> None:
        """Take a source to have this level from now on: what led to it was no noise."""
        self._levels[source], self._level_counts[source] = level, 1.0
        self._before[source] = np.nan

    def restart(self) -> None:
        """The next iteration does not follow the latest."""
        self._before[:] = np.nan
        self._latest[:] = np.nan

    def _own_scales(self, values: FloatColumn) -> FloatColumn:
        """Return what each source's changes from one iteration to the next say; a step is none but once."""
        changes = np.abs(values - self._latest)
        self._latest = values
        self._row = (self._row + 1) % _OWN_CHANGES
        oldest = self._changes[self._row]
        self._changes[self._row] = np.where(np.isnan(changes), oldest, changes)
        found: FloatColumn = _DEVIATION_PER_CHANGE * np.median(self._changes, axis=0)
        return found

    def _add_pairs(self, distances: FloatColumn, decay: float) -> None:
        """Take what this iteration and the one before have in common."""
        limit = _TRIM * self.scale
        now = np.where(np.abs(distances) < limit, distances, np.nan)
        is_pair = ~np.isnan(now) & ~np.isnan(self._before)
        now_own, before_own = now[is_pair], self._before[is_pair]
        self._product = decay * self._product + float(now_own @ before_own)
        self._square = decay * self._square + float(now_own @ now_own + before_own @ before_own) / 2
        self._pair_count = decay * self._pair_count + len(now_own)
        self._before = now


def _scale(counts: FloatColumn) -> float:
    cumulated = np.cumsum(counts)
    wanted = cumulated[-1] / 2
    if not wanted:
        return MIN_SCALE
    bin_number = int(np.searchsorted(cumulated, wanted))
    within = 1 - (cumulated[bin_number] - wanted) / counts[bin_number]
    middle = _LOWEST * math.exp((bin_number + within) / _BINS_PER_E)
    return max(MIN_SCALE, middle / _MEDIAN_OF_NORMAL)


def _bins(distances: FloatColumn) -> NDArray[np.int64]:
    ratios = np.clip(distances, _LOWEST, _HIGHEST) / _LOWEST
    found: NDArray[np.int64] = (np.log(ratios) * _BINS_PER_E).astype(np.int64)
    return found
