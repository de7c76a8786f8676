"""Interceptors that wrap the behaviour of every call."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from perseus.service.api.statuses import to_status
from perseus.service.domain.errors import MalformedMessageError

Context = grpc.aio.ServicerContext[Any, Any]
RpcHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic only for type checkers
Handler: TypeAlias = "RpcHandler | None"
Behaviour = Callable[[Any, Any], Any]  # the stubs know only the contexts of blocking servers
Wrapper = Callable[[Behaviour], Behaviour]


async def serve_stream(behaviour: Behaviour, requests: Any, context: Context) -> None:
    """Serve a call with a response stream, in whichever of gRPC's two styles it is written."""
    served = behaviour(requests, context)
    if isinstance(served, AsyncGenerator):
        async with aclosing(served):
            async for answer in served:
                try:
                    await context.write(answer)
                except grpc.aio.InternalError:  # the caller went while the message was on its way
                    return
    else:
        await served


def wrapped(
    handler: RpcHandler,
    *,
    unary: Wrapper,
    unary_stream: Wrapper,
    stream_stream: Wrapper,
    decode: Callable[[bytes], Any] | None = None,
) -> RpcHandler:
    """Return the handler with its behaviour wrapped, and `decode` for its requests if given."""
    coders = (decode or handler.request_deserializer, handler.response_serializer)
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(unary(handler.unary_unary), *coders)
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(unary_stream(handler.unary_stream), *coders)
    if handler.stream_stream is not None:
        return grpc.stream_stream_rpc_method_handler(stream_stream(handler.stream_stream), *coders)
    raise NotImplementedError("expected no call with a request stream and a single response")


class Interceptor(grpc.aio.ServerInterceptor):
    """Wraps the behaviour of calls."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the handler that gRPC found for the call, if there is one."""
        handler = await continuation(handler_call_details)
        return None if handler is None else self.wrap(handler_call_details.method, handler)

    def wrap(self, rpc: str, handler: RpcHandler) -> RpcHandler:
        """Return the handler of a call, by its full name, with its behaviour wrapped."""
        raise NotImplementedError


class Decoding(Interceptor):
    """Ends calls with a request that can't be decoded with `MalformedMessageError`.

    gRPC itself answers them with UNKNOWN, and logs a traceback for each.
    """

    def wrap(self, rpc: str, handler: RpcHandler) -> RpcHandler:
        """Decode requests here instead of in gRPC."""
        if handler.request_deserializer is None:
            return handler
        return wrapped(
            handler,
            unary=_decoded_unary,
            unary_stream=_decoded_unary_stream,
            stream_stream=_decoded_stream_stream,
            decode=_forgiving(handler.request_deserializer),
        )


def _forgiving(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a decoder that returns its error instead of raising it where only gRPC would see it."""

    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError as error:
            return MalformedMessageError(cause=error)

    return decoded


def _decoded_unary(behaviour: Behaviour) -> Behaviour:
    async def serve(request: Any, context: Context) -> Any:
        if isinstance(request, MalformedMessageError):
            await context.abort_with_status(to_status(request))
        return await behaviour(request, context)

    return serve


def _decoded_unary_stream(behaviour: Behaviour) -> Behaviour:
    async def serve(request: Any, context: Context) -> None:
        if isinstance(request, MalformedMessageError):
            await context.abort_with_status(to_status(request))
        await serve_stream(behaviour, request, context)

    return serve


def _decoded_stream_stream(behaviour: Behaviour) -> Behaviour:
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


class Releasing(Interceptor):
    """The outermost interceptor: it releases the frames of calls that were ended.

    gRPC keeps the exception that ended a call beside the call, and the exception's traceback refers to the
    call's frames: all of them, with their locals, live until the next garbage collection. A request of 4 MB
    may be 100 MB decoded; a few dozen refused ones would end the coordinator.
    """

    def wrap(self, rpc: str, handler: RpcHandler) -> RpcHandler:
        """Drop tracebacks of ended calls."""
        return wrapped(
            handler,
            unary=_released_unary,
            unary_stream=_released_unary_stream,
            stream_stream=_released_stream_stream,
        )


def _released_unary(behaviour: Behaviour) -> Behaviour:
    async def serve(request: Any, context: Context) -> Any:
        try:
            return await behaviour(request, context)
        except grpc.aio.AbortError as error:
            del request
            raise error.with_traceback(None) from None

    return serve


def _released_unary_stream(behaviour: Behaviour) -> Behaviour:
    return _released_unary(partial(serve_stream, behaviour))


def _released_stream_stream(behaviour: Behaviour) -> Behaviour:
    async def serve(requests: Any, context: Context) -> None:
        # The request iterator and gRPC's receiver refer to each other, and it refers to the last request.
        async with aclosing(aiter(requests)) as received:
            await serve_stream(behaviour, received, context)

    return _released_unary(serve)
