"""Bytes that are not a protocol buffer are refused with a reason by every kind of call, and are no fault of
ours; and what is refused is released at once, without waiting for a garbage collection."""

import gc
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any
from weakref import WeakSet

import grpc
import pytest
from structlog.testing import capture_logs

from perseus.service.api.interceptors import Context, Releasing, serve_stream
from perseus.service.api.rpc_scopes import RPC_SCOPES
from tests.service.grpc_fakes import TIMEOUT_S, Client, refusal

NONSENSE = b"\xff\xff\xff\xff"
STREAMS_OF_REQUESTS = ("/ServerReflectionInfo", "/Connect")


async def test_malformed_bytes_are_refused_with_a_reason(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    channel: Any = client.channel  # raw bytes
    for rpc in RPC_SCOPES:
        with capture_logs() as logs, caplog.at_level(logging.WARNING):
            if rpc.endswith(STREAMS_OF_REQUESTS):
                call = channel.stream_stream(rpc)(timeout=TIMEOUT_S)
                await call.write(NONSENSE)
            elif rpc.endswith(("/Watch", "/WatchJob")):
                call = channel.unary_stream(rpc)(NONSENSE, timeout=TIMEOUT_S)
            else:
                call = channel.unary_unary(rpc)(NONSENSE, timeout=TIMEOUT_S)
            code, reason, values = await refusal(call)
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE"), rpc
        assert "pars" in values["cause"].lower()
        assert [line for line in logs if line["log_level"] == "error"] == []
        assert caplog.records == [], "no traceback of gRPC's"


async def test_a_caller_that_leaves_during_an_answer_is_no_fault() -> None:
    left: list[str] = []

    async def behaviour(request: object, context: object) -> AsyncGenerator[str, None]:
        try:
            for number in range(9):
                yield f"answer {number}"
        finally:
            left.append("the watcher's place")

    class Gone:
        def __init__(self) -> None:
            self.written: list[str] = []

        async def write(self, answer: str) -> None:
            if self.written:
                raise grpc.aio.InternalError('Failed "execute_batch"')
            self.written.append(answer)

    context: Any = Gone()
    await serve_stream(behaviour, None, context)
    assert (context.written, left) == (["answer 0"], ["the watcher's place"])


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
