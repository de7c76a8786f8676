"""The slow pipelines of a job: reported and detected stragglers. Part of the state machine.

A report overrides detection until it is cleared; then detection counts again.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from perseus.service.domain.measured import JobIteration
from perseus.service.domain.model import Straggler
from perseus.service.domain.records import JobRecord
from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.domain.telemetry import FloatColumn, TelemetryBatch
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.stragglers.detector import SLOWING_REASONS, Finding, StragglerDetector
from perseus.service.job.stragglers.spans import SpanCollector
from perseus.solver import Computation, Schedule
from perseus.v1 import event_pb2


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether the stragglers have changed, and the pipelines with a GPU that was slowed in the iteration."""

    has_changed: bool
    slowed: Collection[int]


NOTHING_JUDGED = Judgement(False, ())
"""For an iteration that shows nothing."""


class StragglerRegistry:
    """The stragglers of a job, by pipeline.

    Attributes:
        slowness: of shape (stages, pipelines): how much each stage fell behind its plan, or its peers, in the
            latest judged iteration; NaN for unknown values, None before the first.
    """

    def __init__(
        self, record: JobRecord, schedule: Schedule, parallelism: Parallelism, buffer: CommandBuffer
    ) -> None:
        self.slowness: FloatColumn | None = None
        self._record = record
        self._buffer = buffer
        self._spans = SpanCollector(schedule, parallelism)
        self._detector = StragglerDetector(parallelism.pipeline_count)
        for straggler in record.stragglers:
            if straggler.is_detected and straggler.slowdown_factor is not None:
                self._detector.restore(straggler.pipeline, straggler.slowdown_factor)

    def __len__(self) -> int:
        return len(self._record.stragglers)

    def __iter__(self) -> Iterator[Straggler]:
        return iter(self._record.stragglers)

    @property
    def pipelines(self) -> Collection[int]:
        """The slow pipelines."""
        return {straggler.pipeline for straggler in self}

    @property
    def suspects(self) -> Collection[int]:
        """The pipelines that may prove to be slow within a few iterations."""
        return self._detector.suspects

    def restart(self) -> None:
        """Discard unfinished evidence: the job may resume at an earlier iteration."""
        self._spans.restart()
        self._detector.restart()

    def report(self, straggler: Straggler) -> bool:
        """Take a reported straggler; return whether it is new."""
        is_news = straggler not in self._record.stragglers
        self._put(straggler.pipeline, straggler)
        return is_news

    def clear(self, pipeline: int) -> bool:
        """Take a report that a pipeline is not slow; return whether it was a straggler."""
        cleared = self._find(pipeline)
        if cleared is None:
            return False
        self._put(pipeline, None)
        if cleared.is_detected:
            self._detector.forget(pipeline)
        factor = self._detector.factor(pipeline)
        self._buffer.announce(
            event_pb2.JOB_EVENT_TYPE_STRAGGLER_CLEARED,
            f"pipeline {pipeline} is no longer reported as slow"
            + ("; it was detected to be slow" if factor is not None else ""),
            event_pb2.StragglerCleared(pipeline=pipeline, detected_slowdown_factor=factor),
        )
        self._note_detected(pipeline, factor)
        return True

    def expect(self, version: int, planned_s: Mapping[Computation, float]) -> None:
        """Take the durations that a plan predicts, including those of FIXED computations."""
        self._spans.expect(version, planned_s)

    def take_telemetry(self, rank: Coordinates, batch: TelemetryBatch, *, is_plain: bool) -> None:
        """Take a rank's computations, before the iterations that they complete are judged.

        `is_plain`: they are those of one iteration, in the order of the rank's stage.
        """
        self._spans.add(rank, batch, is_plain=is_plain)

    def judge(self, iteration: JobIteration) -> Judgement:
        """Find the pipelines that were slow in an iteration."""
        spans = self._spans.take(iteration.iteration, iteration.versions) if iteration.versions else None
        if spans is None:
            return NOTHING_JUDGED
        self.slowness = spans.slowness
        has_changed = False
        is_overridden = any(not straggler.is_detected for straggler in self)
        for finding in self._detector.judge(spans, is_overridden=is_overridden):
            known = self._find(finding.pipeline)
            is_overridden = known is not None and not known.is_detected
            self._announce_finding(finding, is_overridden)
            if not is_overridden:
                self._note_detected(finding.pipeline, finding.waited_factor if finding.is_straggler else None)
                has_changed = True
        slowed = np.flatnonzero(spans.clock_event_reasons & SLOWING_REASONS)
        return Judgement(has_changed, slowed.tolist())

    def validate(self) -> None:
        """Check the invariants."""
        pipelines = [straggler.pipeline for straggler in self]
        assert pipelines == sorted({*pipelines})
        for straggler in self:
            if straggler.is_detected:
                assert straggler.slowdown_factor == self._detector.factor(straggler.pipeline)

    def _note_detected(self, pipeline: int, waited_factor: float | None) -> None:
        """Record a straggler with the factor by which others wait for it, or (None) that it is none."""
        found = waited_factor is not None
        self._put(
            pipeline,
            Straggler(pipeline, slowdown_factor=waited_factor, is_detected=True) if found else None,
        )

    def _find(self, pipeline: int) -> Straggler | None:
        return next((straggler for straggler in self if straggler.pipeline == pipeline), None)

    def _put(self, pipeline: int, straggler: Straggler | None) -> None:
        others = [other for other in self if other.pipeline != pipeline]
        if straggler is not None:
            others.append(straggler)
        self._record.stragglers = tuple(sorted(others, key=lambda each: each.pipeline))

    def _announce_finding(self, finding: Finding, is_overridden: bool) -> None:
        self._buffer.announce(
            event_pb2.JOB_EVENT_TYPE_STRAGGLER_DETECTED
            if finding.is_straggler
            else event_pb2.JOB_EVENT_TYPE_STRAGGLER_WITHDRAWN,
            _message(finding),
            event_pb2.StragglerFinding(
                pipeline=finding.pipeline,
                slowdown_factor=finding.slowdown_factor,
                waited_factor=finding.waited_factor,
                iteration=finding.iteration,
                iteration_count=finding.iteration_count,
                span_s=finding.span_s,
                planned_span_s=finding.planned_span_s,
                excess=finding.excess,
                noise=finding.noise,
                limit=finding.enter,
                slowest_stage=finding.slowest_stage,
                stage_ratio=finding.stage_ratio,
                clock_event_reasons=finding.clock_event_reasons,
                is_overridden=is_overridden,
            ),
        )


def _message(finding: Finding) -> str:
    if not finding.is_straggler:
        return f"pipeline {finding.pipeline} is back to normal"
    measure = "its plan" if finding.planned_span_s else "its peers"
    slow = f"pipeline {finding.pipeline} is slow: {finding.slowdown_factor:.3f} × {measure}"
    if finding.has_cost_time:
        return f"{slow}; the others no longer slow down for it, as that cost time"
    others = (
        f"the others may take {finding.waited_factor:.3f} ×"
        if finding.waited_factor > 1
        else "the others keep their plans"
    )
    return f"{slow}, stage {finding.slowest_stage} the most; {others}"
