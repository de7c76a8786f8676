"""The status of an ended stream, in all races of the last write with the end."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from perseus.agent.stream.call import Call
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import agent_service_pb2_grpc

_STREAM_COUNT = 20


class EndingCoordinator(agent_service_pb2_grpc.AgentServiceServicer):
    """Ends each stream at its first message: with an error, if there is a reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    async def Connect(  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[wire.ConnectRequest],
        context: grpc.aio.ServicerContext[wire.ConnectRequest, wire.ConnectResponse],
    ) -> AsyncIterator[wire.ConnectResponse]:
        await anext(request_iterator)
        if self._reason:
            context.set_trailing_metadata((("again", "later"),))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self._reason)
        return
        yield


async def ends(reason: str, message_bytes: int) -> list[object]:
    """Write continuously while reading, stream after stream; return how both ended."""
    server = grpc.aio.server()
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(EndingCoordinator(reason), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    seen: list[object] = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(_STREAM_COUNT):
            call = Call(agent_service_pb2_grpc.AgentServiceStub(channel).Connect())

            async def flood(call: Call = call) -> None:
                while True:
                    await call.write(wire.ConnectRequest(hello=wire.Hello(instance_id="i" * message_bytes)))

            async with asyncio.timeout(10):
                seen += await asyncio.gather(flood(), call.read(), return_exceptions=True)
    await server.stop(None)
    return seen


@pytest.mark.parametrize("message_bytes", [10, 65_536])
async def test_the_coordinators_status_survives_a_failing_write(message_bytes: int) -> None:
    seen = await ends("too many", message_bytes)
    reported = [one for one in seen if isinstance(one, grpc.aio.AioRpcError)]
    for error in reported:
        assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many")
        assert ("again", "later") in tuple(error.trailing_metadata() or ())
    assert len(reported) >= _STREAM_COUNT, "every reader has the status"
    others = [one for one in seen if not isinstance(one, grpc.aio.AioRpcError)]
    assert all(isinstance(one, asyncio.InvalidStateError) for one in others), "writes after that"


@pytest.mark.parametrize("message_bytes", [10, 65_536])
async def test_a_stream_ends_with_ok_although_a_write_fails(message_bytes: int) -> None:
    seen = await ends("", message_bytes)
    assert seen[1::2] == [None] * _STREAM_COUNT
    assert all(isinstance(one, asyncio.InvalidStateError) for one in seen[::2])
