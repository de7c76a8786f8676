"""What interceptors have in common: a handler's behaviours, each inside another of the same kind."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

Context = grpc.aio.ServicerContext[Any, Any]
RpcHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic for checkers of types only
Handler: TypeAlias = "RpcHandler | None"
Behaviour = Callable[[Any, Any], Any]  # the stubs know the contexts of blocking servers
Wrapper = Callable[[Behaviour], Behaviour]


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


def wrapped(
    handler: RpcHandler,
    *,
    unary: Wrapper,
    unary_stream: Wrapper,
    stream_stream: Wrapper,
    decode: Callable[[bytes], Any] | None = None,
) -> RpcHandler:
    """Return a handler like this one with its behaviour wrapped, and `decode` for its requests if given."""
    coders = (decode or handler.request_deserializer, handler.response_serializer)
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(unary(handler.unary_unary), *coders)
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(unary_stream(handler.unary_stream), *coders)
    if handler.stream_stream is not None:
        return grpc.stream_stream_rpc_method_handler(stream_stream(handler.stream_stream), *coders)
    raise NotImplementedError("expected no call that streams requests for one answer")
