"""The load's own HTTP/2 client, against a real gRPC server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from benchmarks.load.http2 import GrpcStream, frame

PATH = "/test.Echo/Talk"


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """Address of a server that echoes each message; a first message `end` ends the call."""

    async def talk(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        async for request in requests:
            if request == b"end":
                await context.abort(grpc.StatusCode.NOT_FOUND, "asked to")
            yield request

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    handlers: dict[str, Any] = {"Talk": grpc.stream_stream_rpc_method_handler(talk)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.mark.parametrize("size", [0, 1, 16_384 - 5, 16_384, 65_535, 1_000_000])
async def test_messages_of_any_size_come_back_in_order(address: str, size: int) -> None:
    answers: asyncio.Queue[bytes] = asyncio.Queue()
    stream = await GrpcStream.open(address, PATH, answers.put_nowait, pytest.fail)
    sent = [bytes([number]) * size for number in range(20)]
    for message in sent[:10]:
        stream.send(message)
    stream.send(*sent[10:])
    assert [await answers.get() for _ in sent] == sent
    stream.close()


async def test_the_end_of_the_call_is_reported_once(address: str) -> None:
    why: asyncio.Queue[str] = asyncio.Queue()
    stream = await GrpcStream.open(address, PATH, lambda _: None, why.put_nowait)
    stream.send(b"end")
    assert "asked to" in await why.get()
    await asyncio.sleep(0)
    assert why.empty()
    stream.close()


async def test_the_end_of_the_connection_is_reported() -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    why: asyncio.Queue[str] = asyncio.Queue()
    await GrpcStream.open(f"127.0.0.1:{port}", PATH, lambda _: None, why.put_nowait)
    assert await why.get()
    server.close()
    with pytest.raises(OSError, match=str(port)):
        await GrpcStream.open(f"127.0.0.1:{port}", PATH, lambda _: None, why.put_nowait)


def test_a_dropped_connection_receives_nothing_more() -> None:
    found: list[bytes] = []

    def received(message: bytes) -> None:
        found.append(message)
        stream.abort()

    stream = GrpcStream(PATH, "", received, pytest.fail)
    message = b"\x00" + (1).to_bytes(4) + b"a"
    stream.data_received(frame(0, 0, 1, 2 * message))
    stream.data_received(frame(0, 0, 1, message))
    assert found == [b"a"]
