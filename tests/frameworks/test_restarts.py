"""A training that restarts repeatedly, each time with a random change."""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import grpc.aio
import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed; `make test-frameworks` has it", allow_module_level=True)

from perseus.demo.cluster import Cluster
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

SPLITS = ((3, 3), (2, 4), (1, 3, 2), (2, 2, 2), (1, 2, 2, 1))
"""The model's six layers over the stages."""
SHORT_ITERATIONS = (3, 8, 20, 60)
"""At which a short launch ends: in the baseline, in profiling, or after it."""
CASE = Case("torch", "1F1B", SPLITS[0], forward_s=0.008, backward_s=0.016)
"""Times of each layer."""
NODES = replace(CASE, stage_weights=(1.0,) * 4, pipeline_count=2).nodes
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Launch:
    """`short_iterations`: it ends after that many; None: under its plan."""

    case: Case
    short_iterations: int | None
    is_killed: bool


def launches(count: int, seed: int) -> Iterator[Launch]:
    """Yield launches with random changes, the same for a seed; the first of them is long.

    As torch's 1F1B requires, there are no fewer microbatches than stages.
    """
    chance, case = random.Random(seed), CASE
    for number in range(count):
        change = chance.choice(("nothing", "microbatches", "split", "replicas")) if number else "nothing"
        match change:
            case "microbatches":
                case = replace(case, microbatch_count=chance.choice((4, 5, 6)))
            case "split":
                case = replace(case, stage_weights=chance.choice(SPLITS))
            case "replicas":
                case = replace(case, pipeline_count=3 - case.pipeline_count)
        is_short = number > 0 and chance.random() < 0.3
        yield Launch(case, chance.choice(SHORT_ITERATIONS) if is_short else None, chance.random() < 0.5)


class Job:
    """The job under its coordinator, launch by launch."""

    def __init__(self, cluster: Cluster, folder: Path, channel: grpc.aio.Channel) -> None:
        self._cluster = cluster
        self._folder = folder
        self._jobs = job_service_pb2_grpc.JobServiceStub(channel)

    async def launch(self, name: str, launch: Launch) -> None:
        """Train a launch and end it, then train as much again without Perseus to compare the losses."""
        case, folder = launch.case, self._folder / name
        task = case.under(self._cluster, folder, folder, layers=case.stage_weights)
        trainers = Process(self._folder / f"{name}.log", *case.command(task))
        trainers.launch()
        try:
            await self._until_enough(launch, task)
            if not launch.is_killed:
                (folder / STOP_FILE).touch()
                assert await asyncio.to_thread(trainers.wait, STEP_TIMEOUT_S) == 0
        finally:
            await asyncio.to_thread(trainers.kill)
        await until_at_stock(NODES, self._cluster)
        await asyncio.to_thread(check_losses, case, task)

    async def _until_enough(self, launch: Launch, task: TrainerTask) -> None:
        """Wait for a launch's plan on all its ranks, or for its number of iterations."""
        deadline_s = time.monotonic() + PLAN_TIMEOUT_S
        while not (
            await self._is_planned(task)
            if launch.short_iterations is None
            else any(len(losses) >= launch.short_iterations for losses in losses_in(Path(task.folder)))
        ):
            assert time.monotonic() < deadline_s, launch
            await asyncio.sleep(_POLL_S)

    async def _is_planned(self, task: TrainerTask) -> bool:
        """Whether all ranks of this layout have its plan."""
        request = job_service_pb2.GetJobRequest(job_id=task.job_id)
        try:
            job = (await self._jobs.GetJob(request, timeout=STEP_TIMEOUT_S)).job
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return False
        ask = job_service_pb2.ListRanksRequest(job_id=task.job_id)
        ranks = (await self._jobs.ListRanks(ask, timeout=STEP_TIMEOUT_S)).ranks
        lengths = [len(stage.computations) for stage in job.spec.schedule.explicit.stages]
        return (
            job.state == job_pb2.JOB_STATE_PLANNED
            and lengths == task.stage_count * [2 * task.microbatch_count]
            and len(ranks) == task.rank_count
            and {rank.state for rank in ranks} == {rank_pb2.RANK_STATE_CONNECTED}
            and all(rank.in_force_version == rank.offered_version > 0 for rank in ranks)
        )


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("count", "seed"), [(4, 120), (30, 30)], ids=["4 launches", "30 launches"])
async def test_every_launch_with_a_random_change_is_planned_and_computes_as_before(
    count: int, seed: int, tmp_path: Path
) -> None:
    """The seeds are such that both sequences have kills, and the long one every kind of change and end."""
    planned = list(launches(count, seed))
    assert {each.is_killed for each in planned} == {False, True}
    assert count < 30 or len({(each.is_killed, each.short_iterations is None) for each in planned}) == 4
    async with services(NODES, tmp_path / "logs") as (cluster, _, channel):
        job = Job(cluster, tmp_path, channel)
        for number, launch in enumerate(planned):
            await job.launch(f"launch-{number}", launch)
