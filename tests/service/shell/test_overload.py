"""Overload, faults of the store and pauses of the process, from outside: over real gRPC."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from perseus.agent.stream.call import Call
from perseus.service import server
from perseus.service.api import outbox
from perseus.service.shell import coordinator
from perseus.service.shell import writer as writers
from perseus.service.shell.job_clock import TOLERANCE_S
from perseus.service.shell.writer import Writer
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import Entry
from perseus.v1 import rank_pb2
from perseus.v1.agent_service_pb2 import ConnectRequest
from tests.service.grpc_fakes import (
    TIMEOUT_S,
    Client,
    connected,
    connected_to,
    error_of,
    joined,
    make_settings,
    refusal,
    running_here,
    sent,
    until,
)

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


CONNECTED = {rank_pb2.RANK_STATE_CONNECTED}


def hello(instance_id: str) -> ConnectRequest:
    return sent(hello={"instance_id": instance_id, "hostname": "host"})


async def test_one_stream_stays_of_thirty_simultaneous_hellos_of_one_instance(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path)) as client:
        calls = [Call(client.agents.Connect()) for _ in range(30)]
        await asyncio.gather(*(call.write(hello("agent")) for call in calls))
        reasons: list[str] = []

        async def follow(call: Call) -> None:
            try:
                await read_to_the_end(call)
            except grpc.aio.AioRpcError as error:
                reasons.append(error_of(error)[1])

        following = [asyncio.create_task(follow(call)) for call in calls]

        async def is_settled() -> bool:
            return len(reasons) >= len(calls) - 1

        await until(is_settled)
        await asyncio.sleep(0.2)
        assert reasons == ["STREAM_REPLACED"] * (len(calls) - 1)
        (left,) = [call for call, task in zip(calls, following, strict=True) if not task.done()]
        await left.write(sent(goodbye={}))
        await asyncio.wait_for(asyncio.gather(*following), TIMEOUT_S)
        assert len(reasons) == len(calls) - 1


async def read_to_the_end(call: Call) -> None:
    while await call.read() is not None:
        pass


# A client that buffers no more than this for a reader who doesn't read.
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**16))


async def test_the_stream_of_an_agent_that_never_reads_is_ended_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer waits for the agent, and so does not notice by itself."""
    monkeypatch.setattr(outbox, "BYTES_LIMIT", 2**13)
    with capture_logs() as logs:
        async with (
            running_here(make_settings(tmp_path)) as (address, _),
            grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel,
        ):
            call = Call(Client(channel).agents.Connect())
            await call.write(hello("agent"))
            unknown = sent(rank_joined={"job_id": "X" * 256, "rank": {}})
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                for _ in range(3000):
                    async with asyncio.timeout(5):  # messages are read no faster than the rate limit
                        await call.write(unknown)

            async def is_ended() -> bool:
                return any(line["event"] == "agent stream ended" for line in logs)

            await until(is_ended)
            # Messages already on their way come before the status.
            code, reason, _ = await refusal(asyncio.wait_for(read_to_the_end(call), TIMEOUT_S))
            assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "READER_TOO_SLOW")


class Clock:
    """The coordinator's time, which moves only when a test advances it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    @staticmethod
    def time() -> float:
        return time.time()

    async def go_on(self) -> None:
        """Advance by less than counts as standing still, and let the coordinator tick."""
        self.now_s += 0.9 * TOLERANCE_S
        await asyncio.sleep(2 * coordinator.TICK_S)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (coordinator, writers):
        monkeypatch.setattr(module, "time", clock)
    return clock


async def _health(address: str) -> object:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        return answer.status


class HeldStore:
    """Makes writes wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.later_count = 0
        self.writer: Writer | None = None
        write, later = SqlStore.write, Writer.later

        async def held(store: SqlStore, entries: list[Entry]) -> None:
            await self.go.wait()
            await write(store, entries)

        def noted(writer: Writer, *arguments: Any) -> writers.Work:
            self.writer = writer
            self.later_count += 1
            return later(writer, *arguments)

        monkeypatch.setattr(SqlStore, "write", held)
        monkeypatch.setattr(Writer, "later", noted)

    async def is_waited_for(self) -> bool:
        return self.writer is not None and self.writer.waiting_count > 0

    async def is_overloaded(self) -> bool:
        return self.writer is not None and self.writer.admission.waiting_count > 0


