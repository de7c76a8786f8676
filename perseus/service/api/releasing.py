"""What a refused call held, let go of at once.

gRPC keeps the exception that ended a call beside the call, whose frames are in the exception's traceback:
both live until Python looks for garbage, and with them every local of these frames. A request of 4 MB may be
100 MB decoded; a few dozen refused ones would end the coordinator.
"""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from perseus.service.api.interception import Behaviour, Context, Handler, serve_stream, wrapped


class Releasing(grpc.aio.ServerInterceptor):
    """The first of all interceptors: behind it nothing holds the frames of a call that was ended."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """See `grpc.aio.ServerInterceptor`."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        return wrapped(handler, unary=_unary, unary_stream=_unary_stream, stream_stream=_stream_stream)


def _unary(behaviour: Behaviour) -> Behaviour:
    async def serve(request: Any, context: Context) -> Any:
        try:
            return await behaviour(request, context)
        except grpc.aio.AbortError as error:
            del request
            raise error.with_traceback(None) from None

    return serve


def _unary_stream(behaviour: Behaviour) -> Behaviour:
    return _unary(partial(serve_stream, behaviour))


def _stream_stream(behaviour: Behaviour) -> Behaviour:
    async def serve(requests: Any, context: Context) -> None:
        # It and gRPC's receiver refer to each other, and it to the last request.
        async with aclosing(aiter(requests)) as received:
            await serve_stream(behaviour, received, context)

    return _unary(serve)
