"""How much of a straggler's slowness the others may take, and whether that cost time. Pure.

The others may only be slowed by what is sure to be waited for. Under jitter that is less than the straggler's
mean slowness: the slowest of many others is often slower than the straggler is just then, and the more of
them there are, the more often. So the others keep away from the straggler's pace by the noise of both.

What is in force is measured: an iteration has lost what it took longer than it would have, had the others
kept the plan of the straggler. If the losses of the latest iterations add up, whatever the reason, the answer
is withdrawn, and there is none for a while; for twice as long each time.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from perseus.service.domain.telemetry import FloatColumn
from perseus.service.job.stragglers.spans import IterationSpans

MIN_CHANGE = 0.01
"""Log ratio by which an answer has to differ to be worth an offer."""

_SURE = 1.64
"""Standard deviations: 95 % on one side."""

_NOISE_COUNT = 2
"""Iterations that the job's noise counts for beside the straggler's own."""

_LOST_ALLOWANCE = 0.001
"""Share of its time that an iteration may lose by an answer."""

_MAX_LOSS = 0.01
"""The most that one iteration counts for: a host that was busy for a moment is no reason."""

_LOST_LIMIT = 0.025
"""Losses beyond the allowance that have added up when an answer is withdrawn: three iterations at least."""

INITIAL_PAUSE = 50
_MAX_PAUSE = 1600
"""Iterations without an answer after one cost time."""


@dataclass(slots=True)
class SlownessEstimate:
    """The log ratios of a straggler since it has the level that it has: how many, their mean and squares."""

    count: int
    mean: float
    square_sum: float

    @classmethod
    def of(cls, values: FloatColumn) -> "SlownessEstimate":
        """Begin with these."""
        return cls(len(values), float(values.mean()), float(((values - values.mean()) ** 2).sum()))

    def add(self, value: float) -> None:
        """Take one more."""
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self.square_sum += before * (value - self.mean)

    def sure(self, scale: float, other_count: int) -> float:
        """Return the log ratio that so many others, of this noise, surely wait for; at least 0."""
        own = math.sqrt((_NOISE_COUNT * scale**2 + self.square_sum) / (_NOISE_COUNT + self.count - 1))
        mean_error = own / math.sqrt(self.count)
        slowest_other = NormalDist().inv_cdf(0.5 ** (1 / max(1, other_count))) * scale
        gap = _SURE * math.sqrt(own**2 + mean_error**2 + scale**2)
        return max(0.0, self.mean - slowest_other - gap)


class ResponseCost:
    """Adds up what the answers to stragglers cost, and says when there may be one."""

    def __init__(self) -> None:
        self._lost = 0.0
        self._pause = INITIAL_PAUSE
        self._paused_for = 0

    @property
    def is_paused(self) -> bool:
        """Whether there is no answer for now."""
        return self._paused_for > 0

    def judge(self, spans: IterationSpans, spans_s: FloatColumn, stragglers: Collection[int]) -> bool:
        """Take an iteration; tell whether the answer has cost too much, and is to be withdrawn.

        `spans_s`: of those pipelines of which the iteration says something, NaN of others.
        """
        self._paused_for = max(0, self._paused_for - 1)
        self._lost = max(0.0, self._lost + self._lost_share(spans, spans_s, stragglers))
        if self._lost <= _LOST_LIMIT:
            return False
        self._lost, self._paused_for = 0.0, self._pause
        self._pause = min(_MAX_PAUSE, 2 * self._pause)
        return True

    def restart(self) -> None:
        """What is under way counts for nothing."""
        self._lost = 0.0

    @staticmethod
    def _lost_share(spans: IterationSpans, spans_s: FloatColumn, stragglers: Collection[int]) -> float:
        """Return the share that the iteration lost beyond its allowance, at most so much."""
        is_known = ~np.isnan(spans_s) & ~np.isnan(spans.planned_s)
        waited_for = [pipeline for pipeline in stragglers if is_known[pipeline]]
        if not waited_for:
            return -_LOST_ALLOWANCE
        own_s = spans.planned_s[waited_for].max()
        slowed = np.where(is_known, np.maximum(1.0, spans.planned_s / own_s), np.nan)
        lost = math.log(np.nanmax(spans_s * (slowed / slowed)) / np.nanmax(spans_s / slowed))
        return min(_MAX_LOSS, lost) - _LOST_ALLOWANCE
