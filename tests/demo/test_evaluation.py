"""A trainer's unmarked work between its iterations runs at stock, and plans cost it no time."""

import asyncio
import json
import threading
import time
from pathlib import Path

import pytest

from perseus.agent.link.computation import Kind
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.sidecar.shell import serving
from perseus.configuration import load
from perseus.demo.trainer import STOP_FILE, RankTask, evaluations_file, train
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import computation_pb2, frontier_pb2, rank_pb2
from tests.agent.coordinator_stub import CoordinatorStub, Inbox, until

MICROBATCHES = 2
INTERVAL = 8
EVALUATION_S = 2.0
PLANNED_MHZ = A100_SXM.clocks_mhz[2 * len(A100_SXM.clocks_mhz) // 3]
ORDER = [
    computation_pb2.Computation(kind=kind, microbatch=microbatch)
    for microbatch in range(MICROBATCHES)
    for kind in (computation_pb2.COMPUTATION_KIND_FORWARD, computation_pb2.COMPUTATION_KIND_BACKWARD)
]


def task(folder: Path) -> RankTask:
    return RankTask(
        run_dir=str(folder),
        agent_socket=str(folder / "agent.sock"),
        gpu_file=str(folder / "gpus" / "0"),
        job_id="job",
        pipeline=0,
        pipeline_count=1,
        stage=0,
        stage_count=1,
        microbatch_count=MICROBATCHES,
        order=[(kind, each) for each in range(MICROBATCHES) for kind in (Kind.FORWARD, Kind.BACKWARD)],
        forward=(0.008, 0.002, 0.85),
        backward=(0.016, 0.004, 0.95),
        optimizer_s=0.005,
        evaluation_s=EVALUATION_S,
        evaluation_interval=INTERVAL,
    )


def plan(start_iteration: int) -> wire.ConnectResponse:
    stage = frontier_pb2.StagePlan(
        computations=[
            frontier_pb2.PlannedComputation(kind=each.kind, microbatch=each.microbatch, clock_mhz=PLANNED_MHZ)
            for each in ORDER
        ]
    )
    return wire.ConnectResponse(
        plan_offer=wire.PlanOffer(
            job_id="job",
            rank=rank_pb2.RankCoordinates(),
            epoch="e",
            version=1,
            start_iteration=start_iteration,
            lease_s=30.0,
            stage_plan=stage,
        )
    )


@pytest.mark.slow("evaluations of two seconds: a clock that is kept takes longer than a busy machine")
@pytest.mark.timeout(120)
async def test_an_evaluation_between_iterations_runs_at_stock_and_costs_no_time(tmp_path: Path) -> None:
    (tmp_path / "gpus").mkdir()
    gpu = EmulatedGpu.create(tmp_path / "gpus" / "0", A100_SXM, "GPU-0")
    coordinator = CoordinatorStub(Inbox(lease_s=30.0), ORDER)  # type: ignore[abstract]
    await coordinator.start(0)
    flags = {
        "coordinator": f"127.0.0.1:{coordinator.port}",
        "socket": tmp_path / "agent.sock",
        "gpu_backend": "emulated",
        "emulated_gpus": tmp_path / "gpus",
        "restore_folder": tmp_path / "restore",
    }
    settings = load(AgentSettings, None, flags)
    async with serving(settings):
        trainer = threading.Thread(target=train, args=[task(tmp_path)], daemon=True)
        trainer.start()

        def gaps() -> list[tuple[int, float, float, float]]:
            columns = [each.telemetry.iterations for each in coordinator.inbox.all("telemetry")]
            return [
                row
                for each in columns
                for row in zip(
                    each.iteration, each.gap_time_s, each.gap_energy_j, each.gap_slowed_time_s, strict=True
                )
            ]

        def is_known(iteration: int) -> bool:
            return any(row[0] == iteration for row in gaps())

        await until(lambda: len(gaps()) > 0, "telemetry", 30)
        coordinator.send(plan(start_iteration=max(row[0] for row in gaps()) + 4))
        # The GPU is below stock under its plan, and at stock during an evaluation.
        await until(lambda: gpu.sm_clock_mhz() == PLANNED_MHZ, "the planned clock", 30)
        first = max(row[0] for row in gaps()) // INTERVAL * INTERVAL + 2 * INTERVAL
        await until(lambda: is_known(first - 1), "the iteration before the evaluation", 60)
        await until(lambda: gpu.sm_clock_mhz() == A100_SXM.highest_clock_mhz, "stock while it evaluates", 60)
        await until(lambda: is_known(first + INTERVAL + 1), "another evaluation", 60)
        (tmp_path / STOP_FILE).touch()
        begun_s = time.monotonic()
        while trainer.is_alive():
            assert time.monotonic() < begun_s + 30
            await asyncio.sleep(0.01)
    await coordinator.stop()
    gpu.close()
    evaluations = dict(json.loads(evaluations_file(tmp_path, 0, 0).read_text()))
    assert {first - 1, first + INTERVAL - 1} <= evaluations.keys()
    # A busy host adds some time, but far less than a low clock would.
    stretch = A100_SXM.highest_clock_mhz / PLANNED_MHZ
    at_planned_clock_s = EVALUATION_S * (0.8 * stretch + 0.2)
    assert at_planned_clock_s > 1.6 * EVALUATION_S
    tolerance_s = 0.25 * (at_planned_clock_s - EVALUATION_S)
    assert max(evaluations.values()) < EVALUATION_S + tolerance_s, evaluations
    for iteration, gap_s, gap_j, slowed_s in gaps():
        if iteration in (first, first + INTERVAL):
            assert gap_s == pytest.approx(evaluations[iteration - 1], abs=0.2)
            assert gap_j == pytest.approx(A100_SXM.power_w(0.85, A100_SXM.highest_clock_mhz) * gap_s, rel=0.1)
            assert slowed_s < tolerance_s
