"""Reconnection: the backoff, and a coordinator that misbehaves on a real stream."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc

from perseus.agent.rank.messages import AgentIdentity, Incoming, TelemetryAck, Welcome
from perseus.agent.stream.connection import Backoff, Connection
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import agent_service_pb2_grpc
from tests.agent.coordinator_stub import until

Script = Callable[[AsyncIterator[wire.ConnectRequest]], AsyncIterator[wire.ConnectResponse]]
AGENT = AgentIdentity("instance", "0", "host")


def welcome(lease_s: float) -> wire.ConnectResponse:
    return wire.ConnectResponse(welcome=wire.Welcome(epoch="e", lease_s=lease_s))


def test_backoff_doubles_to_its_longest_and_starts_anew() -> None:
    backoff = Backoff(lambda: 0.5, first_s=1.0, longest_s=3.0)
    assert [backoff.next_s() for _ in range(4)] == [0.5, 1.0, 1.5, 1.5]
    backoff.reset()
    assert backoff.next_s() == 0.5


class Witness:
    """A `Handler` that remembers."""

    def __init__(self) -> None:
        self.seen: list[Incoming | str] = []

    def connected(self, welcome: Welcome) -> None:
        self.seen.append(welcome)

    def received(self, message: Incoming) -> None:
        self.seen.append(message)

    def disconnected(self) -> None:
        self.seen.append("disconnected")


class ScriptedCoordinator(agent_service_pb2_grpc.AgentServiceServicer):
    """Each stream follows the next script; the last one again and again."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)

    async def Connect(  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[wire.ConnectRequest],
        context: grpc.aio.ServicerContext[wire.ConnectRequest, wire.ConnectResponse],
    ) -> AsyncIterator[wire.ConnectResponse]:
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        async for response in script(request_iterator):
            yield response


async def converse(witness: Witness, condition: Callable[[], bool], *scripts: Script) -> None:
    server = grpc.aio.server()
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(ScriptedCoordinator(*scripts), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    running = asyncio.create_task(Connection(f"127.0.0.1:{port}", AGENT, witness, lambda: 0.01).run())
    try:
        await until(condition, "the conversation")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(None)


async def silent(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
    yield welcome(lease_s=0.2)
    await asyncio.sleep(30)


async def test_a_leases_silence_ends_the_stream() -> None:
    witness = Witness()
    await converse(witness, lambda: len(witness.seen) >= 3, silent)
    assert witness.seen[:3] == [Welcome("e", 0.2, 0), "disconnected", Welcome("e", 0.2, 0)]


async def test_answered_heartbeats_keep_the_stream() -> None:
    beats = 0

    async def answering(
        requests: AsyncIterator[wire.ConnectRequest],
    ) -> AsyncIterator[wire.ConnectResponse]:
        nonlocal beats
        async for request in requests:
            if request.WhichOneof("message") == "hello":
                yield welcome(lease_s=0.15)
            else:
                beats += 1
                yield wire.ConnectResponse(heartbeat=wire.Heartbeat())

    witness = Witness()
    await converse(witness, lambda: beats >= 6, answering)
    assert witness.seen.count("disconnected") == 1, "when the test ended it"


async def test_streams_that_end_fail_or_begin_wrongly_are_followed_by_another() -> None:
    async def ends(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
        return
        yield

    async def fails(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
        raise RuntimeError
        yield

    async def impolite(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
        yield wire.ConnectResponse(heartbeat=wire.Heartbeat())

    async def malformed(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
        yield welcome(lease_s=-1)

    witness = Witness()
    await converse(witness, lambda: len(witness.seen) > 0, ends, fails, impolite, malformed, silent)
    assert witness.seen[0] == Welcome("e", 0.2, 0)


async def test_a_malformed_message_is_ignored_and_the_stream_goes_on() -> None:
    async def careless(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
        yield welcome(lease_s=30)
        yield wire.ConnectResponse(telemetry_ack=wire.TelemetryAck(sequence=-1))
        yield wire.ConnectResponse(telemetry_ack=wire.TelemetryAck(sequence=1))
        await asyncio.sleep(30)

    witness = Witness()
    await converse(witness, lambda: len(witness.seen) >= 2, careless)
    assert witness.seen[:2] == [Welcome("e", 30.0, 0), TelemetryAck(1)]
