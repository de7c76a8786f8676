"""The published operation traces of real jobs as arrays, with their straggler scaled down on demand."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from perseus.service.job.stragglers.spans import SpanGraph
from perseus.solver import Computation, Kind, Schedule, one_forward_one_backward
from tests.published_data import PUBLISHED_DATA

FOLDER = PUBLISHED_DATA / "straggler"

SLOWED = (0, 0)
"""(pipeline, stage) of AR's slowed worker, according to the analysis in its release
(`blocking_decompose_by_…`).
"""

Array = NDArray[np.float64]
_KINDS = {"forward-compute": Kind.FORWARD, "backward-compute": Kind.BACKWARD}


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The computations of the ranks; a trace has one tensor-parallel rank of each stage.

    `durations_s` has the shape (steps, pipelines, computations), with the computations stage by stage in the
    order of the schedule.
    """

    schedule: Schedule
    durations_s: Array

    @property
    def pipeline_count(self) -> int:
        return int(self.durations_s.shape[1])

    @property
    def step_count(self) -> int:
        return len(self.durations_s)

    @property
    def microbatch_count(self) -> int:
        return len(self.schedule.orders[0]) // 2

    def spans_s(self) -> Array:
        """Compute spans, shape (steps, pipelines)."""
        graph = SpanGraph(self.schedule)
        columns = [graph.columns[computation] for computation in self.schedule.computations]
        laid_out_s = np.empty_like(self.durations_s)
        laid_out_s[:, :, columns] = self.durations_s
        return np.array([graph.spans_s(step_s.T) for step_s in laid_out_s])

    def only(self, pipelines: Sequence[int]) -> "Trace":
        return Trace(self.schedule, self.durations_s[:, list(pipelines)])

    def milder(self, factor: float, *, is_uniform: bool) -> "Trace":
        """Scale AR's straggler down, until its mean span is `factor` times that of its peers.

        Every duration of the slowed worker is divided by the same number; unless `is_uniform`, only its
        excess over its peers' median for the same computation is.
        """
        pipeline, stage = SLOWED
        at_stage = np.array([computation.stage == stage for computation in self.schedule.computations])
        own_s = self.durations_s[:, pipeline, at_stage]
        peers_s = np.delete(self.durations_s, pipeline, axis=1)[:, :, at_stage]
        floor_s = 0.0 if is_uniform else np.median(peers_s, axis=1)
        peers_mean_s = np.delete(self.spans_s().mean(axis=0), pipeline).mean()
        minimum, maximum = 0.0, 1.0
        for _ in range(20):
            share = (minimum + maximum) / 2
            durations_s = self.durations_s.copy()
            durations_s[:, pipeline, at_stage] = floor_s + share * (own_s - floor_s)
            scaled = Trace(self.schedule, durations_s)
            if scaled.only([pipeline]).spans_s().mean() > factor * peers_mean_s:
                maximum = share
            else:
                minimum = share
        return scaled


@cache
def load(name: str) -> Trace:
    """Read a trace; skip the test if it is not available."""
    parquet = pytest.importorskip("pyarrow.parquet")
    path = FOLDER / f"trace-{name}.parquet"
    if not path.exists():
        pytest.skip(f"the published traces are not at {FOLDER}")
    table = parquet.read_table(path)
    kinds = np.array([_KINDS.get(kind) for kind in table["optype"].to_pylist()])
    is_computation = np.array([kind is not None for kind in kinds])

    def column(name: str) -> Array:
        found: Array = table[name].to_numpy()[is_computation]
        return found

    steps = np.unique(column("step"))
    pipelines, stages = int(column("dp_rank").max()) + 1, int(column("stage").max()) + 1
    schedule = one_forward_one_backward(stages, int(column("mb_id").max()) + 1)
    place = {computation: index for index, computation in enumerate(schedule.computations)}
    rows = (
        np.searchsorted(steps, column("step")),
        column("dp_rank").astype(np.int64),
        [
            place[Computation(int(stage), kind, int(microbatch))]
            for stage, kind, microbatch in zip(
                column("stage"), kinds[is_computation], column("mb_id"), strict=True
            )
        ],
    )
    durations_s = np.full((len(steps), pipelines, len(place)), np.nan)
    durations_s[rows] = column("duration")
    assert not np.isnan(durations_s).any(), "every computation of every step is there"
    return Trace(schedule, durations_s)
