"""A coordinator that stands by answers every call with the address where the jobs are served."""

from collections.abc import Callable
from typing import Any

import grpc

from perseus.service.api.interceptors import Context, Handler
from perseus.service.api.statuses import to_status
from perseus.service.domain.errors import ServedElsewhereError


class Elsewhere(grpc.GenericRpcHandler):
    """Refuses all calls that have no handler of their own; `address` is where the jobs are served."""

    def __init__(self, address: Callable[[], str]) -> None:
        self._address = address

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        """Return a handler for any method: on the wire a single message is a stream of one."""
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, _: Any, context: Context) -> None:
        await context.abort_with_status(to_status(ServedElsewhereError(address=self._address())))
