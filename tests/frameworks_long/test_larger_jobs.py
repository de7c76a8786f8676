"""Larger and longer trainings to a plan: many ranks, checkpoints, evaluations, another training beside."""

import asyncio
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed; `make test-frameworks-long` has it", allow_module_level=True)

from perseus.demo.cluster import Cluster
from perseus.v1 import job_pb2, job_service_pb2, job_service_pb2_grpc
from tests.frameworks.cases import (
    STEADY_MICROBATCHES,
    UNEVEN,
    WATCHED,
    Case,
    check_case,
    check_losses,
    keep,
    start,
)
from tests.frameworks.real_run import STEP_TIMEOUT_S, real_run

pytestmark = pytest.mark.slow("trains for real, with the framework")

MANY_RANKS = Case(
    "torch_trainer", "1F1B", UNEVEN, 1, 0.06, 0.12, pipeline_count=4, microbatch_count=STEADY_MICROBATCHES
)
FEW_WEIGHTS = (0.6, 1.0)
FEW_RANKS = Case("torch_trainer", "1F1B", FEW_WEIGHTS, 1, 0.03, 0.06)
CHECKPOINTS = replace(FEW_RANKS, break_for="checkpoint")
EVALUATIONS = replace(FEW_RANKS, break_for="evaluation")
SECOND = "second"


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("case", "name", "position", "title"),
    [
        (MANY_RANKS, "torch-16-ranks", 50, "torch, 1F1B, 16 ranks"),
        (CHECKPOINTS, "torch-checkpoints", 51, "torch, 1F1B, a checkpoint of 5 s after every 10 iterations"),
        (EVALUATIONS, "torch-evaluations", 52, "torch, 1F1B, an evaluation after every 10 iterations"),
    ],
    ids=["16 ranks", "checkpoints", "evaluations"],
)
async def test_a_plan_is_reached(case: Case, name: str, position: int, title: str, tmp_path: Path) -> None:
    await check_case(case, name, position, title, tmp_path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_observed", [True, False], ids=["one only observed", "one agent"])
async def test_two_trainings_on_one_node(is_observed: bool, tmp_path: Path) -> None:
    """The second one has an agent that never sets clocks, or GPUs of the first one's agent."""
    gpus = FEW_RANKS.workload
    nodes = replace(gpus, **({"pipeline_count": 2} if is_observed else {"stage_weights": 2 * FEW_WEIGHTS}))
    places = [(1, 0), (1, 1)] if is_observed else [(0, 2), (0, 3)]
    start_first = start(FEW_RANKS, tmp_path)
    second = tmp_path / SECOND
    second.mkdir()
    alone = replace(FEW_RANKS.alone(second / "attached", 0), job_id=SECOND)

    def start_both(cluster: Cluster, run_dir: Path) -> None:
        start_first(cluster, run_dir)
        task = replace(
            alone,
            run_dir=str(run_dir),
            sockets=[str(cluster.socket(places[0][0]))],
            gpu_files=[[str(cluster.gpu_file(*place)) for place in places]],
            works=FEW_RANKS.works,
        )
        cluster.start_trainer(SECOND, *FEW_RANKS.command(task))

    observing = [1] if is_observed else []
    async with real_run(
        FEW_RANKS.workload, tmp_path / "logs", start_both, nodes=nodes, observing=observing
    ) as run:
        await run.until_planned()
        plan = await run.plan_beside_stock(WATCHED)
        jobs = job_service_pb2_grpc.JobServiceStub(run.channel)
        request = job_service_pb2.GetJobRequest(job_id=SECOND)
        expected = job_pb2.JOB_STATE_STOCK if is_observed else job_pb2.JOB_STATE_PLANNED
        async with asyncio.timeout(STEP_TIMEOUT_S):
            while True:
                job = (await jobs.GetJob(request, timeout=STEP_TIMEOUT_S)).job
                if job.state == expected:
                    break
                await asyncio.sleep(1.0)
        assert ("not permitted" in job.state_reason) == is_observed
    check_losses(FEW_RANKS, tmp_path)
    check_losses(FEW_RANKS, second)
    name, other = ("observed", "that is only observed") if is_observed else ("beside", "with the same agent")
    title = f"torch, 1F1B, beside another training {other}"
    keep(FEW_RANKS, f"torch-{name}", 53, title, run.stock, plan)
