"""Detects slow pipelines by sequential evidence on their compute spans. Pure.

Theory of operation
===================

Each iteration gives every pipeline a figure, its *slowness*: the log of its span over the span that its own
plan predicts. The plan comes first: with two pipelines, peers cannot tell which one is slow. A slowness that
most of a pipeline's peers share, from a wrong profile or a shift of the whole job (drift), is subtracted
unless it is in their favour. Without a plan (at stock, while clocks are held) a pipeline is compared with its
peers alone. If the trainer reports how much work an iteration has for a pipeline, the pipeline may take that
much longer.

Spans are noisy. The noise is learned from all pipelines together (`noise`), and assumed to be large until it
is known. Evidence that a pipeline has another *level* of slowness accumulates against it (`sequential_test`),
until it reaches a threshold that noise alone would reach once in `FALSE_FREE_ITERATIONS` of the job, or less
often:

    jitter      adds up to nothing, however wild: the noise was learned from it.
    transient   a single iteration never decides, unless a GPU of the pipeline reports that it is being slowed
                (heat, power brake).
    lasting     a straggler. Its level is its slowness since the change, as far as that can be located.
    another     evidence for a higher or lower level moves a straggler there; below `LEAVE`,
                it is none. Slowing others less takes less evidence, so returning slack is never delayed.
    flapping    each withdrawal makes the next detection take four times the evidence (as a log), until the
                pipeline has been quiet for `QUIET_ITERATIONS`.

The factor that the others may take (`response_cost`) is lower than the straggler's own. It may be 1: then the
others do not surely wait for the straggler. A slow change that stays below `ENTER` is no straggler.

The first iteration under other clocks, and the first of all, do not count.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.telemetry import FloatColumn, IntColumn
from perseus.service.job.statistics.noise import Noise
from perseus.service.job.statistics.sequential_test import GAP, MIN_LEVEL, SequentialTest
from perseus.service.job.stragglers.response_cost import MIN_CHANGE, Leads, ResponseCost, SlownessEstimate
from perseus.service.job.stragglers.spans import IterationSpans

ENTER = 0.015
"""Smallest slowness of a straggler. Healthy pipelines of real jobs differ by 0.4 % (standard deviation)."""

LEAVE = ENTER / 3
"""Slowness that a straggler has to keep, by a standard error, to remain one."""

FALSE_FREE_ITERATIONS = 1000
"""Mean number of iterations between false detections in a job without a straggler."""

_CLEARING_THRESHOLD = 100.0
"""The same, by pipeline, for slowing down less: an error costs only energy."""

MAX_THRESHOLD_EXPONENT = 32
QUIET_ITERATIONS = 20

SLOWING_REASONS = 0x8 | 0x20 | 0x40 | 0x80
"""NVML's clock events that slow one GPU: hardware slowdown, software and hardware thermal, power brake."""

_SLOWED_SHARE = 0.25
"""Share of the root of the threshold that suffices if a GPU reports that it is being slowed."""

_SUSPECTED_SHARE = 0.25
"""Share of the threshold, as a log, that makes a suspect.

Of 32 healthy pipelines, one is a suspect in 7 % of all iterations.
"""

_MIN_COUNT_TO_LOWER = 16
"""Iterations of a straggler from which on its answer may be lowered: after a restart, the noise is known
again by then.
"""

