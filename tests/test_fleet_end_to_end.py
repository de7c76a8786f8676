"""A training keeps its plan while another coordinator takes over: real processes, TLS and tokens."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.load.control import CoordinatorProcess
from perseus.demo.cluster import Cluster
from perseus.v1 import job_pb2, rank_pb2
from tests.event_log import logged
from tests.ports import free_port
from tests.service.grpc_fakes import Client
from tests.service.storage import postgresql
from tests.small_jobs import JOBS, planned_soon, until, until_planned

WORKLOAD = JOBS[0]
MEMBER_LEASE_S = 3.0


@pytest.mark.slow("real processes train, and their coordinator is killed")
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING))
async def test_a_training_keeps_its_plan_when_another_coordinator_takes_over(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(postgresql.running())
        stack.enter_context(planned_soon())
        cluster = stack.enter_context(Cluster(WORKLOAD, tmp_path / "run", tmp_path / "logs"))
        coordinators = []
        database = server.new_database()
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            made = CoordinatorProcess(
                tmp_path / name,
                database,
                ("--member-lease-s", str(MEMBER_LEASE_S)),
                is_pinned=False,
                environment=cluster.security.of_coordinator(),
            )
            made.address = f"127.0.0.1:{free_port()}"
            coordinators.append(stack.enter_context(made))
        first, second = coordinators
        await asyncio.to_thread(first.start)
        second.launch()
        await asyncio.to_thread(logged, second.log, "standing by")
        await asyncio.to_thread(cluster.security.admit_agents, first.address)
        # The agent tries the one that stands by first, and is sent to the one that serves.
        await asyncio.to_thread(cluster.start_agents, f"{second.address},{first.address}")
        cluster.start_trainers()
        async with cluster.security.channels(first.address).open() as channel:
            client = Client(channel)
            await until_planned(client, WORKLOAD)
            before = {rank.coordinates.stage: rank.in_force_version for rank in await client.ranks("first")}
            epoch = (await client.job("first")).epoch
        assert all(before.values()), "every rank is under a plan"

        await asyncio.to_thread(first.kill)
        await asyncio.to_thread(logged, second.log, "listening")
        async with cluster.security.channels(second.address).open() as channel:
            client = Client(channel)

            async def is_back() -> bool:
                states = [rank.state for rank in await client.ranks("first")]
                return set(states) == {rank_pb2.RANK_STATE_CONNECTED}

            await until(is_back, "all ranks are served by the second")
            job = await client.job("first")
            after = {rank.coordinates.stage: rank.in_force_version for rank in await client.ranks("first")}
        assert job.epoch == epoch, "no state is lost"
        assert job.state == job_pb2.JOB_STATE_PLANNED
        assert after == before, "the plan stays in force"
        assert logged(second.log, "took over the jobs")["lease_epoch"] == 2
        cluster.stop_training()
