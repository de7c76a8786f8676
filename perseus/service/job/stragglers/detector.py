"""Which pipelines are slow: a robust statistic with hysteresis on the spans of computation. Pure.

Theory of operation
===================

Each iteration gives every pipeline two figures:

- its *pace*: its span over the one that its own plan promises. This comes first: with two pipelines, peers
  can not say who is slow. Without a plan (at stock, while clocks are held) the pace is the span itself.
- its *excess*: its pace over the median pace of its peers, less 1. What all have in common, a profile that
  is off or a shift of the whole job (drift), cancels out.

A pipeline is *slow* in an iteration if its excess is above `LEAVE` and its own plan is broken by as much.
What comes of it depends on how long that lasts:

    jitter      `enter` is at least twice `LEAVE`, and rises with the noise: nothing.
    transient   slow once, and all is well: nothing.
    lasting     slow for `PATIENCE` iterations, on average by more than `enter`: a straggler. If they differ
                much, it may have begun within the first, and one more decides. A single one is enough if a
                GPU of the pipeline says that it is being slowed (heat, power brake).
    over        not slow for `PATIENCE` iterations: none any more.
    whole job   all paces rise together: no excess.

The noise is that of the differences from one iteration to the next, so that a step is no noise, but what goes
up and down all the time is. What flaps more slowly than that finds less and less patience to exploit it: it
doubles with each withdrawal, until the pipeline has been itself for `CALM` iterations. Giving slack back is
never delayed.

A straggler's factor is the least of the iterations that confirmed it: peers that are slower than it would
slow the job. The factor follows the straggler in the same way: down within `PATIENCE` iterations, up after
one more than it took to find it.

The first iteration under other clocks, and the first of all, say nothing.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.telemetry import FloatColumn, IntColumn
from perseus.service.job.stragglers.spans import IterationSpans

ENTER = 0.02
"""Least excess of a straggler. Healthy pipelines of real jobs differ by 0.4 % (one standard deviation)."""

LEAVE = ENTER / 2
"""Least excess of a slow iteration."""

NOISE_FACTOR = 3.0
"""The excess of a straggler in standard deviations of the noise, where that is more."""

PATIENCE = 2
MOST_PATIENCE = 32
CALM = 20

SLOWING_REASONS = 0x8 | 0x20 | 0x40 | 0x80
"""NVML's clock events that slow one GPU: hardware slowdown, software and hardware thermal, power brake."""

_UNEQUAL = 0.25
"""Two slow iterations differ much if their excesses do by more than this share, and by more than noise."""

_NOISE_ITERATIONS = 16
_LEAST_NOISE_ITERATIONS = 4
_DEVIATION_PER_CHANGE = 1.05
"""Standard deviation of normal noise over the median absolute difference of two of its values."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A pipeline has become a straggler, has another factor, or (factor 1) is itself again.

    Attributes:
        slowdown_factor: its span over the one of its plan (without a plan: of its peers), as long as its
            peers keep theirs.
        iteration: the one that decided.
        iteration_count: how many in a row say so.
        span_s, planned_span_s: measured and promised; the latter is 0 without a plan.
        excess: over its peers.
        noise: standard deviation of the excess from iteration to iteration.
        enter: the limit for the mean excess of the iterations that found it.
        slowest_stage, stage_ratio: the stage that fell behind the most, and how much.
        clock_event_reasons: NVML's bits.
    """

    pipeline: int
    slowdown_factor: float
    iteration: int
    iteration_count: int
    span_s: float
    planned_span_s: float
    excess: float
    noise: float
    enter: float
    slowest_stage: int
    stage_ratio: float
    clock_event_reasons: int

    @property
    def is_straggler(self) -> bool:
        """Whether the pipeline is slow now."""
        return self.slowdown_factor > 1


