"""Requests that are no protocol buffers: refused like whatever else can't be, and no fault of ours.

gRPC itself answers them with UNKNOWN, and with a traceback in the log for each.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from perseus.service.api.interception import Behaviour, Context, Handler, serve_stream, wrapped
from perseus.service.api.statuses import to_status
from perseus.service.domain.errors import MalformedMessageError


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
        return wrapped(
            handler,
            unary=_unary,
            unary_stream=_unary_stream,
            stream_stream=_stream_stream,
            decode=_forgiving(handler.request_deserializer),
        )


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
