"""Hostile tenants, who must not harm other tenants.

They attack a real coordinator with TLS, tokens, a feed and the page, and a real grid gateway with a broker.
One tenant trains. Another, whose token is for other jobs, invents GPUs and claims the first one's; a sender
of load targets floods the gateway; and a client without a token connects to the page's port as often as
possible.
"""

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from grpc import aio

from perseus.grid.contract.messages import moment
from perseus.tls.channels import Channels
from perseus.tls.tokens import TokenSource
from perseus.v1 import agent_service_pb2, token_service_pb2
from perseus.v1 import power_service_pb2 as pb
from perseus.v1.power_service_pb2_grpc import PowerServiceStub
from perseus.v1.token_service_pb2_grpc import TokenServiceStub
from tests.grid.brokers import MqttBroker, running
from tests.grid.gateways import CoordinatorProcess, GatewayProcess
from tests.grid.isv import Sender, target_of
from tests.ports import free_port
from tests.service import service_fakes
from tests.service.grpc_fakes import ALL_PLACES, Client, FakeAgent
from tests.service.web.test_metrics import client_context
from tests.torture.report import publish

GPU_W, MADE_UP_W = 250.0, 1e7
MADE_UP_COUNT = 256
"""Largest permitted number of GPUs in a reading."""
LIARS = 8
FEED_W, TARGET_W = 100e3, 20e3
FLOOD_MESSAGES, FLOOD_SLOTS = 200, 64
CONNECTIONS, HALF_REQUESTS = 3000, 128
"""Connections to the page's port; the first ones send half a request, and the others nothing."""
_PERIOD_S = 0.05
_ANSWER_LIMIT_S = 60.0


@dataclass(slots=True)
class Outcome:
    """The outcome, and violated expectations."""

    reading_count: int = 0
    max_measured_w: float = 0.0
    refused_count: int = 0
    kept_target_s: float = 0.0
    open_files: int = 0
    page_back_s: float = 0.0
    log_bytes: int = 0
    problems: list[str] = field(default_factory=list)


async def torture_tenants(
    folder: Path,
    seconds: float,
    *,
    flood_messages: int = FLOOD_MESSAGES,
    connection_count: int = CONNECTIONS,
) -> Outcome:
    """Run the attacks in turn for some time, and collect a tenant's losses."""
    outcome = Outcome()
    page = f"127.0.0.1:{free_port()}"
    feeds = {"hall": {"hosts": ["ho*"], "limit_w": FEED_W}}
    coordinator = CoordinatorProcess(folder / "coordinator", feeds, HTTP=page)
    try:
        coordinator.launch()
        with running(MqttBroker(coordinator.security, folder / "broker.log")) as broker:
            coordinator.await_listening()
            gateway = GatewayProcess(
                folder / "gateway", coordinator.security, broker.address, coordinator.address
            )
            senders = Sender(gateway.keys, "flood"), Sender(gateway.keys, "acme")
            gateway.start()
            async with coordinator.security.channels(coordinator.address).open() as operator:
                await _lie(coordinator, operator, seconds, outcome)
                await _flood(broker, senders, operator, flood_messages, outcome)
                await _hold_page(coordinator, page, connection_count, outcome)
            gateway.stop()
    finally:
        coordinator.kill()
    return outcome


@asynccontextmanager
async def _tenant(coordinator: CoordinatorProcess, operator: aio.Channel, name: str) -> AsyncIterator[Client]:
    request = token_service_pb2.CreateTokenRequest(
        name=name, scope=token_service_pb2.SCOPE_AGENT, job_patterns=[f"{name}-*"]
    )
    secret = (await TokenServiceStub(operator).CreateToken(request)).secret
    files = coordinator.security.client_files
    async with Channels(coordinator.address, files, TokenSource(token=secret)).open() as channel:
        yield Client(channel)


async def _lie(
    coordinator: CoordinatorProcess, operator: aio.Channel, seconds: float, outcome: Outcome
) -> None:
    """Invent GPUs, and claim those of others."""
    made_up = {f"GPU-made-up-{number}": MADE_UP_W for number in range(MADE_UP_COUNT)}
    own = {service_fakes.make_gpu(place).uuid: GPU_W for place in ALL_PLACES}
    async with (
        _tenant(coordinator, operator, "liar") as theirs,
        _tenant(coordinator, operator, "honest") as ours,
    ):
        liars = []
        for number in range(LIARS):
            await theirs.register(job_id=f"liar-{number}")
            liars.append(FakeAgent(theirs, f"liar-{number}", ALL_PLACES, job_id=f"liar-{number}"))
            await liars[-1].join()
        await ours.register(job_id="honest-1")
        agent = FakeAgent(ours, "honest", ALL_PLACES, job_id="honest-1")
        await agent.join()
        outcome.refused_count = len(agent.refused)
        power, ends_s = PowerServiceStub(operator), time.monotonic() + seconds
        while time.monotonic() < ends_s:
            await asyncio.gather(
                *(_report(liar, made_up) for liar in liars),
                _report(agent, own),
                asyncio.sleep(_PERIOD_S),
            )
            outcome.reading_count += LIARS
            feeds = (await power.ListFeeds(pb.ListFeedsRequest())).feeds
            measured_w = max(feed.measured_w for feed in feeds)
            outcome.max_measured_w = max(outcome.max_measured_w, measured_w)
        if outcome.refused_count:
            outcome.problems.append(f"a tenant was refused {outcome.refused_count} ranks")
        if outcome.max_measured_w > GPU_W * len(own) * 1.001:
            outcome.problems.append(f"a feed measured {outcome.max_measured_w:g} W")
        for each in (*liars, agent):
            each.call.cancel()