async def test_health_reports_not_serving_while_nothing_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(writers, "time", clock)
    monkeypatch.setattr(server, "_HEALTH_PERIOD_S", 0.02)
    held = HeldStore(monkeypatch)
    with capture_logs() as logs:
        async with running_here(make_settings(tmp_path, late_limit_s=TIMEOUT_S)) as (address, _):
            assert await _health(address) == SERVING
            async with connected_to(address) as client:
                held.go.clear()
                registering = asyncio.create_task(client.register())
                await until(held.is_waited_for)
                clock.now_s += 2 * TIMEOUT_S

                async def reports(status: object) -> bool:
                    return await _health(address) == status

                await until(lambda: reports(NOT_SERVING))
                held.go.set()
                await registering
                await until(lambda: reports(SERVING))
    late = [line for line in logs if "health reports NOT_SERVING" in line["event"]]
    again = [line for line in logs if "health reports SERVING" in line["event"]]
    assert len(late) == len(again) == 1


def nobodys_batch(sequence: int) -> ConnectRequest:
    return sent(telemetry={"job_id": "nobody", "sequence": sequence})


async def test_a_slow_store_makes_all_agents_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream_count, batch_count = 6, 40
    monkeypatch.setattr(writers, "MAX_WAITING", 10)
    held = HeldStore(monkeypatch)
    async with connected(make_settings(tmp_path)) as client:
        calls = [client.agents.Connect() for _ in range(stream_count)]
        for number, call in enumerate(calls):
            await call.write(hello(f"agent-{number}"))
            await call.read()
        held.go.clear()
        held.later_count = 0
        for sequence in range(1, batch_count + 1):
            await asyncio.gather(*(call.write(nobodys_batch(sequence)) for call in calls))
        await until(held.is_overloaded)
        await asyncio.sleep(0.1)  # by now nothing new happens
        assert writers.MAX_WAITING < held.later_count <= writers.MAX_WAITING + stream_count
        held.go.set()
        for call in calls:
            acknowledged = 0
            while acknowledged < batch_count:
                answer: Any = await asyncio.wait_for(call.read(), TIMEOUT_S)
                acknowledged = max(acknowledged, answer.telemetry_ack.sequence)


async def test_a_rank_is_lost_after_its_lease_unless_its_messages_wait_or_the_process_stood_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    lease_s = 0.5
    monkeypatch.setattr(writers, "MAX_WAITING", 10)
    held = HeldStore(monkeypatch)
    async with connected(make_settings(tmp_path, lease_s=lease_s)) as client:
        agent = await joined(client)
        await agent.iterate()
        flood = client.agents.Connect()
        await flood.write(hello("flood"))
        await flood.read()
        held.go.clear()
        for sequence in range(1, 3 * writers.MAX_WAITING):
            await flood.write(nobodys_batch(sequence))
        await until(held.is_overloaded)
        kept_until_s = clock.now_s + 2 * lease_s
        while clock.now_s < kept_until_s:
            await agent.send(heartbeat={})
            await clock.go_on()
            assert await client.rank_states() == CONNECTED
        assert not agent.got("heartbeat")  # no message was handled
        held.go.set()
        await agent.iterate()
        assert await client.rank_states() == CONNECTED
        flood.cancel()
        clock.now_s += 1.4 * lease_s  # to a process that is stopped all time passes at once
        assert await client.rank_states() == CONNECTED
        await clock.go_on()  # nor may the next tick let a lease expire
        assert await client.rank_states() == CONNECTED
        await agent.end()

        async def are_lost() -> bool:
            await clock.go_on()
            return await client.rank_states() == {rank_pb2.RANK_STATE_LOST}

        await until(are_lost)
