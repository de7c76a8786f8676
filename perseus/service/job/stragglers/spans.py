"""The compute span of each pipeline's iteration, rebuilt from the durations of its computations.

The wall time of an iteration does not show which pipeline is slow: all pipelines end it together, at the
gradient synchronisation. So each iteration is replayed: every computation starts as early as the schedule
allows and takes its measured time. Synchronisation and waiting are in no computation, hence not in the span.

The peers of a computation have the same stage, kind and chunk. Each counts with the median ratio of its peers
(the measured duration over the planned one; without a plan, the duration itself), not with its own: a host
that is busy for a moment stretches a few computations by much, a slow GPU stretches all of them. Where the
gradients are reduced while the last microbatch's backward still runs, that backward waits for the slowest
pipeline; it is left out of the median.

The schedule is compiled once. Computations are laid out level by level (each level depends only on the ones
before it), so a replay takes one numpy operation per level for all pipelines together, and the reports of a
stage's ranks for an iteration are put in place at once when all have arrived.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.domain.telemetry import KINDS, ComputationColumns, FloatColumn, IntColumn, TelemetryBatch
from perseus.solver import Computation, Kind, Schedule

_OPEN_LIMIT = 4
"""Maximum number of incomplete iterations; the newest makes way, as a single rank may be ahead by mistake."""

_VERSION_LIMIT = 64
"""Number of versions whose plans are kept: an iteration is judged by the plan that it ran under."""

_KIND_CODES = {kind: code for code, kind in enumerate(KINDS)}

_REDUCING = [_KIND_CODES[kind] for kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)]
"""Kinds that yield weight gradients: the last of them may contain the reduction."""


@dataclass(frozen=True, slots=True, eq=False)
class IterationSpans:
    """One iteration of all pipelines, as arrays of shape (pipelines,), NaN for unknown values.

    Attributes:
        versions: the version that each ran under.
        spans_s: compute spans, rebuilt from the measured durations.
        planned_s: the spans that the plan in force predicts; NaN without a plan.
        slowest_stages: the stage that fell behind its plan (without one, behind its peers) the most.
        stage_ratios: how much it fell behind, as the ratio of compute times.
        clock_event_reasons: NVML's bits, combined over all ranks.
        relative_work: the largest value that a rank of the pipeline reported; 1 if none did.
        slowness: of shape (stages, pipelines): how much each stage fell behind its plan, or its peers.
    """

    iteration: int
    versions: IntColumn
    spans_s: FloatColumn
    planned_s: FloatColumn
    slowest_stages: IntColumn
    stage_ratios: FloatColumn
    clock_event_reasons: IntColumn
    relative_work: FloatColumn | float = 1.0
    slowness: FloatColumn | None = None


class SpanGraph:
    """One pipeline's dependencies, compiled to replay many iterations at once.

    Attributes:
        columns: the column of each computation in arrays of durations.
        column_of: the same by the computation's index in the schedule.
    """

    def __init__(self, schedule: Schedule) -> None:
        levels = schedule.levels
        by_level = np.argsort(levels, kind="stable")
        self.column_of = np.empty_like(by_level)
        self.column_of[by_level] = np.arange(len(by_level))
        computations = list(schedule.computations)
        self.columns = {computations[index]: column for column, index in enumerate(by_level.tolist())}
        # An additional row, always 0, represents the start of the iteration.
        begin = len(by_level)
        lengths = np.array([len(order) for order in schedule.orders])
        first = np.cumsum(lengths) - lengths
        before = np.concatenate(([begin], self.column_of[:-1]))
        before[first] = begin
        across = self.column_of[schedule.arcs]
        across = across[np.argsort(across[:, 1], kind="stable")]
        # Index of each dependency among those of the same computation on other stages.
        row = np.arange(len(across)) - np.searchsorted(across[:, 1], across[:, 1])
        self._waits_for = np.full((2 + row.max(initial=-1), begin), begin, np.int64)
        self._waits_for[0, self.column_of] = before
        self._waits_for[1 + row, across[:, 1]] = across[:, 0]
        self._bounds = list(pairwise([0, *np.cumsum(np.bincount(levels)).tolist()]))

    def spans_s(self, durations_s: FloatColumn) -> FloatColumn:
        """Return the spans for durations of shape (computations, pipelines); NaN where one of them is."""
        finishes_s = np.zeros((len(durations_s) + 1, durations_s.shape[1]))
        for first, end in self._bounds:
            starts_s = finishes_s[self._waits_for[0, first:end]]
            for row in self._waits_for[1:, first:end]:
                np.maximum(starts_s, finishes_s[row], out=starts_s)
            np.add(starts_s, durations_s[first:end], out=finishes_s[first:end])
        spans_s: FloatColumn = finishes_s.max(axis=0)
        return spans_s


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    """An incomplete iteration.

    Attributes:
        durations_s: of shape (computations, pipelines), NaN for unknown values.
        clock_event_reasons: NVML's bits, by pipeline.
        relative_work: by pipeline; 0 if not reported.
        reports: by stage, the ranks' reports by (pipeline, tensor): durations in the order of the stage.
    """

    durations_s: FloatColumn
    clock_event_reasons: IntColumn
    relative_work: FloatColumn
    reports: list[dict[tuple[int, int], Sequence[float]]]


class SpanCollector:
    """Collects durations from telemetry, and computes the spans of complete iterations."""

    def __init__(self, schedule: Schedule, parallelism: Parallelism) -> None:
        self._graph = SpanGraph(schedule)
        computations = list(schedule.computations)
        kinds = np.array([_KIND_CODES[computation.kind] for computation in computations])
        chunks = np.array([computation.chunk for computation in computations])
        microbatches = np.array([computation.microbatch for computation in computations])
        stages = np.repeat(np.arange(schedule.stage_count), [len(order) for order in schedule.orders])
        self._pipeline_count = parallelism.pipeline_count
        self._counts = (len(KINDS), 1 + int(chunks.max()), 1 + int(microbatches.max()))
        self._column_of = np.full((schedule.stage_count, np.prod(self._counts)), -1, np.int64)
        place = np.ravel_multi_index((kinds, chunks, microbatches), self._counts)
        self._column_of[stages, place] = self._graph.column_of
        self._stages = [self._graph.column_of[stages == stage] for stage in range(schedule.stage_count)]
        # FIXED computations are distinguished by their microbatch; none has peers.
        only = np.where(kinds == _KIND_CODES[Kind.FIXED], microbatches, 0)
        alike = np.ravel_multi_index((stages, kinds, chunks, only), (schedule.stage_count, *self._counts))
        self._peer_groups = list(_peer_groups(self._graph.column_of, alike, np.isin(kinds, _REDUCING)))
        self._planned_s: dict[int, tuple[FloatColumn, float]] = {}
        self._open: dict[int, _Open] = {}

    def expect(self, version: int, planned_s: Mapping[Computation, float]) -> None:
        """Take the durations that a plan predicts, including those of FIXED computations."""
        durations_s = np.array([planned_s[computation] for computation in self._graph.columns])
        self._planned_s[version] = durations_s, float(self._graph.spans_s(durations_s[:, None])[0])
        while len(self._planned_s) > _VERSION_LIMIT:
            del self._planned_s[min(self._planned_s)]

    def restart(self) -> None:
        """Forget incomplete iterations."""
        self._open.clear()

    def add(self, rank: Coordinates, batch: TelemetryBatch, *, is_plain: bool = False) -> None:
        """Take a rank's measurements. A stage's duration is the longest of its ranks'.

        `is_plain`: the computations are those of one iteration, in the order of the rank's stage.
        """
        computations, finished = batch.computations, batch.iterations
        if is_plain:
            reports = self._open_iteration(computations.iteration[0]).reports[rank.stage]
            reports[rank.pipeline, rank.tensor] = computations.duration_s
        elif computations.iteration:
            self._add_others(rank, computations)
        if any(finished.clock_event_reasons):
            for number, reasons in zip(finished.iteration, finished.clock_event_reasons, strict=True):
                if reasons:
                    self._open_iteration(number).clock_event_reasons[rank.pipeline] |= reasons
        for number, work in zip(finished.iteration, finished.relative_work, strict=False):  # may be empty
            reported = self._open_iteration(number).relative_work
            reported[rank.pipeline] = max(reported[rank.pipeline], work)

    def _add_others(self, rank: Coordinates, computations: ComputationColumns) -> None:
        columns = self._columns(rank.stage, computations)
        numbers, measured_s = np.array(computations.iteration), np.array(computations.duration_s)
        for iteration in computations.iterations():
            is_own = (numbers == iteration) & (columns >= 0)  # -1: not in the registered order
            entry = self._open_iteration(iteration)
            own_s = entry.durations_s[:, rank.pipeline]
            own_s[columns[is_own]] = np.fmax(own_s[columns[is_own]], measured_s[is_own])

    def take(self, iteration: int, versions: tuple[int, ...]) -> IterationSpans | None:
        """Return the spans of a complete iteration, and forget it and the ones before."""
        found = self._open.get(iteration)
        self._open = {number: entry for number, entry in self._open.items() if number > iteration}
        if found is None:
            return None
        durations_s, reasons = found.durations_s, found.clock_event_reasons
        for stage, reports in enumerate(found.reports):
            self._put_reports(durations_s, stage, reports)
        weights_s = np.ones_like(durations_s)
        planned_s = np.full(self._pipeline_count, np.nan)
        for pipeline, version in enumerate(versions):
            if version in self._planned_s:
                weights_s[:, pipeline], planned_s[pipeline] = self._planned_s[version]
        for peers, judged in self._peer_groups:
            median_ratio = np.median(durations_s[judged] / weights_s[judged], axis=0)
            durations_s[peers] = weights_s[peers] * median_ratio
        slowness = self._slowness(durations_s, weights_s, np.isnan(planned_s))
        stages = np.where(np.isnan(slowness), -np.inf, slowness).argmax(axis=0)
        return IterationSpans(
            iteration=iteration,
            versions=np.array(versions),
            spans_s=self._graph.spans_s(durations_s),
            planned_s=planned_s,
            slowest_stages=stages,
            stage_ratios=slowness[stages, np.arange(self._pipeline_count)],
            clock_event_reasons=reasons,
            relative_work=np.where(found.relative_work > 0, found.relative_work, 1.0),
            slowness=slowness,
        )

    def _columns(self, stage: int, computations: ComputationColumns) -> NDArray[np.int64]:
        """Return the column of each row, -1 for computations that the stage's order does not have."""
        _, chunk_count, microbatch_count = self._counts
        kind, chunk = np.array(computations.kind, np.int64), np.array(computations.chunk, np.int64)
        microbatch = np.array(computations.microbatch, np.int64)
        known = (chunk < chunk_count) & (microbatch < microbatch_count)
        place = np.where(known, (kind * chunk_count + chunk) * microbatch_count + microbatch, 0)
        columns: NDArray[np.int64] = np.where(known, self._column_of[stage, place], -1)
        return columns

    def _put_reports(
        self, durations_s: FloatColumn, stage: int, reports: Mapping[tuple[int, int], Sequence[float]]
    ) -> None:
        """Fill in the plain reports of a stage's ranks, all pipelines together."""
        if not reports:
            return
        columns = self._stages[stage][:, None]
        places = np.array(list(reports))
        measured_s = np.array(list(reports.values())).T
        for tensor in np.unique(places[:, 1]):
            is_own = places[:, 1] == tensor
            pipelines = places[is_own, 0]
            known_s = durations_s[columns, pipelines]
            durations_s[columns, pipelines] = np.fmax(known_s, measured_s[:, is_own])

    def _open_iteration(self, iteration: int) -> _Open:
        entry = self._open.get(iteration)
        if entry is None:
            # A pipeline's durations are contiguous, because its ranks write them batch by batch.
            shape = (self._pipeline_count, len(self._graph.columns))
            entry = self._open[iteration] = _Open(
                np.full(shape, np.nan).T,
                np.zeros(self._pipeline_count, np.int64),
                np.zeros(self._pipeline_count),
                [{} for _ in self._stages],
            )
            if len(self._open) > _OPEN_LIMIT:
                del self._open[max(self._open)]
        return entry

    def _slowness(
        self, durations_s: FloatColumn, weights_s: FloatColumn, is_unplanned: NDArray[np.bool_]
    ) -> FloatColumn:
        busy_s = np.array([durations_s[columns].sum(axis=0) for columns in self._stages])
        ratios: FloatColumn = busy_s / np.array([weights_s[columns].sum(axis=0) for columns in self._stages])
        if is_unplanned.any():
            alike = ratios[:, is_unplanned]
            whole = alike[:, ~np.isnan(alike).any(axis=0)]
            if whole.size:
                ratios[:, is_unplanned] /= np.median(whole, axis=1)[:, None]
        return ratios


def _peer_groups(
    columns: NDArray[np.int64], alike: NDArray[np.int64], is_reducing: NDArray[np.bool_]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the columns of each group of peers, and of those among them that count for the median.

    All arrays are indexed by the computation's index in the schedule; peers have the same number in `alike`.
    """
    in_groups = np.argsort(alike, kind="stable")
    for group in np.split(in_groups, np.flatnonzero(np.diff(alike[in_groups])) + 1):
        judged = group[:-1] if is_reducing[group[0]] and len(group) > 1 else group
        yield columns[group], columns[judged]
