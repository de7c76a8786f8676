"""A power budget over the jobs of three coordinators in real processes; the one that divides is killed."""

import asyncio
import statistics
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from perseus.demo.cluster import Cluster
from perseus.demo.site import PowerMeter
from perseus.job_id import slot_of
from tests.event_log import logged
from tests.service.api.test_power_service import Budgets
from tests.service.grpc_fakes import Client
from tests.service.storage import postgresql
from tests.small_jobs import planned_soon, small_job, until_planned
from tests.test_fleet_end_to_end import Fleet

SLOTS = 3
JOBS = (small_job("job-2", 0.7, 1.0), small_job("job-0", 1.0, 0.8), small_job("job-1", 0.9, 1.0))
"""One of each slot."""
CUT = 0.2
SETTLING_S = 10


@pytest.mark.slow("real processes train under a power budget")
@pytest.mark.serial
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING))
async def test_three_coordinators_keep_a_budget_also_when_the_one_that_divides_is_killed(
    tmp_path: Path,
) -> None:
    assert [slot_of(job.job_id, SLOTS) for job in JOBS] == [0, 1, 2]
    async with AsyncExitStack() as stack:
        server = stack.enter_context(postgresql.running())
        stack.enter_context(planned_soon())
        clusters = []
        for job in JOBS:
            (folder := tmp_path / job.job_id).mkdir()
            made = Cluster(job, folder, tmp_path / "logs" / job.job_id, guard_tolerance_percent=1000.0)
            clusters.append(stack.enter_context(made))
        security = clusters[0].security
        fleet = Fleet(tmp_path, server.new_database(), SLOTS, security, stack)
        await fleet.start()
        await asyncio.to_thread(security.admit_agents, fleet.holder(0).address)
        for cluster in clusters:
            cluster.security = security
            await asyncio.to_thread(cluster.start_agents, fleet.addresses)
            cluster.start_trainers()

        async def client_at(address: str) -> Client:
            return Client(await stack.enter_async_context(security.channels(address).open()))

        clients = [await client_at(fleet.holder(slot).address) for slot in range(SLOTS)]

        for job, client in zip(JOBS, clients, strict=True):
            await until_planned(client, job)
        files = {
            job.job_id: [cluster.gpu_file(*rank) for rank in job.ranks]
            for job, cluster in zip(JOBS, clusters, strict=True)
        }
        meter = stack.enter_context(PowerMeter(files))

        async def drawn_w(seconds: int) -> list[float]:
            """Return what all GPUs draw in each of the next seconds, by their counters."""
            meter.poll()
            found = []
            for _ in range(seconds):
                await asyncio.sleep(1)
                found.append(sum(meter.poll().values()))
            return found

        def worst_w(powers_w: list[float]) -> float:
            return max(statistics.fmean(powers_w[n : n + 10]) for n in range(len(powers_w) - 9))

        free_w = statistics.fmean(await drawn_w(15))
        limit_w = (1 - CUT) * free_w
        await Budgets(clients[0]).set(limit_w=limit_w)
        await drawn_w(SETTLING_S)
        assert worst_w(await drawn_w(30)) <= 1.02 * limit_w
        shares_w = [(await Budgets(client).feed()).limit_w for client in clients[1:]]
        assert 0 < sum(shares_w) < limit_w

        await asyncio.to_thread(fleet.holder(0).kill)
        assert worst_w(await drawn_w(10)) <= 1.02 * limit_w, "shares hold while nobody divides"
        await asyncio.to_thread(logged, fleet.standby.log, "listening")
        clients[0] = await client_at(fleet.standby.address)
        assert worst_w(await drawn_w(30)) <= 1.02 * limit_w
        power = Budgets(clients[0])
        assert (await power.feed()).limit_w == limit_w
        await power.cancel()
        await drawn_w(SETTLING_S)
        assert statistics.fmean(await drawn_w(10)) > 0.95 * free_w
        for cluster in clusters:
            cluster.stop_training()
