"""How much of a straggler's slowness the others may take, and whether that cost time. Pure.

The others may only be slowed by the time that they surely wait. With noise that is less than the straggler's
mean slowness: the slowest of many others is often slower than the straggler in an iteration, and the more
often, the more of them there are. So the others stay below the straggler's slowness by the noise of both.

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
        own = math.sqrt((_NOISE_COUNT * scale**2 + self.square_sum) / (_NOISE_COUNT + self.count - 1))
        mean_error = own / math.sqrt(self.count)
        slowest_other = NormalDist().inv_cdf(0.5 ** (1 / max(1, other_count))) * scale
        gap = _SURE * math.sqrt(own**2 + mean_error**2 + scale**2)
        return max(0.0, self.mean - slowest_other - gap)


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
