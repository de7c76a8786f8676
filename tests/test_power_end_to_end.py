"""A power budget over two jobs in real processes: emulated GPUs draw less soon, and more after it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from perseus.agent.gpu.physics import A100_SXM, Work
from perseus.demo.cluster import Cluster
from perseus.demo.workload import Workload
from perseus.v1 import job_pb2, job_service_pb2, power_service_pb2
from perseus.v1.power_service_pb2_grpc import PowerServiceStub
from tests.service.grpc_fakes import Client

if TYPE_CHECKING:
    from perseus.v1.power_service_pb2_grpc import PowerServiceAsyncStub

FIRST = Workload(
    job_id="first",
    pipeline_count=1,
    stage_weights=(0.7, 1.0),
    microbatch_count=4,
    forward=Work(compute_s=0.018, memory_s=0.004, activity=0.85),
    backward=Work(compute_s=0.038, memory_s=0.008, activity=0.95),
    optimizer_s=0.01,
    gpu=A100_SXM.with_clocks(6),
)
SECOND = replace(FIRST, job_id="second", stage_weights=(1.0, 0.8))
PLANNED_TIMEOUT_S, TIMEOUT_S = 120.0, 40.0


async def until(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = TIMEOUT_S) -> float:
    """Wait for something; return how many seconds it took."""
    begun_s = time.monotonic()
    while not await condition():
        assert time.monotonic() < begun_s + timeout_s, what
        await asyncio.sleep(0.2)
    return time.monotonic() - begun_s


async def powers_w(client: Client) -> list[float]:
    """What both jobs drew in their latest iterations."""
    return [(await client.job(each.job_id)).figures.power_w for each in (FIRST, SECOND)]


async def mean_power_w(client: Client, duration_s: float) -> float:
    found = []
    ends_s = time.monotonic() + duration_s
    while time.monotonic() < ends_s:
        found.append(sum(await powers_w(client)))
        await asyncio.sleep(0.25)
    return sum(found) / len(found)


async def are_planned(client: Client) -> bool:
    jobs = [await client.job(each.job_id) for each in (FIRST, SECOND)]
    return all(
        job.state == job_pb2.JOB_STATE_PLANNED and job.figures.HasField("mean_iteration_time_s")
        for job in jobs
    )


@pytest.mark.timeout(300)
async def test_two_jobs_keep_a_budget_and_come_back_after_its_end(tmp_path: Path) -> None:
    for each in (FIRST, SECOND):
        (tmp_path / each.job_id).mkdir()
    async with AsyncExitStack() as stack:
        first, second = (
            stack.enter_context(Cluster(each, tmp_path / each.job_id, tmp_path / "logs" / each.job_id))
            for each in (FIRST, SECOND)
        )
        address = first.start_coordinator()
        second.security = first.security
        for cluster in (first, second):
            cluster.start_agents(address)
            cluster.start_trainers()
        channel = await stack.enter_async_context(first.security.channels(address).open())
        client = Client(channel)
        power: PowerServiceAsyncStub = PowerServiceStub(channel)

        async def is_known() -> bool:
            listed = await client.jobs.ListJobs(job_service_pb2.ListJobsRequest())
            return {job.job_id for job in listed.jobs} == {"first", "second"}

        await until(is_known, "both jobs are registered")
        await until(lambda: are_planned(client), "both jobs are planned", PLANNED_TIMEOUT_S)
        before_w = await mean_power_w(client, 5.0)
        limit_w = 0.85 * before_w
        request = power_service_pb2.SetBudgetRequest(budget_id="peak", request_id="r", limit_w=limit_w)
        await power.SetBudget(request)

        async def is_kept() -> bool:
            return sum(await powers_w(client)) <= limit_w

        took_s = await until(is_kept, f"{limit_w:.0f} W are kept")
        assert took_s < 15, "plans change at the begin of an iteration"

        async def is_settled() -> bool:
            (feed,) = (await power.ListFeeds(power_service_pb2.ListFeedsRequest())).feeds
            return not feed.is_in_transition

        await until(is_settled, "the feed is in transition no more")
        await asyncio.sleep(15)  # what plans draw is measured, and corrected
        under_w = await mean_power_w(client, 15.0)
        assert under_w <= 1.02 * limit_w
        held = [await client.job(each.job_id) for each in (FIRST, SECOND)]
        assert any(job.HasField("budget_iteration_time_s") for job in held)
        assert all(job.state == job_pb2.JOB_STATE_PLANNED for job in held)
        (feed,) = (await power.ListFeeds(power_service_pb2.ListFeedsRequest())).feeds
        assert feed.limit_w == pytest.approx(limit_w)

        await power.CancelBudget(power_service_pb2.CancelBudgetRequest(budget_id="peak"))

        async def are_free() -> bool:
            jobs = [await client.job(each.job_id) for each in (FIRST, SECOND)]
            return not any(job.HasField("budget_iteration_time_s") for job in jobs)

        await until(are_free, "nothing holds the jobs back")

        async def is_back() -> bool:
            return sum(await powers_w(client)) >= 0.95 * before_w

        await until(is_back, f"{before_w:.0f} W are drawn again")
