"""Real jobs' operation traces through the real telemetry path: which pipelines are named, and when.

The ranks' batches are sent over a real stream to a running coordinator, and the findings are read from
WatchJob. A trace has only one clock, so there is no profile and no plan: the job stays at stock, where
pipelines are compared with their peers. Steps are renumbered without gaps. As at the start of any job, the
first one does not count.
"""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from perseus.service.job.stragglers.detector import StragglerDetector
from perseus.service.job.stragglers.spans import IterationSpans
from perseus.solver import Kind
from perseus.v1 import agent_service_pb2, computation_pb2, event_pb2, job_pb2, job_service_pb2, rank_pb2
from perseus.v1.agent_service_pb2 import ConnectRequest
from tests.service.grpc_fakes import TIMEOUT_S, Client, connected, make_settings, spec_message
from tests.service.job.stragglers import straggler_traces
from tests.service.job.stragglers.straggler_traces import Trace

FACTORS = [1.10, 1.05, 1.03]
STEPS = {1.10: 6, 1.05: 8, 1.03: 9}
"""Steps until detection, from the first on: the four pipelines' noise has to be learned meanwhile."""
_KINDS = {
    Kind.FORWARD: computation_pb2.COMPUTATION_KIND_FORWARD,
    Kind.BACKWARD: computation_pb2.COMPUTATION_KIND_BACKWARD,
}


class TraceAgent:
    """Serves all ranks of a job at stock, and reports the trace's values."""

    def __init__(self, client: Client, trace: Trace) -> None:
        self.trace = trace
        self.sequence = 0
        self.acknowledged = 0
        self.call: Any = client.agents.Connect()

    async def join(self) -> None:
        await self._send(
            hello=agent_service_pb2.Hello(instance_id="agent", agent_version="0", hostname="host")
        )
        for pipeline in range(self.trace.pipeline_count):
            for stage in range(self.trace.schedule.stage_count):
                gpu = agent_service_pb2.Gpu(
                    uuid=f"GPU-{pipeline}-{stage}", model="GPU", supported_clocks_mhz=[1410, 1200]
                )
                rank = rank_pb2.RankCoordinates(pipeline=pipeline, stage=stage)
                joined = agent_service_pb2.RankJoined(job_id="job", rank=rank, gpu=gpu, iteration=-1)
                await self._send(rank_joined=joined)

    async def report(self, iteration: int) -> None:
        """Report a step of all ranks, and wait until it is stored."""
        trace = self.trace
        for pipeline in range(trace.pipeline_count):
            begins_s, durations_s = (
                trace.begins_s[iteration, pipeline],
                trace.durations_s[iteration, pipeline],
            )
            first = 0
            for stage, order in enumerate(trace.schedule.orders):
                own = slice(first, first := first + len(order))
                self.sequence += 1
                begin_s = begins_s[own].min()
                batch = agent_service_pb2.TelemetryBatch(
                    sequence=self.sequence,
                    job_id="job",
                    rank=rank_pb2.RankCoordinates(pipeline=pipeline, stage=stage),
                    iterations=agent_service_pb2.IterationColumns(
                        iteration=[iteration],
                        plan_version=[0],
                        duration_s=[(begins_s + durations_s).max() - begin_s],
                        energy_j=[0.0],
                        is_regular=[True],
                        clock_event_reasons=[0],
                    ),
                    computations=agent_service_pb2.ComputationColumns(
                        iteration=[iteration] * len(order),
                        kind=[_KINDS[each.kind] for each in order],
                        microbatch=[each.microbatch for each in order],
                        chunk=[0] * len(order),
                        begin_s=begins_s[own] - begin_s,
                        duration_s=durations_s[own],
                        clock_mhz=[0] * len(order),
                    ),
                )
                await self._send(telemetry=batch)
        async with asyncio.timeout(TIMEOUT_S):
            while self.acknowledged < self.sequence:
                message = await self.call.read()
                assert message is not grpc.aio.EOF
                if message.HasField("telemetry_ack"):
                    self.acknowledged = message.telemetry_ack.sequence

    async def _send(self, **message: Any) -> None:
        await self.call.write(ConnectRequest(**message))


async def replay(directory: Path, trace: Trace, step_count: int | None = None) -> list[event_pb2.JobEvent]:
    """Return all findings, in order."""
    settings = make_settings(directory, baseline_iterations=len(trace.steps) + 1)
    async with connected(settings) as client:
        spec = spec_message(
            pipelines=trace.pipeline_count,
            stages=trace.schedule.stage_count,
            microbatches=trace.microbatch_count,
        )
        await client.jobs.RegisterJob(
            job_service_pb2.RegisterJobRequest(spec=spec, request_id="r"), timeout=TIMEOUT_S
        )
        agent = TraceAgent(client, trace)
        await agent.join()
        for iteration in range(step_count or len(trace.steps)):
            await agent.report(iteration)
        assert (await client.job()).state == job_pb2.JOB_STATE_BASELINE
        await client.jobs.FinishJob(job_service_pb2.FinishJobRequest(job_id="job"), timeout=TIMEOUT_S)
        watched = client.jobs.WatchJob(job_service_pb2.WatchJobRequest(job_id="job"), timeout=TIMEOUT_S)
        events = [update.event async for update in watched if update.HasField("event")]
        agent.call.cancel()
    return [event for event in events if event.HasField("straggler_finding")]


async def test_the_slowed_pipeline_is_named_within_five_steps(tmp_path: Path) -> None:
    found = await replay(tmp_path, straggler_traces.load("AR"))
    pipeline, stage = straggler_traces.SLOWED
    first = found[0].straggler_finding
    assert (first.pipeline, first.slowest_stage) == (pipeline, stage)
    assert first.iteration < 5
    assert first.slowdown_factor == pytest.approx(2.1, abs=0.05)
    assert {event.straggler_finding.pipeline for event in found} == {pipeline}, "and no other one, ever"
    assert {event.type for event in found} == {event_pb2.JOB_EVENT_TYPE_STRAGGLER_DETECTED}, "and it stays"


@pytest.mark.parametrize("factor", FACTORS)
async def test_a_milder_one_is_named_soon(tmp_path: Path, factor: float) -> None:
    trace = straggler_traces.load("AR").milder(factor, is_uniform=False)
    found = await replay(tmp_path, trace, step_count=STEPS[factor])
    (finding,) = (event.straggler_finding for event in found)
    assert finding.pipeline == straggler_traces.SLOWED[0]
    assert finding.slowdown_factor == pytest.approx(factor, abs=0.015)
    assert 1 < finding.waited_factor < factor


async def test_imbalance_between_stages_is_no_straggler(tmp_path: Path) -> None:
    assert await replay(tmp_path, straggler_traces.load("ST")) == []


async def test_healthy_pipelines_alone_have_no_straggler(tmp_path: Path) -> None:
    trace = straggler_traces.load("AR")
    healthy = [pipeline for pipeline in range(trace.pipeline_count) if pipeline != straggler_traces.SLOWED[0]]
    assert await replay(tmp_path, trace.only(healthy)) == []


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
