"""Coordinators of two slots that share a PostgreSQL database know the same tokens, and a GPU runs a rank of
one of them.

The power budget that they divide is in `tests/test_fleet_end_to_end.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from perseus.service.domain.members import Fleet, Slot
from perseus.service.domain.principals import Grant
from perseus.service.shell import tokens
from perseus.service.storage.membership import MemberRows
from perseus.tls.tokens import TokenSource
from tests.service.fleet.test_gpus import answer, joined_on
from tests.service.grpc_fakes import (
    ALL_PLACES,
    Client,
    FakeAgent,
    connected_to,
    make_settings,
    refusal,
    running_here,
    until,
)
from tests.service.sites import tokens_of_coordinators
from tests.service.storage import postgresql

JOBS = ("llama-4", "llama-2")
"""A job of each slot."""

pytestmark = [
    pytest.mark.slow("two coordinators on a PostgreSQL server"),
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING)),
]


@pytest.fixture
def database() -> Iterator[str]:
    with postgresql.running() as server:
        yield server.new_database()


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


async def test_a_token_of_slot_0_holds_at_others_at_once_and_once_revoked_ends_its_streams_there(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "RELOAD_S", 1.0)
    operator_file = tmp_path / "operator.token"
    secured: dict[str, Any] = {"insecure": False, "operator_token_file": operator_file}
    async with AsyncExitStack() as stack:
        made = stack.enter_context(tokens_of_coordinators(monkeypatch))
        _, address = [
            await stack.enter_async_context(slot_of_two(tmp_path, database, slot, **secured))
            for slot in range(2)
        ]
        async with connected_to(address, token=TokenSource(path=operator_file)) as operator:
            await operator.register(job_id=JOBS[1])
        _, secret = await made[0].create("reader", Grant.parse("reader"), None)
        reader = connected_to(address, token=TokenSource(token=secret))
        client = await stack.enter_async_context(reader)
        updates = aiter(client.ask("WatchJob", job_id=JOBS[1]))
        await anext(updates)
        await made[0].revoke("reader")

        async def read_on() -> None:
            async for _ in updates:
                pass

        assert (await refusal(read_on()))[1] == "TOKEN_REVOKED"
        assert (await refusal(client.job(JOBS[1])))[1] == "TOKEN_REVOKED"


async def test_a_gpu_runs_a_rank_of_one_slot(tmp_path: Path, database: str) -> None:
    first, second = ALL_PLACES[:2]
    async with AsyncExitStack() as stack, AsyncExitStack() as stack_of_slot_1:
        agents = []
        for slot, (job_id, each) in enumerate(zip(JOBS, (stack, stack_of_slot_1), strict=True)):
            client = await each.enter_async_context(serving(tmp_path, database, slot))
            await client.register(job_id=job_id)
            agents.append(FakeAgent(client, f"agent of {job_id}", ALL_PLACES, job_id=job_id))
            await agents[-1].hello()
        one, other = agents

        async def may_join(agent: FakeAgent) -> bool:
            return await answer(agent, joined_on(agent, second, "GPU-X")) == ""

        assert await answer(one, joined_on(one, first, "GPU-X")) == ""
        assert await answer(other, joined_on(other, second, "GPU-X")) == "GPU_ALREADY_SERVED"
        refused = other.refused[-1].metadata
        assert (refused["job_id"], refused["stage"]) == (JOBS[0], str(first.stage))
        assert await answer(other, joined_on(other, first, "GPU-Y")) == ""

        # It leaves, and the GPU is free for the other slot.
        await one.leave([first])
        await until(lambda: may_join(other))
        assert await answer(one, joined_on(one, first, "GPU-X")) == "GPU_ALREADY_SERVED"
        assert await answer(one, joined_on(one, second, "GPU-Z")) == ""

        # Slot 1's coordinator ends, and another takes over its ranks with their GPUs.
        await stack_of_slot_1.aclose()
        assert await answer(one, joined_on(one, first, "GPU-X")) == "GPU_ALREADY_SERVED"
        client = await stack.enter_async_context(serving(tmp_path, database, 1, 1))
        assert await answer(one, joined_on(one, first, "GPU-X")) == "GPU_ALREADY_SERVED"
        other.use(client)
        await other.hello()
        assert await answer(other, joined_on(other, second, "GPU-X")) == ""
        assert await answer(other, joined_on(other, first, "GPU-Y")) == ""
        assert await answer(one, joined_on(one, first, "GPU-Y")) == "GPU_ALREADY_SERVED"

        # Its job ends there, and the GPUs are free although it is still connected.
        await client.finish(JOBS[1])
        for uuid in ("GPU-X", "GPU-Y"):

            async def is_released(uuid: str = uuid) -> bool:
                return await answer(one, joined_on(one, first, uuid)) == ""

            await until(is_released)
