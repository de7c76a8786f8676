"""The channel of commands: answers are safe to print, and calls go to the coordinator that has to answer."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

from perseus.cli.progress import working
from perseus.cli.terminal import warn
from perseus.printable import printable

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

    from perseus.tls.channels import Channels

_TAKEOVER_S = 60.0
"""How long a stream waits for a coordinator that takes over, or comes back."""
_RETRY_S = 0.5


class EscapingChannel:
    """A channel that makes all text in its answers printable, because other people wrote it.

    It has the part of a channel that the contract's stubs use. Unless it `stays` with its coordinator, a call
    that another one has to answer is made there, and a stream goes on at the one that takes over. With a
    description, it shows that it waits for an answer.
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

    def diagnosis(self) -> str | None:
        """Return why that one can't be reached, if that can be determined."""
        return self._channels.diagnosis_blocking()

    def to(self, address: str) -> "EscapingChannel | None":
        """Return a channel that stays at a named address; None if that may not be followed."""
        channels = self._channels.at(address)
        return EscapingChannel(channels, self._description, stays=True) if channels is not None else None

    def move_on(self, error: "grpc.RpcError") -> bool:
        """Go on to the next coordinator, as `Channels.move_on`."""
        should_wait = self._channels.move_on(error)
        self._reopen()
        return should_wait

    def unary_unary(self, method: str, *, response_deserializer: "_Read", **options: Any) -> Any:
        """Wrap `grpc.Channel.unary_unary`."""
        import grpc

        read = _escaping(response_deserializer)

        def ask(*arguments: Any, **more: Any) -> "Message":
            self._channels = self._channels.beside()
            while True:
                call = self._channel.unary_unary(method, response_deserializer=read, **options)
                try:
                    with nullcontext() if self._description is None else working(self._description):
                        answer: Message = call(*arguments, **more)
                    return answer
                except grpc.RpcError as error:
                    if not self._follow(error):
                        raise

        return ask

    def unary_stream(self, method: str, *, response_deserializer: "_Read", **options: Any) -> Any:
        """Wrap `grpc.Channel.unary_stream`; a request that is changed meanwhile is sent so to the next."""
        import grpc

        read = _escaping(response_deserializer)

        def ask(*arguments: Any, **more: Any) -> "Iterator[Message]":
            self._channels = self._channels.beside()
            was_heard = False
            lost_s: float | None = None
            while True:
                call = self._channel.unary_stream(method, response_deserializer=read, **options)
                try:
                    for message in call(*arguments, **more):
                        was_heard, lost_s = True, None
                        yield message
                    return
                except grpc.RpcError as error:
                    if self._follow(error):
                        continue
                    is_lost = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
                    if self._stays or not (was_heard and is_lost):
                        raise
                    if lost_s is None:
                        lost_s = time.monotonic()
                        warn(f"{self.address} has gone: waiting {_TAKEOVER_S:g} s for it or another one")
                    if time.monotonic() > lost_s + _TAKEOVER_S:
                        raise
                    if self.move_on(error):
                        time.sleep(_RETRY_S)

        return ask

    def _follow(self, error: "grpc.RpcError") -> bool:
        if self._stays or not self._channels.follow(error):
            return False
        self._reopen()
        return True

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
