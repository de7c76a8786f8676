"""Which pipelines are slow: sequential evidence on the spans of computation. Pure.

Theory of operation
===================

Each iteration gives every pipeline a figure, its *slowness*: the log of its span over the one that its own
plan promises. The plan comes first: with two pipelines, peers can not say who is slow. What most of its peers
have in common, a profile that is off or a shift of the whole job (drift), is taken off, unless it is in their
favour. Without a plan (at stock, while clocks are held) a pipeline is compared with its peers alone. Where a
trainer says how much work an iteration holds for a pipeline, that is how much longer it may take.

Spans jump. How much is learned from all pipelines together (`noise`), and before that is known it is taken to
be much. Against it, evidence that a pipeline has another *level* of slowness adds up (`sequential_test`),
until it reaches a threshold that jumps alone would reach once in `FALSE_FREE_ITERATIONS` of the job, or less
often:

    jitter      adds up to nothing, however wild: it is what the noise was learned from.
    transient   a single iteration never decides, unless a GPU of the pipeline says that it is being slowed
                (heat, power brake).
    lasting     a straggler. Its level is what it had since the change, as far as that can be told.
    another     evidence for a higher or lower level moves a straggler there; below `LEAVE`, it is none any
                more. To slow others less takes less evidence: giving slack back is never delayed.
    flapping    each withdrawal makes the next detection take four times as much (as a log), until the
                pipeline has been itself for `CALM` iterations.

The factor that others may take (`answers`) is lower than the straggler's own, and may be 1: a straggler that
nobody surely waits for. A slow change that stays below `ENTER` is no straggler.

The first iteration under other clocks, and the first of all, say nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.telemetry import FloatColumn, IntColumn
from perseus.service.job.statistics.noise import Noise
from perseus.service.job.statistics.sequential_test import GAP, MIN_LEVEL, SequentialTest
from perseus.service.job.stragglers.response_cost import MIN_CHANGE, ResponseCost, SlownessEstimate
from perseus.service.job.stragglers.spans import IterationSpans

ENTER = 0.015
"""Least slowness of a straggler. Healthy pipelines of real jobs differ by 0.4 % (one standard deviation)."""

LEAVE = ENTER / 3
"""Slowness that a straggler has to keep, by a standard error, to remain one."""

FALSE_FREE_ITERATIONS = 1000
"""Iterations of a job without a straggler in which at most one is found, on average."""

_CLEARING_THRESHOLD = 100.0
"""The same, by pipeline, for slowing down less: it costs energy only."""

MAX_THRESHOLD_EXPONENT = 32
QUIET_ITERATIONS = 20

SLOWING_REASONS = 0x8 | 0x20 | 0x40 | 0x80
"""NVML's clock events that slow one GPU: hardware slowdown, software and hardware thermal, power brake."""

_SLOWED_SHARE = 0.25
"""Of the root of the threshold: what a GPU's own word leaves to be shown."""

_SUSPECTED_SHARE = 0.25
"""Of the threshold, as a log, makes a suspect. Of 32 healthy pipelines one is so in 7 % of all iterations."""

_REMEMBERED = 64
"""Iterations of which a new level may be the mean."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A pipeline has become a straggler, has another factor, or (factor 1) is itself again.

    Attributes:
        slowdown_factor: its span over the one of its plan (without a plan: of its peers), as long as its
            peers keep theirs.
        waited_factor: the factor by which others surely wait for it, so that they may be slowed.
        iteration: the one that decided.
        iteration_count: how many the factor was measured in, or show that it is none.
        span_s, planned_span_s: measured and promised; the latter is 0 without a plan.
        excess: the factor that this iteration alone shows, less 1.
        noise: standard deviation of the excess from iteration to iteration.
        enter: the least excess of a straggler.
        slowest_stage, stage_ratio: the stage that fell behind the most, and how much.
        clock_event_reasons: NVML's bits.
        has_cost_time: whether it is the answer that changes, because it cost time.
    """

    pipeline: int
    slowdown_factor: float
    waited_factor: float
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
    has_cost_time: bool = False

    @property
    def is_straggler(self) -> bool:
        """Whether the pipeline is slow now."""
        return self.slowdown_factor > 1


@dataclass(slots=True)
class _Known:
    """A straggler: what was measured of it, and the log ratio that others wait for."""

    measured: SlownessEstimate
    waited: float


