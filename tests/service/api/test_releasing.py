"""A refused request is released at once, without waiting for a garbage collection."""

import gc
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any
from weakref import WeakSet

import grpc
import pytest

from perseus.service.api.interceptors import Context, Releasing

COUNT = 3

decoded: WeakSet["Request"] = WeakSet()


class Request:
    """Counted as long as something refers to it."""

    def __init__(self, _: bytes) -> None:
        decoded.add(self)


async def refuse(request: Request, context: Context) -> bytes:
    kept = request  # as adapters do, in one frame or another
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, type(kept).__name__)
    raise AssertionError("not reached")


async def refuse_in_stream(request: Request, context: Context) -> AsyncIterator[bytes]:
    yield b""
    await refuse(request, context)


async def refuse_stream(requests: AsyncIterator[Request], context: Context) -> None:
    async for request in requests:
        await refuse(request, context)


HANDLERS: Mapping[str, Any] = {
    "unary": grpc.unary_unary_rpc_method_handler(refuse, Request),
    "streamed answers": grpc.unary_stream_rpc_method_handler(refuse_in_stream, Request),
    "streams": grpc.stream_stream_rpc_method_handler(refuse_stream, Request),
}


class Handlers(grpc.GenericRpcHandler):
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return HANDLERS[handler_call_details.method.removeprefix("/")]


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("kind", HANDLERS)
async def test_a_refused_request_is_released_at_once(kind: str) -> None:
    server = grpc.aio.server(interceptors=[Releasing()])
    server.add_generic_rpc_handlers((Handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(COUNT):
            with pytest.raises(grpc.aio.AioRpcError, match="Request"):
                await call(channel, kind)
    await server.stop(grace=10)  # the caller sees the end a moment before the call is over
    assert not decoded


async def call(channel: Any, kind: str) -> None:
    if kind == "unary":
        await channel.unary_unary(f"/{kind}")(b"")
    elif kind == "streams":
        async for _ in channel.stream_stream(f"/{kind}")(iter([b""])):
            pass
    else:
        async for _ in channel.unary_stream(f"/{kind}")(b""):
            pass
