"""Published operation traces of real jobs as the telemetry of all ranks: which pipelines are named, and when.

A trace has only one clock, so there is no profile and no plan: the job stays at stock, where pipelines are
compared with their peers. Steps are renumbered without gaps. As at the start of any job, the first one does
not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from perseus.service.domain.specification import Parallelism
from perseus.service.job.stragglers.detector import Finding, StragglerDetector
from perseus.service.job.stragglers.spans import IterationSpans, SpanCollector, SpanGraph
from perseus.solver import Computation, Kind, Schedule, one_forward_one_backward
from tests.published_data import PUBLISHED_DATA
from tests.service.service_fakes import batch

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


FACTORS = [1.10, 1.05, 1.03]
STEPS = {1.10: 6, 1.05: 8, 1.03: 9}
"""Steps until detection, from the first on: the four pipelines' noise has to be learned meanwhile."""


def findings(trace: Trace) -> list[Finding]:
    """Let all ranks of a job at stock report the trace's values; return all findings, in order."""
    shape = Parallelism(trace.pipeline_count, trace.schedule.stage_count, 1)
    collector, detector = SpanCollector(trace.schedule, shape), StragglerDetector(trace.pipeline_count)
    judged: list[Finding] = []
    for iteration, durations_s in enumerate(trace.durations_s):
        for place in shape.all_coordinates():
            order = trace.schedule.orders[place.stage]
            rows = batch(1, [iteration], 0, 1.0, order=order)
            own_s = durations_s[place.pipeline, place.stage * len(order) :][: len(order)].tolist()
            collector.add(place, rows._replace(computations=rows.computations._replace(duration_s=own_s)))
        spans = collector.take(iteration, (0,) * trace.pipeline_count)
        assert spans is not None
        judged += detector.judge(spans)
    return judged


def test_the_slowed_pipeline_is_named_within_five_steps() -> None:
    first, *others = findings(load("AR"))
    assert (first.pipeline, first.slowest_stage) == SLOWED
    assert first.iteration < 5
    assert first.slowdown_factor == pytest.approx(2.1, abs=0.05)
    assert {each.pipeline for each in [first, *others]} == {SLOWED[0]}, "and no other one, ever"
    assert all(each.is_straggler for each in [first, *others]), "and it stays"


@pytest.mark.parametrize("factor", FACTORS)
def test_a_milder_one_is_named_soon_with_its_factor(factor: float) -> None:
    trace = load("AR").milder(factor, is_uniform=False)
    (finding,) = findings(Trace(trace.schedule, trace.durations_s[: STEPS[factor]]))
    assert finding.pipeline == SLOWED[0]
    assert finding.slowdown_factor == pytest.approx(factor, abs=0.015)
    assert 1 < finding.waited_factor < factor


def test_imbalance_between_stages_is_no_straggler() -> None:
    assert findings(load("ST")) == []


def test_healthy_pipelines_alone_have_no_straggler() -> None:
    trace = load("AR")
    healthy = [pipeline for pipeline in range(trace.pipeline_count) if pipeline != SLOWED[0]]
    assert findings(trace.only(healthy)) == []


@pytest.mark.parametrize("is_uniform", [True, False])
@pytest.mark.parametrize("factor", FACTORS)
def test_findings_do_not_depend_on_where_the_trace_begins(factor: float, is_uniform: bool) -> None:
    """The detector by itself, started at every step of the trace in turn."""
    spans_s = load("AR").milder(factor, is_uniform=is_uniform).spans_s()
    zeros = np.zeros(spans_s.shape[1], np.int64)
    for begin in range(len(spans_s) - STEPS[factor] + 1):
        detector = StragglerDetector(spans_s.shape[1])
        found = [
            finding.pipeline
            for step_s in spans_s[begin : begin + STEPS[factor]]
            for finding in detector.judge(
                IterationSpans(0, zeros, step_s, np.full(len(step_s), np.nan), zeros, step_s, zeros)
            )
        ]
        assert set(found) == {SLOWED[0]}, f"begun at step {begin}"
