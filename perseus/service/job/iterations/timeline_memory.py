"""The latest complete iteration of each pipeline, and one of the stock baseline, kept in memory only."""

from collections import deque

import numpy as np

from perseus.service.domain.measured import Timeline
from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.domain.telemetry import ComputationColumns
from perseus.v1 import job_pb2

_KEPT = 4
"""Iterations kept per stage, because its ranks do not report at the same moment."""


class TimelineMemory:
    """Keeps the last few iterations of every stage, and finds the latest complete one.

    Attributes:
        baseline: a complete iteration of the latest stock baseline, and its pipeline; None if there is none.
    """

    def __init__(self, parallelism: Parallelism) -> None:
        def memory() -> deque[tuple[int, ComputationColumns]]:
            return deque(maxlen=_KEPT)

        self.baseline: tuple[int, Timeline] | None = None
        pipelines = range(parallelism.pipeline_count)
        self._stages = {p: tuple(memory() for _ in range(parallelism.stage_count)) for p in pipelines}
        self._times_s: dict[int, dict[int, float]] = {p: {} for p in pipelines}

    def add(self, rank: Coordinates, computations: ComputationColumns) -> None:
        """Remember a rank's latest computations; tensor rank 0 represents the stage."""
        if rank.tensor == 0:
            memory = self._stages[rank.pipeline][rank.stage]
            iterations = computations.iterations()
            if len(iterations) == 1:  # as nearly always
                memory.append((iterations[0], computations))
                return
            for iteration in iterations[-_KEPT:]:
                memory.append((iteration, computations.of_iteration(iteration)))

    def finish(self, summary: job_pb2.IterationSummary) -> None:
        """Record that an iteration of a pipeline is complete."""
        times_s = self._times_s[summary.pipeline]
        times_s[summary.iteration] = summary.iteration_time_s
        while len(times_s) > 2 * _KEPT:
            del times_s[next(iter(times_s))]

    def end(self) -> None:
        """Forget all but each pipeline's latest complete iteration, because the job has ended."""
        for pipeline, stages in self._stages.items():
            latest = self.latest(pipeline)
            for memory in stages:
                kept = [each for each in memory if latest is not None and each[0] == latest.iteration]
                memory.clear()
                memory.extend(kept[-1:])

    def keep_baseline(self) -> None:
        """Keep an iteration of the stock baseline just measured, of the first pipeline that has one.

        One pipeline is enough: at stock all pipelines compute in the same way.
        """
        whole = ((pipeline, self.latest(pipeline)) for pipeline in self._stages)
        self.baseline = next(
            ((pipeline, found) for pipeline, found in whole if found is not None and _is_at_stock(found)),
            None,
        )

    def mean_clock_mhz(self, pipeline: int, stage: int) -> float | None:
        """Return the time-weighted mean clock of a stage's latest iteration; 0 at stock, None if unknown."""
        memory = self._stages[pipeline][stage]
        if not memory:
            return None
        durations_s = np.asarray(memory[-1][1].duration_s)
        time_s = float(durations_s.sum())
        return float(durations_s @ np.asarray(memory[-1][1].clock_mhz)) / time_s if time_s else None

    def latest(self, pipeline: int) -> Timeline | None:
        """Return the most recently reported complete iteration, if there is one."""
        stages = [dict(memory) for memory in self._stages[pipeline]]
        for iteration, time_s in reversed(self._times_s[pipeline].items()):
            if all(iteration in stage for stage in stages):
                return Timeline(iteration, time_s, tuple(stage[iteration] for stage in stages))
        return None


def _is_at_stock(timeline: Timeline) -> bool:
    return not any(any(columns.clock_mhz) for columns in timeline.stages)
