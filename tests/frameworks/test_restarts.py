"""A training that restarts repeatedly, each time with a change."""

import asyncio
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import grpc.aio
import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed; `make test-frameworks` has it", allow_module_level=True)

from perseus.demo.processes import Process
from perseus.demo.trainer import STOP_FILE
from perseus.v1 import job_pb2, job_service_pb2, job_service_pb2_grpc, rank_pb2
from tests.frameworks.cases import Case, check_losses, losses_in
from tests.frameworks.real_run import PLAN_TIMEOUT_S, STEP_TIMEOUT_S, services, until_at_stock
from tests.frameworks.trainers import TrainerTask

pytestmark = [
    pytest.mark.slow("trains for real, with the framework"),
    pytest.mark.nightly("restarts of a framework that CI trains once"),
]

CASE = Case("torch", "1F1B", (3, 3), forward_s=0.008, backward_s=0.016)
"""Times of each of the model's six layers, which `stage_weights` splits over the stages."""
NODES = replace(CASE, stage_weights=(1.0,) * 4, pipeline_count=2).nodes


@dataclass(frozen=True, slots=True)
class Launch:
    """`short_iterations`: it ends after that many; None: under its plan."""

    case: Case = CASE
    short_iterations: int | None = None
    is_killed: bool = False


LAUNCHES = (
    Launch(),
    Launch(replace(CASE, microbatch_count=6), is_killed=True),
    Launch(replace(CASE, microbatch_count=6, stage_weights=(1, 3, 2)), short_iterations=3),
    Launch(replace(CASE, microbatch_count=5, stage_weights=(1, 2, 2, 1)), 20, is_killed=True),
    Launch(replace(CASE, stage_weights=(1, 2, 2, 1), pipeline_count=2), is_killed=True),
    Launch(replace(CASE, stage_weights=(2, 4))),
)
"""As torch's 1F1B requires, there are no fewer microbatches than stages."""


@pytest.mark.timeout(3600)
async def test_every_launch_with_a_change_is_planned_and_computes_as_before(tmp_path: Path) -> None:
    async with services(NODES, tmp_path / "logs") as (cluster, _, channel):
        for number, launch in enumerate(LAUNCHES):
            case, folder = launch.case, tmp_path / f"launch-{number}"
            task = case.under(cluster, folder, folder, layers=case.stage_weights)
            trainers = Process(tmp_path / f"launch-{number}.log", *case.command(task))
            trainers.launch()
            try:
                await until_enough(launch, task, channel)
                if not launch.is_killed:
                    (folder / STOP_FILE).touch()
                    assert await asyncio.to_thread(trainers.wait, STEP_TIMEOUT_S) == 0
            finally:
                await asyncio.to_thread(trainers.kill)
            await until_at_stock(NODES, cluster)
            await asyncio.to_thread(check_losses, case, task)


async def until_enough(launch: Launch, task: TrainerTask, channel: grpc.aio.Channel) -> None:
    """Wait for a launch's plan on all its ranks, or for its number of iterations."""
    deadline_s = time.monotonic() + PLAN_TIMEOUT_S
    while not (
        await is_planned(task, channel)
        if launch.short_iterations is None
        else any(len(losses) >= launch.short_iterations for losses in losses_in(Path(task.folder)))
    ):
        assert time.monotonic() < deadline_s, launch
        await asyncio.sleep(0.2)


async def is_planned(task: TrainerTask, channel: grpc.aio.Channel) -> bool:
    """Whether all ranks of this layout have its plan."""
    jobs = job_service_pb2_grpc.JobServiceStub(channel)
    try:
        request = job_service_pb2.GetJobRequest(job_id=task.job_id)
        job = (await jobs.GetJob(request, timeout=STEP_TIMEOUT_S)).job
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
        return False
    ask = job_service_pb2.ListRanksRequest(job_id=task.job_id)
    ranks = (await jobs.ListRanks(ask, timeout=STEP_TIMEOUT_S)).ranks
    lengths = [len(stage.computations) for stage in job.spec.schedule.explicit.stages]
    return (
        job.state == job_pb2.JOB_STATE_PLANNED
        and lengths == task.stage_count * [2 * task.microbatch_count]
        and len(ranks) == task.rank_count
        and {rank.state for rank in ranks} == {rank_pb2.RANK_STATE_CONNECTED}
        and all(rank.in_force_version == rank.offered_version > 0 for rank in ranks)
    )
