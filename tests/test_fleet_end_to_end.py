"""Trainings keep their plans while another coordinator takes over: real processes, TLS and tokens."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from benchmarks.load.control import CoordinatorProcess
from perseus.demo.cluster import Cluster
from perseus.demo.security import Security
from perseus.demo.workload import Workload
from perseus.job_id import slot_of
from perseus.v1 import job_pb2, rank_pb2
from tests.event_log import logged
from tests.ports import free_port
from tests.service.grpc_fakes import Client
from tests.service.storage import postgresql
from tests.small_jobs import JOBS, planned_soon, small_job, until, until_planned

MEMBER_LEASE_S = 8.0
"""Shorter ones are lost on a busy machine, where a coordinator may wait for a second."""
OTHER = small_job("third", 0.7, 1.0)
"""A job of slot 0 of two; JOBS[0] is of slot 1."""


class Fleet:
    """Coordinators on one database: one for each slot, and one that stands by."""

    def __init__(
        self, folder: Path, database: str, slots: int, security: Security, stack: AsyncExitStack
    ) -> None:
        self.coordinators = []
        for number in range(slots + 1):
            (own := folder / f"coordinator-{number}").mkdir()
            made = CoordinatorProcess(
                own,
                database,
                ("--member-lease-s", str(MEMBER_LEASE_S), "--slots", str(slots)),
                is_pinned=False,
                environment=security.of_coordinator(),
            )
            made.address = f"127.0.0.1:{free_port()}"
            self.coordinators.append(stack.enter_context(made))
        self.standby = self.coordinators[-1]

    async def start(self) -> None:
        """Start one after another: that of slot 0 first, then the others, and last the one that stands by."""
        for each in self.coordinators[:-1]:
            await asyncio.to_thread(each.start)
        self.standby.launch()
        await asyncio.to_thread(logged, self.standby.log, "standing by")

    @property
    def addresses(self) -> str:
        """All addresses, that of the one that stands by first."""
        return ",".join(each.address for each in reversed(self.coordinators))

    def holder(self, slot: int) -> CoordinatorProcess:
        return next(
            each for each in self.coordinators if logged(each.log, "took over the jobs")["slot"] == slot
        )


async def versions(client: Client, job_id: str) -> dict[int, int]:
    return {rank.coordinates.stage: rank.in_force_version for rank in await client.ranks(job_id)}


@pytest.mark.slow("real processes train, and their coordinator is killed")
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING))
@pytest.mark.parametrize("workloads", [(JOBS[0],), (JOBS[0], OTHER)], ids=["one slot", "two slots"])
async def test_trainings_keep_their_plans_when_another_coordinator_takes_over(
    tmp_path: Path, workloads: tuple[Workload, ...]
) -> None:
    slots = len(workloads)
    assert {slot_of(each.job_id, slots) for each in workloads} == set(range(slots))
    async with AsyncExitStack() as stack:
        server = stack.enter_context(postgresql.running())
        stack.enter_context(planned_soon())
        clusters = [
            stack.enter_context(Cluster(each, tmp_path / each.job_id, tmp_path / "logs" / each.job_id))
            for each in workloads
        ]
        security = clusters[0].security
        fleet = Fleet(tmp_path, server.new_database(), slots, security, stack)
        await fleet.start()
        await asyncio.to_thread(security.admit_agents, fleet.holder(0).address)
        for cluster in clusters:
            # The agent tries the one that stands by first, and is sent to one that serves.
            cluster.security = security
            await asyncio.to_thread(cluster.start_agents, fleet.addresses)
            cluster.start_trainers()

        async def client_at(holder: CoordinatorProcess) -> Client:
            return Client(await stack.enter_async_context(security.channels(holder.address).open()))

        clients = {}
        for each in workloads:
            clients[each.job_id] = await client_at(fleet.holder(slot_of(each.job_id, slots)))
            await until_planned(clients[each.job_id], each)
        before = {job_id: await versions(client, job_id) for job_id, client in clients.items()}
        assert all(version for each in before.values() for version in each.values()), "all are under plans"
        lost = JOBS[0].job_id
        epoch = (await clients[lost].job(lost)).epoch

        await asyncio.to_thread(fleet.holder(slot_of(lost, slots)).kill)
        await asyncio.to_thread(logged, fleet.standby.log, "listening")
        client = clients[lost] = await client_at(fleet.standby)

        async def is_back() -> bool:
            return {rank.state for rank in await client.ranks(lost)} == {rank_pb2.RANK_STATE_CONNECTED}

        await until(is_back, "all ranks are served by another")
        for job_id, own in clients.items():
            assert (await own.job(job_id)).state == job_pb2.JOB_STATE_PLANNED
            assert await versions(own, job_id) == before[job_id], "the plan stays in force"
        assert (await client.job(lost)).epoch == epoch, "no state is lost"
        taken = logged(fleet.standby.log, "took over the jobs")
        assert (taken["slot"], taken["lease_epoch"]) == (slot_of(lost, slots), 2)
        for cluster in clusters:
            cluster.stop_training()
