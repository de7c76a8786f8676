"""The cost of set latency in real processes, through a stand-in for NVML and the unmodified agent.

Four trainers on emulated GPUs, one agent, and a coordinator that only offers one plan. Every figure is
relative to the same plan on GPUs whose clocks change within a millisecond of the call.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import grpc

from benchmarks.clock_latency import STAGE_WEIGHTS, job, pipeline, stage_clocks
from benchmarks.harness import Column, Table, main
from perseus import solver
from perseus.demo import nvml_stub
from perseus.demo.cluster import Cluster
from perseus.demo.security import Security
from perseus.demo.workload import Workload
from perseus.emulation.physics import GpuModel
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import agent_service_pb2_grpc, clock_statistics_pb2, computation_pb2, frontier_pb2

_MICROBATCHES = 8
_AT_ONCE_S = 0.001
_FIRST_ITERATION = 3
_SETTLING_ITERATIONS = 5
"""Iterations left out at the start of a plan, in which nothing can be predicted yet."""
_ITERATIONS = 25
_TIMEOUT_S = 300.0
_KINDS = {
    solver.Kind.FORWARD: computation_pb2.COMPUTATION_KIND_FORWARD,
    solver.Kind.BACKWARD: computation_pb2.COMPUTATION_KIND_BACKWARD,
}


@dataclass(frozen=True, slots=True)
class _Outcome:
    iteration_time_s: float
    on_clock_share: float
    late_raise_share: float


class _PlanOfferer(agent_service_pb2_grpc.AgentServiceServicer):
    """Accepts every rank, offers it its share of one plan, and collects telemetry for long enough."""

    def __init__(self, plan: solver.Plan) -> None:
        self.has_enough = asyncio.Event()
        self._plan = plan
        self._times_s: list[float] = []
        self._settled: dict[int, clock_statistics_pb2.ClockStatistics] = {}
        self._latest: dict[int, clock_statistics_pb2.ClockStatistics] = {}

    async def Connect(  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[wire.ConnectRequest],
        context: grpc.aio.ServicerContext[wire.ConnectRequest, wire.ConnectResponse],
    ) -> AsyncIterator[wire.ConnectResponse]:
        stage_of: dict[str, int] = {}
        async for request in request_iterator:
            match request.WhichOneof("message"):
                case "hello":
                    yield wire.ConnectResponse(welcome=wire.Welcome(epoch="e", lease_s=_TIMEOUT_S))
                case "rank_joined":
                    joined = request.rank_joined
                    stage_of[joined.gpu.uuid] = joined.rank.stage
                    for answer in self._welcome_rank(joined):
                        yield answer
                case "telemetry":
                    self._note(request.telemetry)
                    ack = wire.TelemetryAck(sequence=request.telemetry.sequence)
                    yield wire.ConnectResponse(telemetry_ack=ack)
                case "heartbeat":
                    yield wire.ConnectResponse(heartbeat=wire.Heartbeat())

    def outcome(self) -> _Outcome:
        """Return the telemetry after the agents had settled."""

        def spent(field: str) -> float:
            differences: list[float] = [
                getattr(self._latest[stage], field) - getattr(before, field)
                for stage, before in self._settled.items()
            ]
            return sum(differences)

        return _Outcome(
            iteration_time_s=median(self._times_s),
            on_clock_share=spent("on_clock_time_s") / spent("computation_time_s"),
            late_raise_share=spent("late_raise_count") / spent("computation_count"),
        )

    def _welcome_rank(self, joined: wire.RankJoined) -> list[wire.ConnectResponse]:
        planned = self._plan.stages[joined.rank.stage]
        identities = [(_KINDS[p.computation.kind], p.computation.microbatch) for p in planned]
        order = [computation_pb2.Computation(kind=kind, microbatch=m) for kind, m in identities]
        clocks = [
            frontier_pb2.PlannedComputation(kind=kind, microbatch=m, clock_mhz=p.clock_mhz)
            for (kind, m), p in zip(identities, planned, strict=True)
        ]
        return [
            wire.ConnectResponse(
                rank_accepted=wire.RankAccepted(
                    job_id=joined.job_id,
                    rank=joined.rank,
                    order=computation_pb2.StageOrder(computations=order),
                )
            ),
            wire.ConnectResponse(
                plan_offer=wire.PlanOffer(
                    job_id=joined.job_id,
                    rank=joined.rank,
                    epoch="e",
                    version=1,
                    start_iteration=_FIRST_ITERATION,
                    lease_s=_TIMEOUT_S,
                    stage_plan=frontier_pb2.StagePlan(computations=clocks),
                )
            ),
        ]

    def _note(self, batch: wire.TelemetryBatch) -> None:
        columns, stage = batch.iterations, batch.rank.stage
        if 1 not in columns.plan_version:
            return
        last = max(columns.iteration)
        if last < _FIRST_ITERATION + _SETTLING_ITERATIONS:
            return
        self._settled.setdefault(stage, batch.clocks)
        self._latest[stage] = batch.clocks
        if stage == 0:
            self._times_s += [
                duration_s
                for iteration, duration_s in zip(columns.iteration, columns.duration_s, strict=True)
                if iteration >= _FIRST_ITERATION + _SETTLING_ITERATIONS
            ]
        if last >= _FIRST_ITERATION + _SETTLING_ITERATIONS + _ITERATIONS:
            self.has_enough.set()


async def _train(workload: Workload, plan: solver.Plan, latency_s: float, library: Path) -> _Outcome:
    model: GpuModel = replace(workload.gpu, set_latency_s=latency_s)
    offerer = _PlanOfferer(plan)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(offerer, server)
    with tempfile.TemporaryDirectory(prefix="perseus-") as folder:
        run_dir = Path(folder)
        cluster = Cluster(replace(workload, gpu=model), run_dir, run_dir / "logs", nvml_library=library)
        port = server.add_secure_port("127.0.0.1:0", _credentials(cluster.security))
        await server.start()
        with cluster:
            await asyncio.to_thread(cluster.start_agents, f"127.0.0.1:{port}")
            cluster.start_trainers()
            async with asyncio.timeout(_TIMEOUT_S):
                await offerer.has_enough.wait()
            await asyncio.to_thread(cluster.stop_training)
    await server.stop(None)
    return offerer.outcome()


def _credentials(security: Security) -> grpc.ServerCredentials:
    pair = (security.coordinator_key.read_bytes(), security.coordinator_certificate.read_bytes())
    return grpc.ssl_server_credentials([pair])


def _workload(forward_s: float) -> Workload:
    heaviest = job(forward_s, microbatch_count=_MICROBATCHES)
    forward, backward = heaviest.works[-1].values()
    return Workload(
        job_id="latency",
        pipeline_count=1,
        stage_weights=STAGE_WEIGHTS,
        microbatch_count=_MICROBATCHES,
        forward=forward,
        backward=backward,
        optimizer_s=0.015,
        gpu=heaviest.model,
    )


def run() -> Sequence[Table]:
    """Train with every plan, without and with latency."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="perseus-") as folder:
        library = nvml_stub.build(Path(folder))
        for forward_s in (0.020, 0.050):
            workload = _workload(forward_s)
            problem = pipeline(job(forward_s, microbatch_count=_MICROBATCHES))
            plan = solver.plan_at(problem, solver.fastest_clock_plan(problem).iteration_time_s)
            at_once: dict[object, _Outcome] = {}
            for latency_s in (0.010, 0.020):
                for name, chosen in (("plan", plan), ("dwell", solver.dwell(problem, plan, latency_s))):
                    clocks_mhz = str(stage_clocks(chosen))
                    if clocks_mhz not in at_once:
                        at_once[clocks_mhz] = asyncio.run(_train(workload, chosen, _AT_ONCE_S, library))
                    late = asyncio.run(_train(workload, chosen, latency_s, library))
                    rows.append(
                        (
                            1e3 * forward_s,
                            1e3 * latency_s,
                            name,
                            100 * (late.iteration_time_s / at_once[clocks_mhz].iteration_time_s - 1),
                            100 * late.on_clock_share,
                            100 * late.late_raise_share,
                        )
                    )
                    print(*rows[-1])
    columns = (
        Column("forward, ms", ".0f"),
        Column("latency, ms", ".0f"),
        Column("plan"),
        Column("slowdown, %", "+.2f"),
        Column("time on clock, %", ".1f"),
        Column("late raises, % of computations", ".1f"),
    )
    note = (
        f"Medians over {_ITERATIONS} iterations. A backward takes twice a forward; four stages, 1F1B, "
        f"{_MICROBATCHES} microbatches, plans at T_min."
    )
    return [Table("The agent on a stand-in for NVML, in real time", columns, tuple(rows), note)]


if __name__ == "__main__":
    main("nvml_latency", run)
