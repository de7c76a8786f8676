"""A power budget over two jobs in real processes: emulated GPUs draw less soon, and more after it."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from perseus.v1 import job_pb2, power_service_pb2
from perseus.v1.power_service_pb2_grpc import PowerServiceStub
from tests.service.grpc_fakes import Client
from tests.small_jobs import JOBS, mean_power_w, power_w, training, until, until_planned

if TYPE_CHECKING:
    from perseus.v1.power_service_pb2_grpc import PowerServiceAsyncStub


@pytest.mark.timeout(500)
async def test_two_jobs_keep_a_budget_and_come_back_after_its_end(tmp_path: Path) -> None:
    with training(tmp_path, *JOBS) as (cluster, address):
        async with cluster.security.channels(address).open() as channel:
            client = Client(channel)
            power: PowerServiceAsyncStub = PowerServiceStub(channel)
            await until_planned(client, *JOBS)
            before_w = await mean_power_w(client, 5.0, *JOBS)
            limit_w = 0.85 * before_w
            request = power_service_pb2.SetBudgetRequest(budget_id="peak", request_id="r", limit_w=limit_w)
            await power.SetBudget(request)

            async def is_kept() -> bool:
                return await power_w(client, *JOBS) <= limit_w

            took_s = await until(is_kept, f"{limit_w:.0f} W are kept")
            assert took_s < 15, "plans change at the begin of an iteration"

            async def is_settled() -> bool:
                (feed,) = (await power.ListFeeds(power_service_pb2.ListFeedsRequest())).feeds
                return not feed.is_in_transition

            await until(is_settled, "the feed is in transition no more")
            await asyncio.sleep(15)  # what plans draw is measured, and corrected
            under_w = await mean_power_w(client, 15.0, *JOBS)
            assert under_w <= 1.02 * limit_w
            held = [await client.job(each.job_id) for each in JOBS]
            assert any(job.HasField("budget_iteration_time_s") for job in held)
            assert all(job.state == job_pb2.JOB_STATE_PLANNED for job in held)
            (feed,) = (await power.ListFeeds(power_service_pb2.ListFeedsRequest())).feeds
            assert feed.limit_w == pytest.approx(limit_w)

            await power.CancelBudget(power_service_pb2.CancelBudgetRequest(budget_id="peak"))

            async def are_free() -> bool:
                jobs = [await client.job(each.job_id) for each in JOBS]
                return not any(job.HasField("budget_iteration_time_s") for job in jobs)

            await until(are_free, "nothing holds the jobs back")

            async def is_back() -> bool:
                return await power_w(client, *JOBS) >= 0.95 * before_w

            await until(is_back, f"{before_w:.0f} W are drawn again")
