"""Trainings keep plans and a power budget while other coordinators of a fleet take over: TLS, tokens."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from perseus.demo.site import PowerMeter
from perseus.job_id import slot_of
from perseus.v1 import job_pb2, rank_pb2
from tests.processes import Fleet
from tests.service.api.test_power_service import Budgets
from tests.service.grpc_fakes import Client
from tests.service.storage import postgresql
from tests.small_jobs import JOBS, client_of, jobs_of, power_w, small_job, start_jobs, until, until_planned

WORKLOADS = (small_job("third", 0.7, 1.0), JOBS[0])
"""By slot."""
FIRST, SECOND = (each.job_id for each in WORKLOADS)


async def versions(client: Client, job_id: str) -> dict[int, int]:
    return {rank.coordinates.stage: rank.in_force_version for rank in await client.ranks(job_id)}


async def until_back(client: Client, job_id: str) -> None:
    async def is_back() -> bool:
        return {rank.state for rank in await client.ranks(job_id)} == {rank_pb2.RANK_STATE_CONNECTED}

    await until(is_back, "all ranks are served by another")


@pytest.mark.slow("real processes train, and their coordinators are killed")
@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING))
async def test_trainings_keep_their_plans_and_a_budget_when_other_coordinators_take_over(
    tmp_path: Path,
) -> None:
    assert [slot_of(each.job_id, 2) for each in WORKLOADS] == [0, 1]
    async with AsyncExitStack() as stack:
        database = stack.enter_context(postgresql.running()).new_database()
        clusters = stack.enter_context(jobs_of(tmp_path, *WORKLOADS))
        security = clusters[0].security
        fleet = stack.enter_context(Fleet(tmp_path, [database] * 3, environment=security.of_coordinator()))
        await asyncio.to_thread(fleet.start)
        await asyncio.to_thread(security.admit_agents, fleet.holder(0).address)
        # Agents know the one that stands by alone, and are sent to those that serve.
        await asyncio.to_thread(start_jobs, clusters, fleet.coordinators[-1].address)

        async def client_at(slot: int) -> Client:
            holder = await asyncio.to_thread(fleet.holder, slot)
            return await stack.enter_async_context(client_of(security, holder.address))

        clients = [await client_at(slot) for slot in fleet.slots]
        for client, workload in zip(clients, WORKLOADS, strict=True):
            await until_planned(client, workload)
        before = [await versions(clients[0], FIRST), await versions(clients[1], SECOND)]
        assert all(version for each in before for version in each.values()), "all are under plans"
        epoch = (await clients[1].job(SECOND)).epoch

        await asyncio.to_thread(fleet.holder(1).kill)
        clients[1] = await client_at(1)
        await until_back(clients[1], SECOND)
        for client, job_id in zip(clients, (FIRST, SECOND), strict=True):
            assert (await client.job(job_id)).state == job_pb2.JOB_STATE_PLANNED

        async def are_kept() -> bool:
            """Tell whether the plans, or newer ones, are in force: blocks at stock come in between."""
            now = [await versions(clients[0], FIRST), await versions(clients[1], SECOND)]
            return all(
                0 < version <= later[stage]
                for earlier, later in zip(before, now, strict=True)
                for stage, version in earlier.items()
            )

        await until(are_kept, "plans are kept")
        assert (await clients[1].job(SECOND)).epoch == epoch, "no state is lost"
        assert fleet.holder(1).logged("took over the jobs")["lease_epoch"] == 2

        files = [
            cluster.gpu_file(*rank)
            for cluster, workload in zip(clusters, WORKLOADS, strict=True)
            for rank in workload.ranks
        ]
        meter = stack.enter_context(PowerMeter({"both": files}))
        # A budget over both slots, which the coordinator of slot 0 divides.
        await asyncio.to_thread(fleet.start)
        limit_w = 0.8 * sum([await power_w(*each) for each in zip(clients, WORKLOADS, strict=True)])
        await Budgets(clients[0]).set(limit_w=limit_w)

        async def is_shared() -> bool:
            return 0 < (await Budgets(clients[1]).feed()).limit_w < limit_w

        async def are_slowed(expected: bool) -> bool:
            jobs = [await clients[0].job(FIRST), await clients[1].job(SECOND)]
            return any(job.HasField("budget_target_iteration_time_s") for job in jobs) is expected

        async def is_kept() -> bool:
            """Whether the GPUs draw no more in ten seconds, by their own counters."""
            meter.poll()
            await asyncio.sleep(10.0)
            return sum(meter.poll().values()) <= 1.02 * limit_w

        await until(is_shared, "a share for the other slot")
        await until(lambda: are_slowed(True), "slower plans")
        await until(is_kept, f"at most {limit_w:.0f} W")
        await asyncio.to_thread(fleet.holder(0).kill)
        takeover = asyncio.create_task(client_at(0))
        shares_w: list[float] = []
        while not takeover.done():
            shares_w.append((await Budgets(clients[1]).feed()).limit_w)
            await asyncio.sleep(0.2)
        clients[0] = await takeover
        assert 0 < min(shares_w) <= max(shares_w) < limit_w, "a share holds while nobody divides"
        await until_back(clients[0], FIRST)
        assert (await Budgets(clients[0]).feed()).limit_w == limit_w
        assert await is_shared()
        await Budgets(clients[0]).cancel()
        await until(lambda: are_slowed(False), "plans as before")
        for cluster in clusters:
            await asyncio.to_thread(cluster.stop_training)