_REMEMBERED = 64
"""Number of latest iterations that a new level may be the mean of."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A pipeline has become a straggler, has another factor, or (factor 1) is back to normal.

    Attributes:
        slowdown_factor: its span over that of its plan (without a plan, of its peers), as long as its peers
            keep theirs.
        waited_factor: the factor by which others surely wait for it, so that they may be slowed.
        iteration: the one that decided.
        iteration_count: the number of iterations in which the factor was measured, or that show that it is
            none.
        span_s, planned_span_s: measured and predicted; the latter is 0 without a plan.
        excess: the factor in this iteration alone, less 1.
        noise: standard deviation of the excess from iteration to iteration.
        enter: the smallest excess of a straggler.
        slowest_stage, stage_ratio: the stage that fell behind the most, and how much.
        clock_event_reasons: NVML's bits.
        has_cost_time: whether the response changes because it cost time.
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
    """A straggler: its measured slowness, and the log ratio that others wait for."""

    measured: SlownessEstimate
    waited: float


class StragglerDetector:
    """Tracks the pipelines of one job, iteration by iteration."""

    def __init__(self, pipeline_count: int) -> None:
        self._count = pipeline_count
        self._versions: IntColumn = np.full(pipeline_count, -1)
        self._noise = Noise(pipeline_count)
        self._test = SequentialTest(
            pipeline_count, FALSE_FREE_ITERATIONS * pipeline_count, _CLEARING_THRESHOLD
        )
        self._cost = ResponseCost()
        self._leads = Leads()
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
        """The pipelines with signs of slowness, but no proof yet.

        Empty if that is all of them: then the job as a whole has become slower, and no pipeline waits.
        """
        has_sign = self._test.evidence_above() >= self._test.threshold_above**_SUSPECTED_SHARE
        return [] if has_sign.all() else np.flatnonzero(has_sign).tolist()

    def restore(self, pipeline: int, waited_factor: float) -> None:
        """Take a straggler that was detected before a restart."""
        waited = math.log(waited_factor)
        level = max(waited, MIN_LEVEL)
        self._set_level(pipeline, level)
        self._known[pipeline] = _Known(SlownessEstimate(1, level, 0.0), waited)

    def forget(self, pipeline: int) -> None:
        """Take a report that a pipeline is no straggler; it may be detected again."""
        self._known.pop(pipeline, None)
        self._set_level(pipeline, 0.0)

    def restart(self) -> None:
        """Discard unfinished evidence: the job may resume at an earlier iteration."""
        self._versions = np.full_like(self._versions, -1)
        self._noise.restart()
        self._test.restart()
        self._cost.restart()
        self._recent[:] = np.nan

    def judge(self, spans: IterationSpans, *, is_overridden: bool = False) -> list[Finding]:
        """Take the next iteration; return the changes.

        `is_overridden`: whether the response follows a report, so that its cost does not count here.
        """
        is_fresh = spans.versions != self._versions
        self._versions = spans.versions
        spans_s = np.where(is_fresh, np.nan, spans.spans_s)
        per_work_s = spans_s / spans.relative_work
        slowness = _slowness(per_work_s, spans.planned_s, spans.versions, self._test.levels)
        self._test.add(slowness, self._noise)
        self._noise.add(slowness)
        self._leads.add(np.where(self._noise.hiccups.is_departed(), np.nan, slowness - self._test.levels))
        self._row = (self._row + 1) % _REMEMBERED
        self._recent[self._row] = slowness
        changed = dict(self._find_changes(spans, slowness))
        # How many others there are is known once all stragglers are.
        for pipeline in changed.keys() & self._known.keys():
            self._known[pipeline].waited = self._sure(self._known[pipeline].measured)
        for pipeline, known in self._known.items():
            if pipeline not in changed and not math.isnan(slowness[pipeline]):
                known.measured.add(float(slowness[pipeline]))
        has_cost_time = self._cost.judge(spans, spans_s, () if is_overridden else self._known)
        changed |= dict(self._withdraw_responses() if has_cost_time else self._changed_responses())
        return [
            self._finding(pipeline, spans, slowness, iteration_count, has_cost_time)
            for pipeline, iteration_count in sorted(changed.items())
        ]

    def _find_changes(self, spans: IterationSpans, slowness: FloatColumn) -> Iterator[tuple[int, int]]:
        """Yield the pipelines with a new level, and the number of iterations that show it."""
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
                recent = recent[:1]  # its GPU reports on this iteration only
            elif len(recent) < 2:
                continue  # however rare: the next iteration will show whether it lasts
            measured = SlownessEstimate.of(recent)
            known = self._known.get(pipeline)
            if self._is_slow(measured, is_known=known is not None):
                if known is None or abs(measured.mean - known.measured.mean) >= GAP:
                    self._set_level(pipeline, max(MIN_LEVEL, measured.mean))
                    self._known[pipeline] = _Known(measured, waited=0.0)
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
        """Count the iterations without a sign of slowness; enough of them reset the flapping penalty."""
        is_quiet = (above < math.sqrt(self._test.threshold_above)) & (self._test.levels == 0)
        self._quiet_counts = np.where(is_quiet, self._quiet_counts + 1, 0)
        self._threshold_exponents[self._quiet_counts >= QUIET_ITERATIONS] = 1

    def _since_change(self, pipeline: int, level: float, *, is_upwards: bool) -> FloatColumn:
        """Return the values most likely after the change: the latest ones, where they differ the most."""
        own = np.roll(self._recent[:, pipeline], -1 - self._row)[::-1]
        own = own[~np.isnan(own)]
        sums = np.cumsum(own - level) * (1 if is_upwards else -1)
        return own[: 1 + int(np.argmax(sums / np.sqrt(np.arange(1, len(own) + 1))))]

    def _sure(self, measured: SlownessEstimate) -> float:
        if self._cost.is_paused:
            return 0.0
        others = self._count - len(self._known)
        sure = measured.sure(self._noise.scale, others)
        shares = others * self._noise.hiccups.size_shares
        return min(sure, self._leads.affordable(measured.lower(self._noise.scale), shares))

    def _withdraw_responses(self) -> Iterator[tuple[int, int]]:
        for pipeline, known in self._known.items():
            if known.waited:
                known.waited = 0.0
                yield pipeline, known.measured.count

    def _changed_responses(self) -> Iterator[tuple[int, int]]:
        """Yield the stragglers known so much better that others may take more, or less, of their slowness.

        A mean of many iterations may also show that there is no slowness.
        """
        # Only each time the count has doubled.
        due = [(each, known) for each, known in self._known.items() if known.measured.count.bit_count() == 1]
        for pipeline, known in due:
            is_lasting = known.measured.count >= _MIN_COUNT_TO_LOWER
            if is_lasting and not self._is_slow(known.measured, is_known=True):
                self.forget(pipeline)
                yield pipeline, known.measured.count
        for pipeline, known in due:
            if pipeline not in self._known:
                continue
            sure = self._sure(known.measured)
            if known.measured.count < _MIN_COUNT_TO_LOWER:
                sure = max(sure, known.waited)
            if abs(sure - known.waited) > MIN_CHANGE:
                known.waited = sure
                yield pipeline, known.measured.count

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
    """Return the log ratio of each span to its expected value; NaN for pipelines without peers.

    All pipelines with a plan are peers of each other; the others are peers if they run under the same
    version. Peers that are faster than planned do not make a pipeline slow that keeps its plan, and known
    slowness of peers, their `levels`, is already explained.
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
