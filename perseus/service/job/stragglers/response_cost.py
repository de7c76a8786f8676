"""How much of a straggler's slowness the others may take, and whether that cost time. Pure.

The others may only be slowed by the time that they surely wait. With noise that is less than the straggler's
mean slowness: the slowest of many others is often slower than the straggler in an iteration, and the more
often, the more of them there are. So the others stay below the straggler's slowness by the noise of both.
Its tails are learned as they are: how far each pipeline is ahead of the slowest of all others, and how often
one of these has a hiccup. The others are slowed only as far as that is expected to cost no more than
`_LOST_ALLOWANCE` of the time.

The response in force is measured: the loss of an iteration is the excess of its time over the time with the
others on the straggler's plan. If the losses of the latest iterations add up, for whatever reason, the
response is withdrawn for a while, and for twice as long each time.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from perseus.service.domain.telemetry import FloatColumn
from perseus.service.job.statistics.log_bins import BIN_COUNT, bins, edge
from perseus.service.job.stragglers.spans import IterationSpans

MIN_CHANGE = 0.01
"""Log ratio by which a response has to differ to be worth an offer."""

_SURE = 1.64
"""Standard deviations: 95 % on one side."""

_NOISE_COUNT = 2
"""Weight, in iterations, of the job's noise beside the straggler's own."""

_LOST_ALLOWANCE = 0.001
"""Share of its time that an iteration may lose by a response."""

_MAX_LOSS = 0.01
"""The most that one iteration counts: a host that was busy for a moment is no reason."""

_LOST_LIMIT = 0.025
"""Accumulated losses beyond the allowance that withdraw a response: three iterations at least."""

_MEMORY = 500
"""Iterations after which a lead counts by 1/e.

A response of 10 % may cost time in 1 % of all iterations: 5 of these.
"""

INITIAL_PAUSE = 50
_MAX_PAUSE = 1600
"""Iterations without a response after one has cost time."""


@dataclass(slots=True)
class SlownessEstimate:
    """The log ratios of a straggler at its current level: count, mean and sum of squares."""

    count: int
    mean: float
    square_sum: float

    @classmethod
    def of(cls, values: FloatColumn) -> "SlownessEstimate":
        """Create an estimate from these values."""
        return cls(len(values), float(values.mean()), float(((values - values.mean()) ** 2).sum()))

    def add(self, value: float) -> None:
        """Add one value."""
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self.square_sum += before * (value - self.mean)

    def sure(self, scale: float, other_count: int) -> float:
        """Return the log ratio that `other_count` others, with noise `scale`, surely wait for; at least 0."""
        own = self._deviation(scale)
        mean_error = own / math.sqrt(self.count)
        slowest_other = NormalDist().inv_cdf(0.5 ** (1 / max(1, other_count))) * scale
        gap = _SURE * math.sqrt(own**2 + mean_error**2 + scale**2)
        return max(0.0, self.mean - slowest_other - gap)

    def lower(self, scale: float) -> float:
        """Return the mean, less its possible error, with noise `scale`."""
        return self.mean - _SURE * self._deviation(scale) / math.sqrt(self.count)

    def _deviation(self, scale: float) -> float:
        return math.sqrt((_NOISE_COUNT * scale**2 + self.square_sum) / (_NOISE_COUNT + self.count - 1))


class Leads:
    """How far pipelines are ahead of the slowest of all others without a straggler, as log ratios.

    In an iteration whose straggler is ahead of the others by d, slowing them by w (log ratios) loses
    min(w, max(0, w - d)).
    """

    def __init__(self) -> None:
        self._counts = np.zeros(2 * BIN_COUNT)
        self._centers = np.array([edge(number + 0.5) for number in range(BIN_COUNT)])

    def add(self, slowness: FloatColumn) -> None:
        """Take an iteration: each pipeline's log ratio beyond its level, NaN if unknown or in a hiccup."""
        known = slowness[~np.isnan(slowness)]
        if len(known) < 2:
            return
        second, first = np.partition(known, -2)[-2:]
        leads = known - np.where(known == first, second, first)
        numbers = bins(np.abs(leads))
        numbers = np.where(leads < 0, BIN_COUNT - 1 - numbers, BIN_COUNT + numbers)
        self._counts *= 1 - 1 / _MEMORY
        self._counts += np.bincount(numbers, minlength=len(self._counts))

    def affordable(self, mean: float, hiccup_shares: FloatColumn) -> float:
        """Return the most by which others may be slowed for a straggler whose mean is this log ratio.

        `hiccup_shares`: how likely one of the others has a hiccup, by the bin of its size.
        """
        count = self._counts.sum()
        if not count:
            return math.inf
        leads = np.concatenate((-self._centers[::-1], self._centers, -self._centers))
        order = np.argsort(leads)
        ahead = np.maximum(0.0, mean + leads[order])
        # The expected loss rises with the response, by the probability that the lead is smaller.
        slopes = np.cumsum(np.concatenate((self._counts / count, hiccup_shares))[order])
        losses = np.concatenate(([0.0], np.cumsum(slopes[:-1] * np.diff(ahead))))
        return float(np.interp(_LOST_ALLOWANCE, losses, ahead))


class ResponseCost:
    """Adds up the cost of responses to stragglers, and decides when there may be one."""

    def __init__(self) -> None:
        self._lost = 0.0
        self._pause = INITIAL_PAUSE
        self._paused_for = 0

    @property
    def is_paused(self) -> bool:
        """Whether responses are suspended."""
        return self._paused_for > 0

    def judge(self, spans: IterationSpans, spans_s: FloatColumn, stragglers: Collection[int]) -> bool:
        """Take an iteration; return whether the response has cost too much and is to be withdrawn.

        `spans_s` has the pipelines for which the iteration counts, NaN for the others.
        """
        self._paused_for = max(0, self._paused_for - 1)
        self._lost = max(0.0, self._lost + self._lost_share(spans, spans_s, stragglers))
        if self._lost <= _LOST_LIMIT:
            return False
        self._lost, self._paused_for = 0.0, self._pause
        self._pause = min(_MAX_PAUSE, 2 * self._pause)
        return True

    def restart(self) -> None:
        """Discard the losses so far."""
        self._lost = 0.0

    @staticmethod
    def _lost_share(spans: IterationSpans, spans_s: FloatColumn, stragglers: Collection[int]) -> float:
        """Return the share that the iteration lost beyond its allowance, bounded by `_MAX_LOSS`."""
        is_known = ~np.isnan(spans_s) & ~np.isnan(spans.planned_s)
        waited_for = [pipeline for pipeline in stragglers if is_known[pipeline]]
        if not waited_for:
            return -_LOST_ALLOWANCE
        own_s = spans.planned_s[waited_for].max()
        slowed = np.where(is_known, np.maximum(1.0, spans.planned_s / own_s), np.nan)
        lost = math.log(np.nanmax(spans_s * (slowed / slowed)) / np.nanmax(spans_s / slowed))
        return min(_MAX_LOSS, lost) - _LOST_ALLOWANCE
