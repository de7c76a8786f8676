"""A GPU runs one rank, also where jobs of several slots name it, and while a slot changes hands."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.load.control import CoordinatorProcess
from perseus.demo.processes import logged
from perseus.v1 import agent_service_pb2, rank_pb2
from tests.ports import free_port
from tests.service.fleet.test_gpus import answer, joined_on
from tests.service.grpc_fakes import ALL_PLACES, Client, FakeAgent, connected_to, until
from tests.service.storage import postgresql

JOBS = ("llama-4", "llama-2")
"""A job of each slot."""

FLAGS = ("--slots", "2", "--member-lease-s", "3", "--lease-s", "60")
FIRST, SECOND = ALL_PLACES[:2]

pytestmark = [
    pytest.mark.slow("three coordinators on a PostgreSQL server"),
    pytest.mark.timeout(200),
    pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING)),
]


@pytest.fixture
def coordinators(tmp_path: Path) -> Iterator[list[CoordinatorProcess]]:
    """Those of slot 0 and slot 1, and one that stands by."""
    with postgresql.running() as server:
        database = server.new_database()
        made = []
        for name in ("first", "second", "standby"):
            (tmp_path / name).mkdir()
            made.append(CoordinatorProcess(tmp_path / name, database, FLAGS, is_pinned=False))
            made[-1].address = f"127.0.0.1:{free_port()}"
        try:
            for each in made[:2]:
                each.start()
            made[2].launch()
            logged(made[2].log, "standing by")
            yield (
                sorted(made[:2], key=lambda each: int(logged(each.log, "took over the jobs")["slot"]))
                + made[2:]
            )
        finally:
            for each in made:
                each.__exit__()


@asynccontextmanager
async def agent_of(client: Client, job_id: str) -> AsyncIterator[FakeAgent]:
    await client.register(job_id=job_id)
    agent = FakeAgent(client, f"agent of {job_id}", ALL_PLACES, job_id=job_id)
    await agent.hello()
    yield agent
    await agent.end()


async def test_a_gpu_runs_a_rank_of_one_slot(coordinators: list[CoordinatorProcess]) -> None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected_to(each.address)) for each in coordinators]
        one, other = [
            await stack.enter_async_context(agent_of(client, job_id))
            for client, job_id in zip(clients[:2], JOBS, strict=True)
        ]

        async def may_join(agent: FakeAgent) -> bool:
            return await answer(agent, joined_on(agent, SECOND, "GPU-X")) == ""

        assert await answer(one, joined_on(one, FIRST, "GPU-X")) == ""
        assert await answer(other, joined_on(other, SECOND, "GPU-X")) == "GPU_ALREADY_SERVED"
        refused = other.refused[-1].metadata
        assert (refused["job_id"], refused["stage"]) == (JOBS[0], str(FIRST.stage))
        assert await answer(other, joined_on(other, FIRST, "GPU-Y")) == ""

        # It leaves, and the GPU is free for the other slot.
        left = agent_service_pb2.RankLeft(
            job_id=JOBS[0], rank=one.place(FIRST), reason=rank_pb2.RANK_LEFT_REASON_TRAINER_GONE
        )
        await one.send(rank_left=left)
        await until(lambda: may_join(other))
        assert await answer(one, joined_on(one, FIRST, "GPU-X")) == "GPU_ALREADY_SERVED"
        assert await answer(one, joined_on(one, SECOND, "GPU-Z")) == ""

        # Slot 1's coordinator dies, and another takes over its ranks with their GPUs.
        await asyncio.to_thread(coordinators[1].kill)
        assert await answer(one, joined_on(one, FIRST, "GPU-X")) == "GPU_ALREADY_SERVED"
        await asyncio.to_thread(logged, coordinators[2].log, "listening")
        assert await answer(one, joined_on(one, FIRST, "GPU-X")) == "GPU_ALREADY_SERVED"
        other.use(clients[2])
        await other.hello()
        assert await answer(other, joined_on(other, SECOND, "GPU-X")) == ""
        assert await answer(other, joined_on(other, FIRST, "GPU-Y")) == ""
        assert await answer(one, joined_on(one, FIRST, "GPU-Y")) == "GPU_ALREADY_SERVED"

        # Its job ends there, and the GPUs are free although it is still connected.
        await clients[2].finish(JOBS[1])
        for uuid in ("GPU-X", "GPU-Y"):

            async def is_free(uuid: str = uuid) -> bool:
                return await answer(one, joined_on(one, FIRST, uuid)) == ""

            await until(is_free)
