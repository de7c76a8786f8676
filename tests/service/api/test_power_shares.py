"""A power budget over the jobs of two slots, whose coordinators share a PostgreSQL database."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from perseus.service.domain.members import Fleet, Slot
from perseus.service.storage.membership import MemberRows
from perseus.v1 import job_pb2
from tests.service.api.test_power_service import Budgets, is_free, is_held, reading
from tests.service.grpc_fakes import (
    Client,
    FakeAgent,
    connected_to,
    job_once,
    make_settings,
    refusal,
    running_here,
    until,
)
from tests.service.storage import postgresql

JOBS = ("llama-4", "llama-2")
"""A job of each slot."""

pytestmark = [
    pytest.mark.slow("two coordinators on a PostgreSQL server"),
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING)),
]


@asynccontextmanager
async def slot_of_two(
    tmp_path: Path, database: str, slot: int, lease_epoch: int = 0, **settings: Any
) -> AsyncIterator[str]:
    """Run a coordinator that holds a slot of two; yield its address."""
    with closing(await asyncio.to_thread(MemberRows, database, 60.0, 2)) as rows:
        rows.join("", "")
        epoch, found = rows.take(slot, lease_epoch), rows.renew()
        assert epoch == lease_epoch + 1
        assert found is not None
        made = make_settings(tmp_path, database=database, slots=2, **settings)
        fence, fleet = Slot(slot, rows.member_id, epoch), Fleet(rows.member_id, slot, *found)
        async with running_here(made, fence, fleet) as (address, _):
            yield address
        rows.depart()


@asynccontextmanager
async def serving(tmp_path: Path, database: str, slot: int, lease_epoch: int = 0) -> AsyncIterator[Client]:
    async with slot_of_two(tmp_path, database, slot, lease_epoch) as address, connected_to(address) as client:
        yield client


async def test_coordinators_of_two_slots_keep_shares_of_a_budget_also_without_the_one_that_divides(
    tmp_path: Path,
) -> None:
    with postgresql.running() as server:
        database = server.new_database()
        async with AsyncExitStack() as stack, AsyncExitStack() as first:
            clients = [
                await first.enter_async_context(serving(tmp_path, database, 0)),
                await stack.enter_async_context(serving(tmp_path, database, 1)),
            ]
            powers = [Budgets(client) for client in clients]
            agents = []
            for client, job_id in zip(clients, JOBS, strict=True):
                await client.register(job_id=job_id)
                agents.append(FakeAgent(client, f"agent of {job_id}", job_id=job_id))
                agents[-1].gpu_suffix = f" of {job_id}"
                await agents[-1].join()
                await agents[-1].iterate_until(client, job_pb2.JOB_STATE_PLANNED)
                await agents[-1].iterate(4)
            budget = await powers[0].set(limit_w=600.0)
            assert (await refusal(powers[1].set()))[1] == "SERVED_ELSEWHERE"
            assert (await refusal(powers[1].listed()))[1] == "SERVED_ELSEWHERE"

            async def are_held() -> bool:
                for agent in agents:
                    await agent.send(**reading(agent, 100.0))
                jobs = [await client.job(job_id) for client, job_id in zip(clients, JOBS, strict=True)]
                return all(map(is_held, jobs)) and sorted((await powers[0].feed()).slowed_job_ids) == sorted(
                    JOBS
                )

            await until(are_held)
            whole, share = await powers[0].feed(), await powers[1].feed()
            assert whole.limit_w == budget.limit_w
            assert 0.4 * budget.limit_w < share.limit_w < 0.6 * budget.limit_w
            assert list(share.slowed_job_ids) == [JOBS[1]]
            assert whole.measured_w > share.measured_w > 0

            await agents.pop(0).end()
            await first.aclose()
            assert (await powers[1].feed()).limit_w == share.limit_w
            clients[0] = await stack.enter_async_context(serving(tmp_path, database, 0, 1))
            powers[0] = Budgets(clients[0])

            await powers[0].feed_once(lambda feed: list(feed.slowed_job_ids) == [JOBS[1]])
            assert (await powers[1].feed()).limit_w > 0.9 * share.limit_w
            await powers[0].cancel()
            await job_once(clients[1], is_free, JOBS[1])