async def _report(agent: FakeAgent, powers_w: dict[str, float]) -> None:
    await agent.send(heartbeat=agent_service_pb2.Heartbeat())
    await agent.send(
        power_reading=agent_service_pb2.PowerReading(
            duration_s=_PERIOD_S, gpu_uuid=powers_w.keys(), power_w=powers_w.values()
        )
    )


async def _flood(
    broker: MqttBroker,
    senders: tuple[Sender, Sender],
    operator: aio.Channel,
    message_count: int,
    outcome: Outcome,
) -> None:
    """Flood the gateway with a sender's targets for each minute of years; another's single one must hold."""
    flood, acme = senders
    power, now_s = PowerServiceStub(operator), time.time()
    async with broker.client("senders") as client:
        for number in range(message_count):
            slots = [
                target_of(
                    90e3,
                    interval={
                        "start_time": moment(now_s + 60 * slot),
                        "end_time": moment(now_s + 60 * (slot + 1)),
                    },
                )
                for slot in range(number * FLOOD_SLOTS, (number + 1) * FLOOD_SLOTS)
            ]
            message = flood.envelope(now_s, {"targets": slots})
            await client.publish(flood.topic, json.dumps(message), qos=1)
        begun_s = time.monotonic()
        message = acme.envelope(time.time(), {"targets": [target_of(TARGET_W)]})
        await client.publish(acme.topic, json.dumps(message), qos=1)
        while True:
            (hall,) = (f for f in (await power.ListFeeds(pb.ListFeedsRequest())).feeds if f.feed == "hall")
            outcome.kept_target_s = time.monotonic() - begun_s
            if hall.limit_w == TARGET_W:
                return
            if outcome.kept_target_s > _ANSWER_LIMIT_S:
                outcome.problems.append(f"a sender's limit is {hall.limit_w:g} W, not {TARGET_W:g}")
                return
            await asyncio.sleep(0.1)


async def _hold_page(
    coordinator: CoordinatorProcess, page: str, connection_count: int, outcome: Outcome
) -> None:
    """Open connections to the page's port, send half a request or nothing, and wait; agents connect."""
    host, _, port = page.partition(":")
    context = client_context(coordinator.security)
    log_before, held = coordinator.log.stat().st_size, []
    for number in range(connection_count):
        with suppress(OSError):
            held.append(socket.create_connection((host, int(port))))
            if number < HALF_REQUESTS:
                held[-1] = context.wrap_socket(held[-1], server_hostname=host)
                held[-1].send(b"GET /metrics HTTP/1.1\r\nHost: board\r\nX-Half: ")
    outcome.open_files = len(os.listdir(f"/proc/{coordinator.pid}/fd"))
    async with coordinator.security.channels(coordinator.address).open() as channel:
        await Client(channel).register(job_id="comes-late")
        agent = FakeAgent(Client(channel), "comes-late", ALL_PLACES, job_id="comes-late")
        await agent.join()
        if agent.refused:
            outcome.problems.append(f"an agent was refused: {agent.refused[0]}")
        agent.call.cancel()
    begun_s = time.monotonic()
    async with aiohttp.ClientSession() as session:
        while True:
            outcome.page_back_s = time.monotonic() - begun_s
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"https://{page}/", ssl=context, timeout=aiohttp.ClientTimeout(5)):
                    break
            if outcome.page_back_s > _ANSWER_LIMIT_S:
                outcome.problems.append("the page does not answer any more")
                break
            await asyncio.sleep(0.5)
    outcome.log_bytes = coordinator.log.stat().st_size - log_before
    if outcome.log_bytes > 100_000:
        outcome.problems.append(f"the log grew by {outcome.log_bytes} bytes")
    for each in held:
        each.close()


def publish_tenants(page: Path | None, outcome: Outcome, seconds: float) -> None:
    """Print the figures, and put them into a page."""
    gpu_count, target_count = LIARS * MADE_UP_COUNT, FLOOD_MESSAGES * FLOOD_SLOTS
    rows = (
        (
            f"reports, with a token for other jobs, {gpu_count:,} GPUs of {MADE_UP_W:g} W each, "
            f"for {seconds:g} s",
            f"the feed measures {outcome.max_measured_w:.0f} W at most",
        ),
        (
            f"claims the UUIDs of the tenant's GPUs first, for {LIARS} jobs",
            f"{outcome.refused_count} of the tenant's ranks are refused",
        ),
        (
            f"sends the grid gateway {target_count:,} targets, and another client one for "
            f"{TARGET_W / 1e3:g} kW",
            f"the latter is in force after {outcome.kept_target_s:.1f} s",
        ),
        (
            f"opens {CONNECTIONS:,} connections to the page's port without a token, sends half a request on "
            f"{HALF_REQUESTS} of them and nothing on the rest, and waits",
            f"the coordinator has {outcome.open_files} files open, an agent joins, the page answers after "
            f"{outcome.page_back_s:.0f} s; the log is {outcome.log_bytes:,} bytes longer",
        ),
    )
    note = f"Problems: {'; '.join(outcome.problems) or 'none'}."
    publish(page, "## Hostile tenants", ("attack", "result"), rows, note)
