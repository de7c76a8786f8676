"""The services' unary calls over another transport than gRPC: the same adapters, scopes and errors.

The transport names the principal and hands in the request. It gets the response, or a `Refusal` with the
parts of the status that gRPC's callers see.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from perseus.service.api.authentication import calling
from perseus.service.api.rpc_scopes import READERS, RPC_SCOPES, check_scope
from perseus.service.api.statuses import MAPPED, to_status, unexpected
from perseus.service.domain.principals import Principal

_DETAILS = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status in parts. `code` is its name; `retry_delay_s` is None where waiting does not help."""

    code: str
    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_delay_s: float | None = None

    @classmethod
    def of(cls, error: Exception, where: str) -> "Refusal":
        """Return an error as callers see it; log an unexpected one."""
        return _taken_apart(to_status(error if isinstance(error, MAPPED) else unexpected(error, where)))


class CallRefusedError(Exception):
    """An adapter has ended a call."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Call:
    """One unary call.

    Attributes:
        rpc: its full name.
        request_type: type of its request.
        is_reading: whether it only reads.
    """

    rpc: str
    request_type: type[Message]
    is_reading: bool
    _behave: Callable[[Message, object], Awaitable[Message]]

    def check_scope(self, principal: Principal) -> None:
        """Check that a principal may make the call.

        Raises:
            ScopeTooNarrowError: it may not.
        """
        check_scope(self.rpc, principal)

    async def answer(self, principal: Principal, request: Message) -> Message:
        """Make the call as a principal.

        Raises:
            ScopeTooNarrowError: the principal may not make it.
            CallRefusedError: the adapter has refused it.
        """
        self.check_scope(principal)
        with calling(principal):
            return await self._behave(request, _CONTEXT)


def unary_calls(service: ServiceDescriptor, servicer: object, but_for: Collection[str] = ()) -> list[Call]:
    """Return the calls of a service with one request and one response, except those named in `but_for`."""
    return [
        Call(
            rpc := f"/{service.full_name}/{method.name}",
            GetMessageClass(method.input_type),
            RPC_SCOPES[rpc] >= READERS,
            getattr(servicer, method.name),
        )
        for method in service.methods
        if not (method.client_streaming or method.server_streaming or method.name in but_for)
    ]


class _Context:
    """The one method of gRPC's context that adapters need: it ends the call."""

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        raise CallRefusedError(_taken_apart(status))


_CONTEXT = _Context()


def _taken_apart(status: grpc.Status) -> Refusal:
    rich = Status.FromString(cast(bytes, dict(cast(Any, status.trailing_metadata))[_DETAILS]))
    info, retry, retry_delay_s = ErrorInfo(), RetryInfo(), None
    for detail in rich.details:
        detail.Unpack(info)
        if detail.Unpack(retry):
            retry_delay_s = retry.retry_delay.ToNanoseconds() / 1e9
    return Refusal(Code.Name(rich.code), info.reason, rich.message, dict(info.metadata), retry_delay_s)
