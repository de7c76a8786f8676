"""A proxy between an agent and a coordinator that makes each look newer to the other.

Every message of both, and every message inside it, gets an unknown field; every stream of an agent gets an
unknown message in each direction.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.message import Message

from perseus.tls.channels import Channels
from perseus.v1 import agent_service_pb2, frontier_service_pb2, job_service_pb2

SERVICES = {
    service.full_name: service
    for module in (agent_service_pb2, job_service_pb2, frontier_service_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
}

UNKNOWN = b"\xc0\x3e\x01"
"""Field 1000, a number."""

_CONNECT = "/perseus.v1.AgentService/Connect"


@asynccontextmanager
async def newer_ends(coordinator: Channels) -> AsyncIterator[str]:
    """Forward every call to a coordinator; the block gets the address to use instead, in plaintext."""
    async with coordinator.open() as channel:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_Forwarder(channel),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(grace=1)


class _Forwarder(grpc.GenericRpcHandler):
    """A handler for any method; for HTTP/2, every call is a stream in both directions."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method

        async def forward(requests: AsyncIterator[bytes], context: Any) -> None:
            call: Any = self._channel.stream_stream(method)()
            sending = asyncio.create_task(_send(method, requests, call))
            try:
                is_first = True
                async for answer in call:
                    await context.write(_grown(method, answer, is_request=False))
                    if is_first and method == _CONNECT:
                        await context.write(UNKNOWN)
                    is_first = False
                context.set_code(await call.code())
                context.set_details(await call.details())
            except grpc.aio.AioRpcError as error:
                context.set_code(error.code())
                context.set_details(error.details())
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

        return grpc.stream_stream_rpc_method_handler(forward)


async def _send(method: str, requests: AsyncIterator[bytes], call: Any) -> None:
    is_first = True
    async for request in requests:
        await call.write(_grown(method, request, is_request=True))
        if is_first and method == _CONNECT:
            await call.write(UNKNOWN)
        is_first = False
    await call.done_writing()


def _grown(method: str, data: bytes, *, is_request: bool) -> bytes:
    """Return a message with one more field than its type has, and the same for each message in it."""
    service, name = method[1:].split("/")
    if service not in SERVICES:
        return data
    described = SERVICES[service].methods_by_name[name]
    kind = described.input_type if is_request else described.output_type
    message = message_factory.GetMessageClass(kind)()
    message.ParseFromString(data)
    _grow(message)
    return message.SerializeToString()


def _grow(message: Message) -> None:
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for inner in value if field.is_repeated else (value,):
                _grow(inner)
    message.MergeFromString(UNKNOWN)