class StragglerDetector:
    """Follows the pipelines of one job, iteration by iteration."""

    def __init__(self, pipeline_count: int) -> None:
        self._count = pipeline_count
        self._versions: IntColumn = np.full(pipeline_count, -1)
        self._noise = Noise(pipeline_count)
        self._test = SequentialTest(
            pipeline_count, FALSE_FREE_ITERATIONS * pipeline_count, _CLEARING_THRESHOLD
        )
        self._cost = ResponseCost()
        self._known: dict[int, _Known] = {}
        self._threshold_exponents: IntColumn = np.ones(pipeline_count, np.int64)
        self._quiet_counts: IntColumn = np.zeros(pipeline_count, np.int64)
        self._recent: FloatColumn = np.full((_REMEMBERED, pipeline_count), np.nan)
        self._row = 0

    def factor(self, pipeline: int) -> float | None:
        """Return the factor by which others wait for a straggler; None if it is none."""
        known = self._known.get(pipeline)
        return math.exp(known.waited) if known else None

    @property
    def suspects(self) -> list[int]:
        """The pipelines of whose slowness there is a sign, but no proof yet.

        None where that is all of them: then it is the job that has become slower, and nobody waits.
        """
        has_sign = self._test.evidence_above() >= self._test.threshold_above**_SUSPECTED_SHARE
        return [] if has_sign.all() else np.flatnonzero(has_sign).tolist()

    def restore(self, pipeline: int, waited_factor: float) -> None:
        """Take a straggler that was found before a restart."""
        waited = math.log(waited_factor)
        level = max(waited, MIN_LEVEL)
        self._set_level(pipeline, level)
        self._known[pipeline] = _Known(SlownessEstimate(1, level, 0.0), waited)

    def forget(self, pipeline: int) -> None:
        """Take somebody's word that a pipeline is no straggler; it may be found to be one again."""
        self._known.pop(pipeline, None)
        self._set_level(pipeline, 0.0)

    def restart(self) -> None:
        """What is under way counts for nothing: the job may go on with an iteration that it had before."""
        self._versions = np.full_like(self._versions, -1)
        self._noise.restart()
        self._test.restart()
        self._cost.restart()
        self._recent[:] = np.nan

    def judge(self, spans: IterationSpans, *, is_overridden: bool = False) -> list[Finding]:
        """Take the next iteration; return what has changed.

        `is_overridden`: what the others take is somebody else's answer, and its cost theirs.
        """
        is_fresh = spans.versions != self._versions
        self._versions = spans.versions
        spans_s = np.where(is_fresh, np.nan, spans.spans_s)
        per_work_s = spans_s / spans.relative_work
        slowness = _slowness(per_work_s, spans.planned_s, spans.versions, self._test.levels)
        self._test.add(slowness, self._noise)
        self._noise.add(slowness)
        self._row = (self._row + 1) % _REMEMBERED
        self._recent[self._row] = slowness
        changed = dict(self._find_changes(spans, slowness))
        for pipeline, known in self._known.items():
            if pipeline not in changed and not math.isnan(slowness[pipeline]):
                known.measured.add(float(slowness[pipeline]))
        has_cost_time = self._cost.judge(spans, spans_s, () if is_overridden else self._known)
        answers = self._withdraw_responses() if has_cost_time else self._improved_responses()
        changed |= {pipeline: self._known[pipeline].measured.count for pipeline in answers}
        return [
            self._finding(pipeline, spans, slowness, iteration_count, has_cost_time)
            for pipeline, iteration_count in sorted(changed.items())
        ]

    def _find_changes(self, spans: IterationSpans, slowness: FloatColumn) -> Iterator[tuple[int, int]]:
        """Yield the pipelines that have another level now, and the number of iterations that show it."""
        above, below = self._test.evidence_above(), self._test.evidence_below()
        is_slowed = (spans.clock_event_reasons & SLOWING_REASONS) != 0
        needed = self._test.threshold_above ** self._threshold_exponents.astype(np.float64)
        is_slowed &= above >= _SLOWED_SHARE * np.sqrt(needed)
        is_above, is_below = (above >= needed) | is_slowed, below >= self._test.threshold_below
        self._count_quiet(above)
        for pipeline in np.flatnonzero((is_above | is_below) & ~np.isnan(slowness)).tolist():
            level = float(self._test.levels[pipeline])
            recent = self._since_change(pipeline, level, is_upwards=bool(is_above[pipeline]))
            if is_slowed[pipeline] and above[pipeline] < needed[pipeline]:
                recent = recent[:1]  # its GPU speaks of this one
            measured = SlownessEstimate.of(recent)
            known = self._known.get(pipeline)
            if self._is_slow(measured, is_known=known is not None):
                if known is None or abs(measured.mean - known.measured.mean) >= GAP:
                    self._set_level(pipeline, max(MIN_LEVEL, measured.mean))
                    self._known[pipeline] = _Known(measured, self._sure(measured))
                    yield pipeline, measured.count
                else:
                    self._test.set_level(pipeline, level)
            elif known is not None:
                self.forget(pipeline)
                self._threshold_exponents[pipeline] = min(
                    MAX_THRESHOLD_EXPONENT, 4 * self._threshold_exponents[pipeline]
                )
                yield pipeline, measured.count
            else:
                self._test.set_level(pipeline, level)

    def _is_slow(self, measured: SlownessEstimate, *, is_known: bool) -> bool:
        if not is_known:
            return measured.mean >= math.log1p(ENTER)
        return measured.mean - self._noise.scale / math.sqrt(measured.count) >= math.log1p(LEAVE)

    def _count_quiet(self, above: FloatColumn) -> None:
        """Count for how long there was no sign of slowness; what flapped is forgotten after a while."""
        is_quiet = (above < math.sqrt(self._test.threshold_above)) & (self._test.levels == 0)
        self._quiet_counts = np.where(is_quiet, self._quiet_counts + 1, 0)
        self._threshold_exponents[self._quiet_counts >= QUIET_ITERATIONS] = 1

    def _since_change(self, pipeline: int, level: float, *, is_upwards: bool) -> FloatColumn:
        """Return what is likeliest to have come after the change: the latest, where they differ the most."""
        own = np.roll(self._recent[:, pipeline], -1 - self._row)[::-1]
        own = own[~np.isnan(own)]
        sums = np.cumsum(own - level) * (1 if is_upwards else -1)
        return own[: 1 + int(np.argmax(sums / np.sqrt(np.arange(1, len(own) + 1))))]

    def _sure(self, measured: SlownessEstimate) -> float:
        if self._cost.is_paused:
            return 0.0
        return measured.sure(self._noise.scale, self._count - len(self._known))

    def _withdraw_responses(self) -> Iterator[int]:
        for pipeline, known in self._known.items():
            if known.waited:
                known.waited = 0.0
                yield pipeline

    def _improved_responses(self) -> Iterator[int]:
        """Yield the stragglers of which so much more is known that others may take more of their slowness."""
        for pipeline, known in self._known.items():
            if known.measured.count.bit_count() > 1:  # each time that twice as much is known
                continue
            if (sure := self._sure(known.measured)) > known.waited + MIN_CHANGE:
                known.waited = sure
                yield pipeline

    def _set_level(self, pipeline: int, level: float) -> None:
        self._test.set_level(pipeline, level)
        self._noise.set_level(pipeline, level)
        self._recent[:, pipeline] = np.nan

    def _finding(
        self,
        pipeline: int,
        spans: IterationSpans,
        slowness: FloatColumn,
        iteration_count: int,
        has_cost_time: bool,
    ) -> Finding:
        known = self._known.get(pipeline)
        return Finding(
            pipeline=pipeline,
            slowdown_factor=math.exp(known.measured.mean) if known else 1.0,
            waited_factor=math.exp(known.waited) if known else 1.0,
            iteration=spans.iteration,
            iteration_count=iteration_count,
            span_s=float(spans.spans_s[pipeline]),
            planned_span_s=float(np.nan_to_num(spans.planned_s[pipeline])),
            excess=math.expm1(float(np.nan_to_num(slowness[pipeline]))),
            noise=self._noise.scale,
            enter=ENTER,
            slowest_stage=int(spans.slowest_stages[pipeline]),
            stage_ratio=float(spans.stage_ratios[pipeline]),
            clock_event_reasons=int(spans.clock_event_reasons[pipeline]),
            has_cost_time=has_cost_time and known is not None,
        )


