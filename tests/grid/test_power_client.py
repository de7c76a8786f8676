"""The gateway's client in a fleet whose jobs are spread over slots."""

from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from perseus.grid.dsx_flex.budgets import Budget
from perseus.grid.power_client import PowerClient
from perseus.job_id import slot_of
from perseus.service.domain.members import Fleet, Member, Slot
from perseus.service.server import running
from perseus.tls.channels import Channels
from tests.service.grpc_fakes import Client, make_settings

JOB = next(name for name in map("job-{}".format, range(9)) if slot_of(name, 2) == 0)
BUDGET = Budget(budget_id="b", feed="default", limit_w=5.0, start_s=4e9, end_s=5e9, correlation_id="")


async def test_budgets_are_kept_at_slot_0_and_jobs_asked_for_where_they_are_served(tmp_path: Path) -> None:
    members = [Member(f"{slot}", "") for slot in range(2)]
    fleets = [
        Fleet(f"{slot}", slot, members, [Slot(slot, f"{slot}", 1) for slot in range(2)]) for slot in range(2)
    ]
    async with AsyncExitStack() as stack:
        addresses = []
        for slot, fleet in enumerate(fleets):
            (tmp_path / str(slot)).mkdir()
            settings = make_settings(tmp_path / str(slot))
            addresses.append((await stack.enter_async_context(running(settings, fleet=fleet)))[0])
        for fleet in fleets:
            fleet.members = [Member(f"{slot}", address) for slot, address in enumerate(addresses)]
        async with Channels(addresses[0]).open() as channel:
            await Client(channel).register(job_id=JOB)
        channels = Channels(addresses[1])
        async with PowerClient(channels) as client:
            await client.set(BUDGET)
            assert (await client.budgets()).keys() == {"b"}
            assert await client.nodes(JOB) == ()
        assert channels.address == addresses[1]

        fleets[1].members = fleets[1].members[1:]
        with pytest.raises(grpc.aio.AioRpcError, match="slot 0, which keeps budgets, is absent"):
            await PowerClient(channels).__aenter__()
