"""A stream to the coordinator that ends with the coordinator's own status.

When a write fails because the stream has just ended, grpc.aio (1.60 to 1.85 at least) replaces the peer's
status with its own INTERNAL: https://github.com/grpc/grpc/issues/36066. The coordinator's reason for refusing
an agent, and its retry delay, would often be lost. So this class keeps the status as it arrives, before a
failed write can replace it; if the write fails first, the class waits for the peer's status.
"""

import asyncio
from typing import Any

import grpc

from perseus.v1 import agent_service_pb2 as wire

_OWN_DETAILS = "Internal error from Core"
_STATUS_WITHIN_S = 1.0
_CHECKS = 100

_StreamStreamCall = grpc.aio.StreamStreamCall[wire.ConnectRequest, wire.ConnectResponse]


class Call:
    """The writes and reads of one stream; one of each at a time."""

    def __init__(self, call: _StreamStreamCall) -> None:
        self._call = call
        self._first: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._keep)

    async def write(self, request: wire.ConnectRequest) -> None:
        """Send a message.

        Raises:
            grpc.aio.AioRpcError: the stream has just ended with this status of the coordinator.
            asyncio.InvalidStateError: it had ended before, or has just ended with OK; `read` returns or
            raises
                its status.
        """
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            final = await self._final_error(error)
            if final.code() is grpc.StatusCode.OK:
                raise asyncio.InvalidStateError("the coordinator has ended the stream") from None
            raise final from None

    async def read(self) -> wire.ConnectResponse | None:
        """Return the next message; None when the stream ends with OK.

        Raises:
            grpc.aio.AioRpcError: the stream has ended with this status of the coordinator.
        """
        try:
            answer = await self._call.read()
        except grpc.aio.AioRpcError as error:
            final = await self._final_error(error)
            if final.code() is grpc.StatusCode.OK:
                return None
            raise final from None
        return answer if isinstance(answer, wire.ConnectResponse) else None  # None: grpc.aio.EOF

    async def done_writing(self) -> None:
        """Half-close the stream: nothing more will be sent."""
        await self._call.done_writing()

    def cancel(self) -> None:
        """End the stream."""
        self._call.cancel()

    async def _final_error(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """Return the coordinator's status of the stream, which gRPC may have replaced with its own."""
        if not _is_own(error):
            return error
        final = self._first or error
        for _ in range(_CHECKS):
            if not _is_own(final):
                break
            await asyncio.sleep(_STATUS_WITHIN_S / _CHECKS)
            final = await _status(self._call)
        return final

    def _keep(self, call: Any) -> None:
        if self._first is None:
            asking = _status(call)
            try:
                asking.send(None)  # does not wait, as the status is already there
            except StopIteration as answered:
                self._first = answered.value
            asking.close()


async def _status(call: Any) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        await call.code(),
        await call.initial_metadata(),
        await call.trailing_metadata(),
        await call.details(),
        await call.debug_error_string(),
    )


def _is_own(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == _OWN_DETAILS
