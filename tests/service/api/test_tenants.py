"""One tenant's agents can't take anything from another tenant: power, GPUs, or names of jobs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from tests.service.api.test_power_service import Budgets
from tests.service.grpc_fakes import ALL_PLACES, FakeAgent, refusal, until
from tests.service.sites import Site, open_site

MADE_UP_W = 1e7


@asynccontextmanager
async def agent_of(site: Site, grant: str, job_id: str) -> AsyncIterator[FakeAgent]:
    """An agent that has said hello, and whose job is registered."""
    async with site.as_(site.operator) as operator, site.as_(await site.new(job_id, grant)) as client:
        await operator.register(job_id=job_id)
        agent = FakeAgent(client, job_id, job_id=job_id)
        await agent.hello()
        yield agent


async def report_powers(agent: FakeAgent, **powers_w: float) -> None:
    """Report the draw of GPUs, and wait until the coordinator has handled that."""
    reading = {"duration_s": 1.0, "gpu_uuid": list(powers_w), "power_w": list(powers_w.values())}
    await agent.send(power_reading=reading)
    await agent.beat()


async def test_gpus_without_a_rank_count_only_from_the_credential_s_host(site: Site) -> None:
    made_up = {f"GPU-made-up-{number}": MADE_UP_W for number in range(256)}
    async with (
        agent_of(site, "agent:a-*@host", "a-1") as agent,
        agent_of(site, "agent:b-*", "b-1") as liar,
        site.as_(site.operator) as operator,
    ):
        power = Budgets(operator)
        await power.set(limit_w=1e6)  # agents report no readings before there is a budget

        async def is_known() -> bool:
            await report_powers(liar, **made_up)
            await report_powers(agent, idle=60.0)
            return (await power.feed()).unmanaged_w > 50.0

        await until(is_known)
        state = await power.feed()
        assert 50.0 < state.unmanaged_w <= state.measured_w <= 60.001
        assert state.conflicting_gpu_count == 0


async def test_an_agent_is_refused_on_a_host_outside_its_credential(site: Site) -> None:
    async with site.as_(await site.new("nodes", "agent:*@node-1,node-2*")) as client:
        agent = FakeAgent(client)
        await agent.send(hello={"instance_id": "agent", "hostname": "host"})
        code, reason, metadata = await refusal(agent.reader)
        assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, "HOST_OUT_OF_SCOPE")
        assert metadata == {"principal": "token nodes", "hostname": "host"}


async def test_a_restart_gives_no_tenants_gpus_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_site(tmp_path, monkeypatch) as site:
        theirs, ours = await site.new("a", "agent:a-*"), await site.new("nodes", "agent:*")
        async with site.as_(site.operator) as operator, site.as_(theirs) as client:
            for job_id in ("a-1", "b-1"):
                await operator.register(job_id=job_id)
            thief = FakeAgent(client, "thief", job_id="a-1")
            await thief.join()
    async with open_site(tmp_path, monkeypatch) as site, site.as_(theirs) as client, site.as_(ours) as nodes:
        # It is back, and is silent about most of its ranks: its stream keeps their leases alive.
        thief = FakeAgent(client, "thief", ALL_PLACES[:1], job_id="a-1")
        await thief.hello()
        victim = FakeAgent(nodes, "victim", job_id="b-1")
        await victim.join()
        assert victim.refused == []
