"""The channel of commands: answers are safe to print, and calls go to the coordinator that has to answer."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from perseus.cli.progress import working
from perseus.cli.takeover import LIMIT_S, Takeover
from perseus.cli.terminal import warn
from perseus.printable import printable

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

    from perseus.tls.channels import Channels

RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Failure:
    """Where a call has failed in the end, and what was heard of a takeover, for people."""

    channels: "Channels"
    takeover: str


def failure_of(error: "grpc.RpcError") -> Failure | None:
    """Return where a call on one of these channels has failed."""
    return getattr(error, "failure", None)


class EscapingChannel:
    """A channel that makes all text in its answers printable, because other people wrote it.

    It has the part of a channel that the contract's stubs use. Unless it `stays` with its coordinator, a call
    that another one has to answer is made there, and goes on at the one that takes over. With a description,
    it shows that it waits for an answer, and waits for a takeover.
    """

    def __init__(
        self, channels: "Channels", description: str | None = "Asking", *, stays: bool = False
    ) -> None:
        self._channels = channels
        self._description = description
        self._stays = stays
        self._channel = channels.open_blocking()

    def __enter__(self) -> "EscapingChannel":
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()

    @property
    def as_grpc(self) -> "grpc.Channel":
        """Itself, as the contract's stubs take it."""
        return cast("grpc.Channel", self)

    @property
    def address(self) -> str:
        """The address of the coordinator that it was last connected to."""
        return self._channels.address

    def to(self, address: str) -> "EscapingChannel | None":
        """Return a channel that stays at a named address; None if that may not be followed."""
        channels = self._channels.at(address)
        return EscapingChannel(channels, self._description, stays=True) if channels is not None else None

    def move_on(self, error: "grpc.RpcError") -> None:
        """Go on to the next coordinator, as `Channels.move_on`."""
        self._channels.move_on(error)
        self._reopen()

    def unary_unary(self, method: str, *, response_deserializer: "_Read", **options: Any) -> Any:
        """Wrap `grpc.Channel.unary_unary`."""
        import grpc

        read = _escaping(response_deserializer)

        def ask(*arguments: Any, **more: Any) -> "Message":
            self._channels = self._channels.beside()
            takeover = Takeover(method)
            while True:
                call = self._channel.unary_unary(method, response_deserializer=read, **options)
                try:
                    with nullcontext() if self._description is None else working(self._description):
                        answer: Message = call(*arguments, **more)
                    return answer
                except grpc.RpcError as error:
                    self._go_on(error, takeover)

        return ask

    def unary_stream(self, method: str, *, response_deserializer: "_Read", **options: Any) -> Any:
        """Wrap `grpc.Channel.unary_stream`; a request that is changed meanwhile is sent so to the next."""
        import grpc

        read = _escaping(response_deserializer)

        def ask(*arguments: Any, **more: Any) -> "Iterator[Message]":
            self._channels = self._channels.beside()
            takeover = Takeover(method)
            was_heard = False
            while True:
                call = self._channel.unary_stream(method, response_deserializer=read, **options)
                try:
                    for message in call(*arguments, **more):
                        was_heard, takeover = True, Takeover(method)
                        yield message
                    return
                except grpc.RpcError as error:
                    self._go_on(error, takeover, was_heard=was_heard)

        return ask

    def _go_on(self, error: "grpc.RpcError", takeover: Takeover, *, was_heard: bool = False) -> None:
        """Go on to where a failed call may succeed, perhaps later; else raise its error."""
        if not self._stays:
            may_repeat = takeover.may_repeat(self.address, error)
            if self._channels.follow(error):
                self._reopen()
                return
            takeover.tried_count += 1
            if may_repeat and takeover.tried_count < self._channels.address_count:
                self.move_on(error)
                return
            trouble = takeover.text() or (f"{takeover.failed_at} has gone" if was_heard else "")
            if may_repeat and trouble and self._description is not None:
                if takeover.end_s is None:
                    warn(f"{trouble}: waiting {LIMIT_S:g} s for a coordinator")
                if takeover.may_wait(time.monotonic()):
                    time.sleep(RETRY_S)
                    takeover.tried_count = 0
                    self.move_on(error)
                    return
        error.failure = Failure(self._channels.beside(), takeover.text())  # type: ignore[attr-defined]
        raise error

    def _reopen(self) -> None:
        self._channel.close()
        self._channel = self._channels.open_blocking()


_Read = Callable[[bytes], "Message"]


def _escaping(read: _Read) -> _Read:
    def read_escaped(data: bytes) -> "Message":
        message = read(data)
        escape(message)
        return message

    return read_escaped


def escape(message: "Message") -> None:
    """Make every text in a message printable."""
    for field, value in message.ListFields():
        is_repeated = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        if field.cpp_type == field.CPPTYPE_STRING and field.type == field.TYPE_STRING:
            if is_repeated:
                value[:] = [printable(text) for text in value]
            else:
                setattr(message, field.name, printable(value))
        elif field.message_type is not None:
            for part in value if is_repeated else (value,):
                escape(part)
