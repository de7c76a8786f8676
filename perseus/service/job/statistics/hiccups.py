"""Hiccups: rare, large departures of a source upwards that end by themselves. Pure.

A checkpoint, a busy host or a retried transfer makes an iteration much slower than jitter does, sometimes
several in a row. The bulk of the noise does not tell how often that happens, so it is learned separately:

    rate and size   the share of values that were at least so far above.
    clustering      of the hiccups that lasted k iterations, the share that went on to the next one.

A departure counts only when it has ended. Until then it may be a straggler, and must not become the noise
that it is judged by. One that has not ended after `MAX_LENGTH` iterations is no hiccup.

Whether hiccups cluster is unknown at first. Two models are compared by how well they explain what was seen:
hiccups come independently, so that one follows another no more often than any value; or they continue with a
probability that is unknown (a uniform prior). Continuation is as likely as both say, weighted by their
posterior probabilities. The probability by length is shrunk towards that of all lengths.

Small departures are frequent and say nothing of large ones, so that continuation is learned by size.
"""

import math

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.telemetry import FloatColumn, IntColumn
from perseus.service.job.statistics.log_bins import BIN_COUNT, bins, counts_in_bins

FAR = 4.0
"""Distance, in scales, from which on a value is a hiccup: normal noise gets there once in 30,000 times."""

MAX_LENGTH = 20
"""Iterations that a hiccup lasts at most."""

UNSEEN_SHARE = 1 / 40_000
"""Share of values that are as far as none has been: rarer than normal noise reaches `FAR`."""

_CLUSTERING_PRIOR = 0.25
"""Probability, before any hiccup was seen, that hiccups cluster."""

_SHRINKAGE = 2.0
"""Weight of all lengths beside the observations of one."""

_SIZE_MEMORY = 200
_LENGTH_MEMORY = 2000
"""Iterations after which an observation counts by 1/e; there are far fewer lengths than values."""

_BINS_PER_CLASS = 8
_CLASS_COUNT = 1 + BIN_COUNT // _BINS_PER_CLASS
"""Classes of sizes for continuation: each about twice the one before."""


class Hiccups:
    """The hiccups of one job's figure, pooled over its `count` sources."""

    def __init__(self, count: int) -> None:
        self._value_count = 0.0
        self._sizes = np.zeros(BIN_COUNT)
        self._reached = np.zeros((_CLASS_COUNT, MAX_LENGTH))
        self._continued = np.zeros((_CLASS_COUNT, MAX_LENGTH))
        # The departure of each source that has not ended: its length (0: none), largest distance, the level
        # before it, and whether a new level explains it.
        self._lengths: IntColumn = np.zeros(count, np.int64)
        self._peaks = np.zeros(count)
        self._bases = np.zeros(count)
        self._is_explained = np.zeros(count, np.bool_)

    @property
    def size_shares(self) -> FloatColumn:
        """The share of values that are hiccups, by the bin of their size; shape (bins,)."""
        return self._sizes / (1 + self._value_count)

    def is_departed(self) -> NDArray[np.bool_]:
        """Return which sources are in a departure that has not ended."""
        return self._lengths > 0

    def shares(
        self, sources: IntColumn, distances: FloatColumn, *, is_learned: bool
    ) -> tuple[FloatColumn, FloatColumn]:
        """Return how likely hiccups are that come at least so far above the level.

        The first array has the probability of a new hiccup, the second that of a continued one, 0 unless the
        source's previous value was far. `is_learned`: these values were already taken.
        """
        is_above = distances > 0
        at_least = np.cumsum(self.size_shares[::-1])[::-1]
        begun = UNSEEN_SHARE + np.where(is_above, at_least[bins(distances)], 0.0)
        continued = np.zeros_like(begun)
        lengths = self._lengths[sources] - is_learned
        for at in np.flatnonzero(is_above & (lengths > 0) & ~self._is_explained[sources]).tolist():
            continued[at] = self._continuation(float(distances[at]), int(lengths[at]))
        return begun, continued

    def add(self, values: FloatColumn, levels: FloatColumn, scales: FloatColumn) -> None:
        """Take an iteration: one value per source (NaN if unknown), its level and scale before."""
        is_known = ~np.isnan(values)
        is_open = self._lengths > 0
        self._value_count += is_known.sum() - self._value_count / _SIZE_MEMORY
        self._sizes *= 1 - 1 / _SIZE_MEMORY
        self._reached *= 1 - 1 / _LENGTH_MEMORY
        self._continued *= 1 - 1 / _LENGTH_MEMORY
        self._bases = np.where(is_open, self._bases, levels)
        distances = values - self._bases
        is_far = distances > FAR * scales  # not if unknown
        self._count_ended(np.flatnonzero(is_known & is_open & ~is_far))
        self._peaks = np.where(is_far, np.fmax(distances, np.where(is_open, self._peaks, 0.0)), self._peaks)
        self._lengths[is_known & ~is_far] = 0
        self._lengths[is_far] += 1
        self._lengths[self._lengths > MAX_LENGTH] = 0
        self._is_explained &= self._lengths > 0

    def explain(self, source: int) -> None:
        """Take that the source has a new level: its departure is no hiccup beyond that level."""
        self._is_explained[source] = True

    def restart(self) -> None:
        """Forget unfinished departures."""
        self._lengths[:] = 0

    def _count_ended(self, sources: IntColumn) -> None:
        if not len(sources):
            return
        self._sizes += counts_in_bins(np.repeat(self._peaks[sources], self._lengths[sources]))
        classes = bins(self._peaks[sources]) // _BINS_PER_CLASS
        for size, length in zip(classes.tolist(), self._lengths[sources].tolist(), strict=True):
            self._reached[size, :length] += 1
            self._continued[size, : length - 1] += 1

    def _continuation(self, distance: float, length: int) -> float:
        """Return the probability that a hiccup goes on after `length` iterations because hiccups cluster.

        Hiccups count if they were at least half as large, or (in the class below) a quarter.
        """
        smallest = max(0, int(bins(np.array([distance]))[0]) // _BINS_PER_CLASS - 1)
        reached = self._reached[smallest:].sum(axis=0)
        continued = self._continued[smallest:].sum(axis=0)
        more, ended = float(continued.sum()), float(reached.sum() - continued.sum())
        begun = float(self._sizes[smallest * _BINS_PER_CLASS :].sum()) / (1 + self._value_count)
        rate = min(0.5, begun + UNSEEN_SHARE)
        independent = math.log(1 - _CLUSTERING_PRIOR) + more * math.log(rate) + ended * math.log1p(-rate)
        clustered = math.log(_CLUSTERING_PRIOR) + _log_beta(1 + more, 1 + ended)
        weight = 1 / (1 + math.exp(min(700.0, independent - clustered)))
        common = (1 + more) / (2 + more + ended)
        at = length - 1
        return weight * float((continued[at] + _SHRINKAGE * common) / (reached[at] + _SHRINKAGE))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
