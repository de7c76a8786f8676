"""A trainer's unmarked work between its iterations runs at stock, also under a plan."""

import asyncio
import threading
from pathlib import Path

import pytest

from perseus.agent.sidecar.shell import serving
from perseus.demo.processes import TIMEOUT_S
from perseus.demo.tasks import rank_tasks
from perseus.demo.trainer import STOP_FILE, train
from perseus.demo.workload import Workload
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM, Work
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import frontier_pb2, rank_pb2
from tests.agent.coordinator_stub import CoordinatorStub, Inbox, until
from tests.agent.sidecar.training import ORDER, settings

INTERVAL = 8
EVALUATION_S = 2.0
PLANNED_MHZ = A100_SXM.clocks_mhz[2 * len(A100_SXM.clocks_mhz) // 3]
JOB = Workload(
    job_id="job",
    pipeline_count=1,
    stage_weights=(1.0,),
    microbatch_count=1,
    forward=Work(0.016, 0.004, 0.85),
    backward=Work(0.032, 0.008, 0.95),
    optimizer_s=0.005,
    gpu=A100_SXM,
    evaluation_s=EVALUATION_S,
    evaluation_interval=INTERVAL,
)


def plan(start_iteration: int) -> wire.ConnectResponse:
    computations = [frontier_pb2.PlannedComputation(kind=each.kind, clock_mhz=PLANNED_MHZ) for each in ORDER]
    return wire.ConnectResponse(
        plan_offer=wire.PlanOffer(
            job_id="job",
            rank=rank_pb2.RankCoordinates(),
            epoch="e",
            version=1,
            start_iteration=start_iteration,
            lease_s=600.0,
            stage_plan=frontier_pb2.StagePlan(computations=computations),
        )
    )


@pytest.mark.slow("evaluations of two seconds: a clock that is kept takes longer than a busy machine")
@pytest.mark.timeout(900)
async def test_an_evaluation_between_iterations_runs_at_stock(tmp_path: Path) -> None:
    (tmp_path / "gpus").mkdir()
    gpu = EmulatedGpu.create(tmp_path / "gpus" / "0", A100_SXM, "GPU-0")
    coordinator = CoordinatorStub(Inbox(lease_s=600.0), ORDER)  # type: ignore[abstract]
    await coordinator.start(0)
    socket = tmp_path / "run" / "agent.sock"
    (task,) = rank_tasks(JOB, tmp_path, lambda _: socket, lambda *_: tmp_path / "gpus" / "0")

    def iterations() -> list[int]:
        columns = [each.telemetry.iterations for each in coordinator.inbox.all("telemetry")]
        return [number for each in columns for number in each.iteration]

    def evaluations(start: int) -> list[tuple[float, float]]:
        """Return the energy and the slowed time of the gaps with an evaluation after that iteration."""
        columns = [each.telemetry.iterations for each in coordinator.inbox.all("telemetry")]
        return [
            (energy_j, slowed_s)
            for each in columns
            for number, energy_j, slowed_s in zip(
                each.iteration, each.gap_energy_j, each.gap_slowed_time_s, strict=True
            )
            if number > start and number % INTERVAL == 0
        ]

    def is_planned() -> bool:
        return gpu.sm_clock_mhz() == PLANNED_MHZ

    async with serving(settings(tmp_path, coordinator.port)):
        trainer = threading.Thread(target=train, args=[task], daemon=True)
        trainer.start()
        await until(lambda: len(iterations()) > 0, "telemetry", TIMEOUT_S)
        start = max(iterations()) + INTERVAL
        coordinator.send(plan(start))
        await until(is_planned, "the planned clock", TIMEOUT_S)
        seen_mhz: set[int] = set()

        def have_evaluated() -> bool:
            seen_mhz.add(gpu.sm_clock_mhz())
            return len(evaluations(start)) >= 2

        await until(have_evaluated, "two evaluations", TIMEOUT_S)
        await until(is_planned, "the planned clock again", TIMEOUT_S)
        (tmp_path / STOP_FILE).touch()
        await asyncio.to_thread(trainer.join)
    await coordinator.stop()
    gpu.close()
    assert A100_SXM.highest_clock_mhz in seen_mhz
    least_j = EVALUATION_S * A100_SXM.power_w(JOB.forward.activity, A100_SXM.highest_clock_mhz) / 2
    for energy_j, slowed_s in evaluations(start):
        assert energy_j > least_j
        assert slowed_s < EVALUATION_S / 2
