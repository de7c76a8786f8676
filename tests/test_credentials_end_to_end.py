"""Certificates renewed, and the agents' token revoked, under a running job with real processes."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from perseus.demo.cluster import Cluster
from perseus.demo.observation import Observer
from perseus.demo.processes import entries
from perseus.demo.security import AGENTS
from perseus.demo.summary import Measurements
from perseus.v1 import event_pb2, job_pb2, token_service_pb2
from perseus.v1.token_service_pb2_grpc import TokenServiceStub
from tests.small_jobs import PLANNED_TIMEOUT_S, training, until
from tests.workloads import SMALL

if TYPE_CHECKING:
    from perseus.v1.token_service_pb2_grpc import TokenServiceAsyncStub

LIMIT_S = 240.0


async def until_all(cluster: Cluster, event: str, count: int) -> None:
    """Wait until every agent has logged an event this many times."""

    async def have_logged() -> bool:
        return all(agent.count(event) >= count for agent in cluster.agents)

    await until(have_logged, f"{event!r} of every agent", LIMIT_S)


def texts(folder: Path, pattern: str) -> list[str]:
    return [path.read_text().strip() for path in folder.glob(pattern)]


async def iterations(observer: Observer) -> int:
    """Wait for iterations of all pipelines that begin after now; return the last."""
    begun = observer.next_whole_iteration
    numbers = range(begun, begun + 3)
    await observer.until("iterations", lambda: observer.measurements.are_complete(numbers), LIMIT_S)
    return numbers[-1]


async def renew_certificates(cluster: Cluster, observer: Observer, address: str) -> None:
    """Renew the certificates: no plan is lost, and new clients get the new certificate."""
    event_count = len(observer.events)
    cluster.security.renew_coordinator()
    cluster.security.renew_client()
    await until_all(cluster, "connected", 2)
    await iterations(observer)
    assert observer.state == job_pb2.JOB_STATE_PLANNED
    # Ranks disconnect and return within a moment; their plans don't change.
    kinds = {event.type for event in observer.events[event_count:]}
    assert event_pb2.JOB_EVENT_TYPE_STATE_CHANGED not in kinds
    for agent in cluster.agents:
        assert agent.count("certificates renewed: continuing with a new stream") == 1
        assert agent.count("certificates reloaded") == 1
        assert agent.count("no coordinator") == 0
    assert cluster.coordinator is not None
    assert cluster.coordinator.count("certificates reloaded") == 1
    async with cluster.security.channels(address).open() as channel:
        newcomer = Observer(channel, SMALL.job_id, Measurements(SMALL.pipeline_count), lambda: None)
        joining = asyncio.create_task(newcomer.follow())
        await newcomer.until("an answer", lambda: newcomer.job is not None, LIMIT_S)
        joining.cancel()


async def revoke_token(
    cluster: Cluster, tokens: "TokenServiceAsyncStub", observer: Observer, address: str
) -> int:
    """Revoke the token: both sides log it; agents return with another. Return an iteration after that."""
    request = token_service_pb2.RevokeTokenRequest(name=AGENTS)
    await tokens.RevokeToken(request, timeout=30)
    await until_all(cluster, "no coordinator", 1)
    for agent in cluster.agents:
        reason = agent.logged("no coordinator")["reason"]
        assert reason.startswith(f"UNAUTHENTICATED: token '{AGENTS}' is revoked; the token is from ")
    assert cluster.coordinator is not None
    refusals = [line for line in entries(cluster.coordinator.log) if line["event"] == "caller refused"]
    assert {(line["reason"], line["rpc"]) for line in refusals} == {
        ("TOKEN_REVOKED", "/perseus.v1.AgentService/Connect")
    }
    await asyncio.to_thread(cluster.security.admit_agents, address, "more-agents")
    await until_all(cluster, "connected", 3)
    return await iterations(observer)


@pytest.mark.slow("real processes train, are planned, and connect again twice")
@pytest.mark.timeout(1200)
async def test_renewed_certificates_and_another_token_cost_no_iteration(tmp_path: Path) -> None:
    measurements = Measurements(SMALL.pipeline_count)
    with training(tmp_path, SMALL) as (cluster, address):
        async with cluster.security.channels(address).open() as channel:
            observer = Observer(channel, SMALL.job_id, measurements, lambda: None)
            following = asyncio.create_task(observer.follow())
            await observer.until(
                "a plan in force",
                lambda: observer.state == job_pb2.JOB_STATE_PLANNED and observer.is_in_force(),
                PLANNED_TIMEOUT_S,
            )
            first = measurements.latest
            await renew_certificates(cluster, observer, address)
            last = await revoke_token(cluster, TokenServiceStub(channel), observer, address)
            following.cancel()
        secrets = texts(cluster.security.token_file.parent, "*.token")
        await asyncio.to_thread(cluster.stop_training)
        await asyncio.to_thread(cluster.stop_services)

    assert measurements.are_complete(range(first, last + 1)), "every iteration, of every pipeline"
    everything = "".join(texts(tmp_path / "logs", "**/*.log"))
    assert len(secrets) == 2
    assert not any(secret in everything for secret in secrets)
