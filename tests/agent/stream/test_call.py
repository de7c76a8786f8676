"""The status of an ended stream, in all races of the last write with the end."""

import asyncio

import grpc
import pytest
from google.rpc.status_pb2 import Status

from perseus.agent.stream.call import Call
from perseus.agent.stream.statuses import retry_delay_s
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import agent_service_pb2_grpc
from tests.agent.stream.test_connection import Requests, Responses, refusal, serving

_STREAM_COUNT = 20


async def ends(status: Status | None, message_bytes: int) -> list[object]:
    """Write continuously while reading, stream after stream; return how both ended.

    The coordinator ends each stream at its first message.
    """

    async def end(requests: Requests) -> Responses:
        await anext(requests)
        if status is not None:
            yield status

    seen: list[object] = []
    async with serving(end) as address, grpc.aio.insecure_channel(address) as channel:
        for _ in range(_STREAM_COUNT):
            call = Call(agent_service_pb2_grpc.AgentServiceStub(channel).Connect())

            async def flood(call: Call = call) -> None:
                while True:
                    await call.write(wire.ConnectRequest(hello=wire.Hello(instance_id="i" * message_bytes)))

            async with asyncio.timeout(10):
                seen += await asyncio.gather(flood(), call.read(), return_exceptions=True)
    return seen


@pytest.mark.parametrize("message_bytes", [10, 65_536])
async def test_the_coordinators_status_survives_a_failing_write(message_bytes: int) -> None:
    seen = await ends(refusal("too many", seconds=5), message_bytes)
    reported = [one for one in seen if isinstance(one, grpc.aio.AioRpcError)]
    for error in reported:
        assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many")
        assert retry_delay_s(error) == 5.0
    assert len(reported) >= _STREAM_COUNT, "every reader has the status"
    others = [one for one in seen if not isinstance(one, grpc.aio.AioRpcError)]
    assert all(isinstance(one, asyncio.InvalidStateError) for one in others), "writes after that"


@pytest.mark.parametrize("message_bytes", [10, 65_536])
async def test_a_stream_ends_with_ok_although_a_write_fails(message_bytes: int) -> None:
    seen = await ends(None, message_bytes)
    assert seen[1::2] == [None] * _STREAM_COUNT
    assert all(isinstance(one, asyncio.InvalidStateError) for one in seen[::2])
