"""A budget set while ranks without a plan run a long iteration: in force before the iteration's end."""

import asyncio
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM, Work
from perseus.v1 import event_pb2, job_pb2, job_service_pb2, rank_pb2
from tests.service.api.test_power_service import Budgets
from tests.service.grpc_fakes import Client
from tests.small_jobs import client_of, training, until
from tests.workloads import SMALL

MODEL = A100_SXM.with_clocks(4)
# (stages + microbatches - 1) times forward and backward, and the optimizer: iterations of 2.6 seconds.
LONG = replace(
    SMALL,
    job_id="job",
    microbatch_count=2,
    stage_weights=(1.0, 1.0),
    forward=Work(0.2, 0.05, 0.9),
    backward=Work(0.4, 0.1, 0.9),
    optimizer_s=0.3,
    gpu=MODEL,
)
RANK_COUNT = len(LONG.ranks)
URGENT = re.compile(r"offered stock, at most (\d+) MHz as version \d+ at once$")


async def is_served(client: Client, *, by_all: bool = True) -> bool:
    listed = await client.jobs.ListJobs(job_service_pb2.ListJobsRequest())
    if not listed.jobs:
        return False
    ranks = await client.ranks()
    connected = sum(rank.state == rank_pb2.RANK_STATE_CONNECTED for rank in ranks)
    return (connected == RANK_COUNT) is by_all


def clocks_mhz(gpus: Sequence[EmulatedGpu]) -> set[int]:
    return {gpu.sm_clock_mhz() for gpu in gpus}


async def maximum_clocks_mhz(client: Client) -> set[int]:
    """Return the GPUs' clocks under the pipelines' latest offers; 0 for one that is not urgent."""
    types = [event_pb2.JOB_EVENT_TYPE_PLAN_OFFERED]
    offered = (await client.ask("ListJobEvents", job_id="job", types=types, page_size=1000)).events
    found = [URGENT.search(each.message) for each in offered[-LONG.pipeline_count :]]
    maxima_mhz = [int(match[1]) if match else 0 for match in found]
    return {max((mhz for mhz in MODEL.clocks_mhz if mhz <= most), default=0) for most in maxima_mhz}


@pytest.mark.slow("agents in real processes, and iterations long enough to act within one")
@pytest.mark.timeout(900)
async def test_a_budget_s_max_clock_is_in_force_at_once_and_on_a_returning_agent(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        cluster, address = stack.enter_context(training(tmp_path, LONG))
        gpus = [EmulatedGpu(cluster.gpu_file(*rank)) for rank in LONG.ranks]
        for gpu in gpus:
            stack.callback(gpu.close)
        async with client_of(cluster.security, address) as client:
            await until(lambda: is_served(client), "all ranks are served")

            async def has_power() -> bool:
                iterations = [rank.iteration for rank in await client.ranks()]
                return min(iterations) >= 0 and (await client.job()).figures.power_w > 0

            await until(has_power, "an iteration")
            assert clocks_mhz(gpus) == {MODEL.highest_clock_mhz}
            power_w = (await client.job()).figures.power_w
            await Budgets(client).set(limit_w=0.75 * power_w)

            async def is_in_force() -> bool:
                ranks = await client.ranks()
                known = all(rank.in_force_version == rank.offered_version > 0 for rank in ranks)
                return known and clocks_mhz(gpus) == await maximum_clocks_mhz(client)

            await until(is_in_force, "the maximum clock on all ranks, by urgent offers")
            assert clocks_mhz(gpus) != {MODEL.highest_clock_mhz}
            assert (await client.job()).state == job_pb2.JOB_STATE_BASELINE

            await asyncio.to_thread(cluster.agents[0].kill)
            await until(lambda: is_served(client, by_all=False), "the agent is gone")
            cluster.agents[0].launch()
            await until(lambda: is_served(client), "it is back")
            await until(is_in_force, "the maximum clock on the GPUs of the agent that is back")
            await Budgets(client).cancel()

            async def is_at_stock() -> bool:
                return clocks_mhz(gpus) == {MODEL.highest_clock_mhz}

            await until(is_at_stock, "stock again")
