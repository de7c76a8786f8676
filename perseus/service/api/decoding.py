"""Requests that are no protocol buffers: refused like whatever else can't be, and no fault of ours.

gRPC itself answers them with UNKNOWN, and with a traceback in the log for each.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from perseus.service.api.statuses import to_status
from perseus.service.domain.errors import MalformedMessageError

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"  # generic for checkers of types only
Behaviour = Callable[[Any, Any], Any]  # the stubs know the contexts of blocking servers


async def serve_stream(behaviour: Behaviour, requests: Any, context: Context) -> None:
    """Serve a call that is answered by a stream, in whichever of gRPC's two styles it is written."""
    served = behaviour(requests, context)
    if isinstance(served, AsyncGenerator):
        async with aclosing(served):
            async for answer in served:
                try:
                    await context.write(answer)
                except grpc.aio.InternalError:  # the caller has gone while it was on its way
                    return
    else:
        await served


class Decoding(grpc.aio.ServerInterceptor):
    """Ends calls whose request, or one of them, can't be decoded, with `MalformedMessageError`."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """See `grpc.aio.ServerInterceptor`."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        coders = (_forgiving(handler.request_deserializer), handler.response_serializer)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(_unary(handler.unary_unary), *coders)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(_unary_stream(handler.unary_stream), *coders)
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(_stream_stream(handler.stream_stream), *coders)
        return handler


def _forgiving(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return what hands the error on instead of raising it where only gRPC would see it."""

    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError as error:
            return MalformedMessageError(cause=error)

    return decoded


def _unary(behaviour: Behaviour) -> Behaviour:
    async def serve(request: Any, context: Context) -> Any:
        if isinstance(request, MalformedMessageError):
            await context.abort_with_status(to_status(request))
        return await behaviour(request, context)

    return serve


def _unary_stream(behaviour: Behaviour) -> Behaviour:
    async def serve(request: Any, context: Context) -> None:
        if isinstance(request, MalformedMessageError):
            await context.abort_with_status(to_status(request))
        await serve_stream(behaviour, request, context)

    return serve


def _stream_stream(behaviour: Behaviour) -> Behaviour:
    async def serve(requests: Any, context: Context) -> None:
        try:
            await serve_stream(behaviour, _well_formed(requests), context)
        except MalformedMessageError as error:
            await context.abort_with_status(to_status(error))

    return serve


async def _well_formed(requests: Any) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, MalformedMessageError):
            raise request
        yield request
