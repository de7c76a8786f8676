"""Real jobs' operation traces as the telemetry of all ranks: which pipelines are named, and when.

A trace has only one clock, so there is no profile and no plan: the job stays at stock, where pipelines are
compared with their peers. Steps are renumbered without gaps. As at the start of any job, the first one does
not count.
"""

import numpy as np
import pytest

from perseus.service.domain.inputs import TelemetryArrived
from perseus.service.domain.model import JobState
from perseus.service.job.rules import Rules
from perseus.service.job.stragglers.detector import StragglerDetector
from perseus.service.job.stragglers.spans import IterationSpans
from perseus.v1 import event_pb2
from tests.service.job.stragglers import straggler_traces
from tests.service.job.stragglers.straggler_traces import Trace
from tests.service.service_fakes import Cluster, batch, make_spec

FACTORS = [1.10, 1.05, 1.03]
STEPS = {1.10: 6, 1.05: 8, 1.03: 9}
"""Steps until detection, from the first on: the four pipelines' noise has to be learned meanwhile."""


def replay(trace: Trace, step_count: int | None = None) -> list[event_pb2.JobEvent]:
    """Let all ranks of a job at stock report the trace's values; return all findings, in order."""
    spec = make_spec(
        pipelines=trace.pipeline_count, stages=trace.schedule.stage_count, microbatches=trace.microbatch_count
    )
    cluster = Cluster(spec, Rules(baseline_iterations=trace.step_count + 1))
    cluster.join_all()
    for iteration in range(step_count or trace.step_count):
        for place, rank in cluster.ranks.items():
            first = place.stage * len(rank.order)
            durations_s = trace.durations_s[iteration, place.pipeline, first : first + len(rank.order)]
            rows = batch(iteration + 1, [iteration], 0, float(durations_s.sum()), order=rank.order)
            computations = rows.computations._replace(duration_s=durations_s.tolist())
            reported = rows._replace(computations=computations)
            cluster.handle(TelemetryArrived(place, rank.instance_id, reported))
    cluster.expect(JobState.BASELINE)
    return [event for event in cluster.events() if event.HasField("straggler_finding")]


def test_the_slowed_pipeline_is_named_within_five_steps() -> None:
    found = replay(straggler_traces.load("AR"))
    pipeline, stage = straggler_traces.SLOWED
    first = found[0].straggler_finding
    assert (first.pipeline, first.slowest_stage) == (pipeline, stage)
    assert first.iteration < 5
    assert first.slowdown_factor == pytest.approx(2.1, abs=0.05)
    assert {event.straggler_finding.pipeline for event in found} == {pipeline}, "and no other one, ever"
    assert {event.type for event in found} == {event_pb2.JOB_EVENT_TYPE_STRAGGLER_DETECTED}, "and it stays"


@pytest.mark.parametrize("factor", FACTORS)
def test_a_milder_one_is_named_soon(factor: float) -> None:
    trace = straggler_traces.load("AR").milder(factor, is_uniform=False)
    found = replay(trace, step_count=STEPS[factor])
    (finding,) = (event.straggler_finding for event in found)
    assert finding.pipeline == straggler_traces.SLOWED[0]
    assert finding.slowdown_factor == pytest.approx(factor, abs=0.015)
    assert 1 < finding.waited_factor < factor


def test_imbalance_between_stages_is_no_straggler() -> None:
    assert replay(straggler_traces.load("ST")) == []


def test_healthy_pipelines_alone_have_no_straggler() -> None:
    trace = straggler_traces.load("AR")
    healthy = [pipeline for pipeline in range(trace.pipeline_count) if pipeline != straggler_traces.SLOWED[0]]
    assert replay(trace.only(healthy)) == []


@pytest.mark.parametrize("is_uniform", [True, False])
@pytest.mark.parametrize("factor", FACTORS)
def test_findings_do_not_depend_on_where_the_trace_begins(factor: float, is_uniform: bool) -> None:
    """The detector by itself, started at every step of the trace in turn."""
    spans_s = straggler_traces.load("AR").milder(factor, is_uniform=is_uniform).spans_s()
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
        assert set(found) == {straggler_traces.SLOWED[0]}, f"begun at step {begin}"
