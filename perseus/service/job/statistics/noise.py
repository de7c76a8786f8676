"""The noise of a figure from one iteration to the next: learned, and never assumed to be zero. Pure.

The figures judged by evidence (stragglers, predictions) are log ratios: 0 if all is as expected. Their noise
is learned from the distance of each iteration from the level before it, for all pipelines of a job together,
in a decaying histogram of these distances with bins of equal ratio. Its median is the scale, robust against a
few outliers and a few stragglers. If the latest iterations, or those of one source, are much noisier than the
rest, their noise counts.

Before any iteration there is a prior: some distances as wide as those of the noisiest job known, where the
slowest of 32 pipelines takes 1.35 × the median. They are outvoted after about as many iterations.

The histogram's lower tail shows how heavy the noise's tail is, as the degrees of freedom of Student's
distribution: few, until enough iterations rule them out. What is far above may be rare and large: these
values are learned apart (`hiccups`).

Correlated iterations are weaker evidence than independent ones, by the factor (1 - ρ) / (1 + ρ), where ρ is
the correlation of one iteration with the next.
"""

import math

import numpy as np

from perseus.service.domain.telemetry import FloatColumn
from perseus.service.job.statistics.hiccups import FAR, Hiccups
from perseus.service.job.statistics.log_bins import BIN_COUNT, bins, counts_in_bins, edge

PRIOR = 0.1
"""Distance of the prior's entries."""

PRIOR_COUNT = 4.0

MIN_SCALE = 0.0015
"""Smallest noise that is distinguished: standard deviation of the log ratio."""

_MEMORY = 200
"""Iterations after which an observation counts by 1/e."""

_SHORT_MEMORY = 8
_MIN_SOURCES = 4
"""Sources needed so that one of them stepping, and its effect on the others, is not the majority."""

_MUCH_NOISIER = 1.5
"""How much noisier than all iterations the latest ones have to be."""

_OWN_CHANGES = 9
_OWN_NOISIER = 3.0
"""The same for one source, with fewer observations."""

_DEVIATION_PER_CHANGE = 1.05
"""Standard deviation of normal noise over the median absolute difference of two of its values."""

_LEVEL_COUNT = 16
"""Iterations that a level is about the mean of. The expected value, 0, counts as the first of them."""

_TRIM = 3.0
"""Larger distances, in scales, are events rather than noise, and do not count for the correlation."""

_MEDIAN_OF_NORMAL = 0.6745

MIN_FREEDOM, MAX_FREEDOM = 5.0, 30.0

_FREEDOMS = np.array([MAX_FREEDOM, 20.0, 10.0, 7.0, MIN_FREEDOM])
_FAR_SHARES = np.array([0.00033, 0.00058, 0.0020, 0.0039, 0.0077])
"""The share of both tails by degrees of freedom, with the scale taken from the median."""

_UNSEEN = 2.0
"""Unseen tail distances to allow for: if none was seen, the share is no greater in 1 - 1/e² of the cases."""


class Noise:
    """The noise of one job's figure, pooled over its `count` sources (pipelines; 1 for the whole job).

    Attributes:
        scale: the standard deviation common to the sources.
        scales: that of each source, shape (sources,).
        hiccups: the rare, large values.
    """

    def __init__(self, count: int) -> None:
        self._levels = np.zeros(count)
        self._level_counts = np.ones(count)
        self._before = np.full(count, np.nan)
        self._counts = PRIOR_COUNT * counts_in_bins(np.array([PRIOR]))
        self._below_counts = np.zeros(BIN_COUNT)
        self._recent_counts = np.zeros(BIN_COUNT)
        self.hiccups = Hiccups(count)
        self._latest = np.full(count, np.nan)
        self._changes = np.zeros((_OWN_CHANGES, count))
        self._row = 0
        self._product = self._square = self._pair_count = 0.0
        self.scale = _scale(self._counts)
        self.scales: FloatColumn = np.full(count, self.scale)

    @property
    def independence(self) -> float:
        """The weight of an iteration's evidence, from 0 to 1; 1 if iterations are independent."""
        # The minimum noise is assumed to be independent.
        square = self._square + (1 + self._pair_count) * MIN_SCALE**2
        correlation = self._product / square - 2 / math.sqrt(1 + self._pair_count)
        correlation = min(0.95, max(0.0, correlation))
        return (1 - correlation) / (1 + correlation)

    @property
    def degrees_of_freedom(self) -> float:
        """Student's degrees of freedom, from 5 (heavy tails, or unknown) to 30 (nearly normal)."""
        far = bins(np.array([FAR * self.scale]))[0] + 1
        share = (2 * self._below_counts[far:].sum() + _UNSEEN) / self._counts.sum()
        return float(np.interp(math.log(share), np.log(_FAR_SHARES), _FREEDOMS))

    def add(self, values: FloatColumn) -> None:
        """Take an iteration: one log ratio per source, NaN for unknown ones."""
        distances = values - self._levels
        is_known = ~np.isnan(distances)
        known = distances[is_known]
        self.hiccups.add(values, self._levels, self.scales)
        self._level_counts[is_known] = np.minimum(_LEVEL_COUNT, self._level_counts[is_known] + 1)
        self._levels[is_known] += known / self._level_counts[is_known]
        decay = 1 - 1 / _MEMORY
        in_bins = counts_in_bins(np.abs(known))
        self._counts = decay * self._counts + in_bins
        self._below_counts = decay * self._below_counts + counts_in_bins(-known[known < 0])
        self._recent_counts = (1 - 1 / _SHORT_MEMORY) * self._recent_counts + in_bins
        self._add_pairs(distances, decay)
        long, short = _scale(self._counts), _scale(self._recent_counts)
        is_noisier = len(values) >= _MIN_SOURCES and short > _MUCH_NOISIER * long
        self.scale = short if is_noisier else long
        own = self._own_scales(values)
        self.scales = np.where(own > _OWN_NOISIER * self.scale, own, self.scale)

    def set_level(self, source: int, level: float) -> None:
        """Set a source's level from now on; the change to it does not count as noise."""
        self._levels[source], self._level_counts[source] = level, 1.0
        self._before[source] = np.nan
        self.hiccups.explain(source)

    def restart(self) -> None:
        """Break the sequence: the next iteration does not follow the latest."""
        self._before[:] = np.nan
        self._latest[:] = np.nan
        self.hiccups.restart()

    def _own_scales(self, values: FloatColumn) -> FloatColumn:
        """Return each source's scale by its changes between iterations; a step counts only once."""
        changes = np.abs(values - self._latest)
        self._latest = values
        self._row = (self._row + 1) % _OWN_CHANGES
        oldest = self._changes[self._row]
        self._changes[self._row] = np.where(np.isnan(changes), oldest, changes)
        found: FloatColumn = _DEVIATION_PER_CHANGE * np.median(self._changes, axis=0)
        return found

    def _add_pairs(self, distances: FloatColumn, decay: float) -> None:
        """Add the products of this iteration's distances with the previous ones."""
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
    return max(MIN_SCALE, edge(bin_number + within) / _MEDIAN_OF_NORMAL)