def _slowness(
    spans_s: FloatColumn, planned_s: FloatColumn, versions: IntColumn, levels: FloatColumn
) -> FloatColumn:
    """Return the log ratio of each span to what it should be; NaN where there are no peers.

    Pipelines with a plan are peers whatever it is, the others those that run under the same version. What
    peers do faster than planned is no measure for one that keeps its plan, and what is known of them, their
    `levels`, has its reason.
    """
    is_planned = ~np.isnan(planned_s)
    log_ratios = np.log(spans_s / np.where(is_planned, planned_s, 1.0))
    found = np.full_like(log_ratios, np.nan)
    is_known = ~np.isnan(log_ratios)
    groups = np.where(is_planned, -1, versions)
    for group in np.unique(groups[is_known]).tolist():
        members = np.flatnonzero(is_known & (groups == group))
        if len(members) < 2:
            continue
        own = log_ratios[members]
        if group == -1:
            unexplained = np.maximum(own - levels[members], np.minimum(own, 0.0))
            found[members] = own - np.maximum(0.0, _medians_of_others(unexplained))
        else:
            found[members] = own - _medians_of_others(own)
    return found


def _medians_of_others(values: FloatColumn) -> FloatColumn:
    """Return, for each of at least two values, the median of all others."""
    order = np.argsort(values, kind="stable")
    place: NDArray[np.int64] = np.empty(len(values), np.int64)
    place[order] = np.arange(len(values))
    ascending = values[order]
    lower, upper = (len(values) - 2) // 2, (len(values) - 1) // 2
    # Without the value at `place`, those above it move down by one.
    found: FloatColumn = (ascending[lower + (place <= lower)] + ascending[upper + (place <= upper)]) / 2
    return found