@dataclass(slots=True)
class _Suspect:
    """A pipeline that was slow lately. `factor` is 1 unless it is a straggler."""

    factor: float = 1.0
    patience: int = PATIENCE
    calm_count: int = 0
    rising: list[tuple[float, float]] = field(default_factory=list)
    """(excess, factor) of the latest iterations in a row that speak for a straggler, or a slower one."""
    falling: list[float] = field(default_factory=list)
    """Factors of those that speak against it, or for a faster one."""

    @property
    def is_cleared(self) -> bool:
        """Whether there is nothing left to know about it."""
        is_quiet = self.factor == 1 and not self.rising
        return is_quiet and (self.patience == PATIENCE or self.calm_count >= CALM)

    def take(self, excess: float, factor: float, *, is_slow: bool, is_slowed: bool, enter: float) -> int:
        """Take an iteration; return how many have led to another factor, 0 if it stays."""
        if self.factor == 1:
            return self._take_as_suspect(excess, factor, is_slow, is_slowed, enter)
        return self._take_as_straggler(excess, factor, is_slow, enter)

    def _take_as_suspect(
        self, excess: float, factor: float, is_slow: bool, is_slowed: bool, enter: float
    ) -> int:
        if not is_slow:
            self.rising.clear()
            self.calm_count += 1
            return 0
        self.calm_count = 0
        self.rising.append((excess, factor))
        needed = 1 if is_slowed else self.patience
        recent = self.rising[-needed:]
        if len(recent) < needed or fmean(each for each, _ in recent) < enter:
            return 0
        before = self.rising[-2][0] if needed > 1 else excess
        is_unequal = abs(excess - before) > max(2 * enter, _UNEQUAL * max(excess, before))
        if is_unequal and len(self.rising) == needed:
            return 0
        return self._settle(min(each for _, each in recent), needed)

    def _take_as_straggler(self, excess: float, factor: float, is_slow: bool, enter: float) -> int:
        if not is_slow or factor < self.factor * (1 - enter / 2):
            self.rising.clear()
            self.falling.append(factor if is_slow else 1.0)
            if len(self.falling) < PATIENCE:
                return 0
            self.patience = min(MOST_PATIENCE, 2 * self.patience)
            return self._settle(min(self.falling), PATIENCE)
        self.falling.clear()
        if factor <= self.factor * (1 + enter):
            self.rising.clear()
            return 0
        self.rising.append((excess, factor))
        needed = self.patience + 1
        if len(self.rising) < needed:
            return 0
        return self._settle(min(each for _, each in self.rising[-needed:]), needed)

    def _settle(self, factor: float, iteration_count: int) -> int:
        self.factor = factor
        self.calm_count = 0
        self.rising.clear()
        self.falling.clear()
        return iteration_count


