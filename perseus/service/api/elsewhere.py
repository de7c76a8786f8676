"""A coordinator that stands by answers every call with an address where jobs are served."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from perseus.service.api.interceptors import Context, Handler
from perseus.service.api.statuses import to_status
from perseus.service.domain.errors import ServedElsewhereError
from perseus.service.domain.members import Fleet
from perseus.v1.agent_service_pb2 import ConnectRequest

_HELLO_LIMIT_S = 5.0
"""An agent that has not said for which slot it comes by then is sent to any coordinator."""


class Elsewhere(grpc.GenericRpcHandler):
    """Refuses all calls that have no handler of their own."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        """Return a handler for any method: on the wire a single message is a stream of one."""
        is_agent = handler_call_details.method == "/perseus.v1.AgentService/Connect"
        return grpc.stream_stream_rpc_method_handler(self._refuse_agent if is_agent else self._refuse)

    async def _refuse_agent(self, requests: AsyncIterator[bytes], context: Context) -> None:
        slot = None
        with suppress(TimeoutError, StopAsyncIteration, DecodeError):
            async with asyncio.timeout(_HELLO_LIMIT_S):
                hello = ConnectRequest.FromString(await anext(aiter(requests))).hello
            slot = hello.slot if hello.HasField("slot") else None
        await self._refuse(requests, context, slot)

    async def _refuse(self, _: Any, context: Context, slot: int | None = None) -> None:
        fleet, addresses = self._fleet, self._fleet.addresses()
        if slot is None:  # those that serve share the callers that know no slot yet
            slot = random.choice(list(addresses)) if addresses else 0 if len(fleet.slots) == 1 else None
        address = "" if slot is None else addresses.get(slot, "")
        error = ServedElsewhereError(address=address, slot=slot, standbys=fleet.standbys())
        await context.abort_with_status(to_status(error))