class StragglerDetector:
    """Follows the pipelines of one job, iteration by iteration."""

    def __init__(self, pipeline_count: int) -> None:
        self._versions: IntColumn = np.full(pipeline_count, -1)
        self._excess: FloatColumn = np.full(pipeline_count, np.nan)
        self._changes: deque[FloatColumn] = deque(maxlen=_NOISE_ITERATIONS)
        self._suspects: dict[int, _Suspect] = {}

    def factor(self, pipeline: int) -> float:
        """Return the slowdown factor of a pipeline, 1 if it is no straggler."""
        suspect = self._suspects.get(pipeline)
        return suspect.factor if suspect else 1.0

    def restore(self, pipeline: int, slowdown_factor: float) -> None:
        """Take a straggler that was found before a restart."""
        self._suspects[pipeline] = _Suspect(slowdown_factor)

    def forget(self, pipeline: int) -> None:
        """Take somebody's word that a pipeline is no straggler; it may be found to be one again."""
        self._suspects.pop(pipeline, None)

    def restart(self) -> None:
        """What is under way counts for nothing: the job may go on with an iteration that it had before."""
        self._versions = np.full_like(self._versions, -1)
        self._excess = np.full_like(self._excess, np.nan)
        for suspect in self._suspects.values():
            suspect.rising.clear()
            suspect.falling.clear()

    def judge(self, spans: IterationSpans) -> list[Finding]:
        """Take the next iteration; return what has changed."""
        is_fresh = spans.versions != self._versions
        self._versions = spans.versions
        spans_s = np.where(is_fresh, np.nan, spans.spans_s)
        pace, excess, factor = _compare(spans_s, spans.planned_s, spans.versions)
        noise = self._note_noise(excess)
        enter = np.maximum(ENTER, NOISE_FACTOR * noise)
        keeps_plan = ~np.isnan(spans.planned_s) & (pace < 1 + LEAVE)
        is_slow = (excess > LEAVE) & ~keeps_plan
        is_slowed = (spans.clock_event_reasons & SLOWING_REASONS) != 0
        found = []
        for pipeline in sorted({*self._suspects, *np.flatnonzero(is_slow).tolist()}):
            if np.isnan(excess[pipeline]):
                continue
            suspect = self._suspects.setdefault(pipeline, _Suspect())
            iteration_count = suspect.take(
                float(excess[pipeline]),
                float(factor[pipeline]),
                is_slow=bool(is_slow[pipeline]),
                is_slowed=bool(is_slowed[pipeline]),
                enter=float(enter[pipeline]),
            )
            if suspect.is_cleared:
                del self._suspects[pipeline]
            if iteration_count:
                found.append(
                    Finding(
                        pipeline=pipeline,
                        slowdown_factor=suspect.factor,
                        iteration=spans.iteration,
                        iteration_count=iteration_count,
                        span_s=float(spans_s[pipeline]),
                        planned_span_s=float(np.nan_to_num(spans.planned_s[pipeline])),
                        excess=float(excess[pipeline]),
                        noise=float(noise[pipeline]),
                        enter=float(enter[pipeline]),
                        slowest_stage=int(spans.slowest_stages[pipeline]),
                        stage_ratio=float(spans.stage_ratios[pipeline]),
                        clock_event_reasons=int(spans.clock_event_reasons[pipeline]),
                    )
                )
        return found

    def _note_noise(self, excess: FloatColumn) -> FloatColumn:
        """Return each pipeline's noise, 0 before enough of it was seen."""
        self._changes.append(np.abs(excess - self._excess))
        self._excess = excess
        changes = np.array(self._changes)
        noise = np.zeros(len(excess))
        is_seen = (~np.isnan(changes)).sum(axis=0) >= _LEAST_NOISE_ITERATIONS
        noise[is_seen] = _DEVIATION_PER_CHANGE * np.nanmedian(changes[:, is_seen], axis=0)
        return noise


def _compare(
    spans_s: FloatColumn, planned_s: FloatColumn, versions: IntColumn
) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
    """Return pace, excess and slowdown factor; excess and factor are NaN where there are no peers.

    Pipelines with a plan are peers whatever it is, the others those that run under the same version. For the
    factor the peers' lower median counts, and only if it is above 1: it must not be too high.
    """
    is_planned = ~np.isnan(planned_s)
    pace = spans_s / np.where(is_planned, planned_s, 1.0)
    excess, factor = np.full_like(pace, np.nan), np.full_like(pace, np.nan)
    is_known = ~np.isnan(pace)
    groups = np.where(is_planned, -1, versions)
    for group in np.unique(groups[is_known]).tolist():
        members = np.flatnonzero(is_known & (groups == group))
        if len(members) < 2:
            continue
        own = pace[members]
        lower, upper = _medians_of_others(own)
        excess[members] = own / ((lower + upper) / 2) - 1
        factor[members] = own / (np.maximum(1.0, lower) if group == -1 else lower)
    return pace, excess, factor


def _medians_of_others(values: FloatColumn) -> tuple[FloatColumn, FloatColumn]:
    """Return, for each of at least two values, the lower and the upper median of all others."""
    order = np.argsort(values, kind="stable")
    place: NDArray[np.int64] = np.empty(len(values), np.int64)
    place[order] = np.arange(len(values))
    ascending = values[order]
    lower, upper = (len(values) - 2) // 2, (len(values) - 1) // 2
    # Without the value at `place`, those above it move down by one.
    return ascending[lower + (place <= lower)], ascending[upper + (place <= upper)]
