"""One gRPC stream on its own connection, implemented by hand: a client cheaper than the server under load.

HTTP/2 for one stream (RFC 9113): the preface, the peer's flow control, answers to pings. The peer gets
windows of the protocol's maximum size, so this never updates them; it does not decode the peer's headers.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK = END_STREAM = 1
_END_HEADERS = 4
_STREAM = 1
_SETTING_ENABLE_PUSH, _SETTING_INITIAL_WINDOW = 2, 4
_FIRST_WINDOW, _MAX_WINDOW = 65_535, 2**31 - 1
_MAX_FRAME = 16_384
_PREFIX = 5
"""Prefix of a message: whether it is compressed, and its length."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a serialised frame."""
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header that is not indexed; name and value are shorter than 127 bytes."""
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


_SETTINGS_PAYLOAD = _SETTING_ENABLE_PUSH.to_bytes(2) + (0).to_bytes(4)
_SETTINGS_PAYLOAD += _SETTING_INITIAL_WINDOW.to_bytes(2) + _MAX_WINDOW.to_bytes(4)

OPENING = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + frame(_SETTINGS, 0, 0, _SETTINGS_PAYLOAD)
    + frame(_WINDOW_UPDATE, 0, 0, (_MAX_WINDOW - _FIRST_WINDOW).to_bytes(4))
)


def _request_headers(path: str, authority: str) -> bytes:
    block = b"\x83\x86"  # POST, http: from the static table
    block += literal(b":path", path.encode()) + literal(b":authority", authority.encode())
    block += literal(b"te", b"trailers") + literal(b"content-type", b"application/grpc")
    return frame(_HEADERS, _END_HEADERS, _STREAM, block)


class GrpcStream(asyncio.Protocol):
    """A bidirectional call. `received` gets every message, `ended` the reason of the end, at most once."""

    def __init__(
        self, path: str, authority: str, received: Callable[[bytes], None], ended: Callable[[str], None]
    ) -> None:
        self._opening = OPENING + _request_headers(path, authority)
        self._received = received
        self._ended: Callable[[str], None] | None = ended
        self._transport: asyncio.Transport | None = None
        self._input = b""
        self._message = b""
        self._window = _FIRST_WINDOW
        self._stream_window = _FIRST_WINDOW
        self._peers_initial_window = _FIRST_WINDOW
        self._waiting: deque[bytes] = deque()

    @classmethod
    async def open(
        cls, target: str, path: str, received: Callable[[bytes], None], ended: Callable[[str], None]
    ) -> "GrpcStream":
        """Connect. OSError without a listener."""
        host, _, port = target.rpartition(":")
        _, protocol = await asyncio.get_running_loop().create_connection(
            lambda: cls(path, target, received, ended), host, int(port)
        )
        return protocol

    def send(self, *messages: bytes) -> None:
        """Send messages, or keep them until the peer's windows have room."""
        frames = []
        for message in messages:
            data = b"\x00" + len(message).to_bytes(4) + message
            for first in range(0, len(data), _MAX_FRAME):
                part = data[first : first + _MAX_FRAME]
                if self._waiting or len(part) > min(self._window, self._stream_window):
                    self._waiting.append(part)
                else:
                    frames.append(self._data(part))
        if frames and self._transport is not None:
            self._transport.write(b"".join(frames))

    def close(self) -> None:
        """Close the connection, without further callbacks."""
        self._ended = None
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Drop the connection and unsent data, without further callbacks."""
        self._ended = None
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._opening)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(repr(exc) if exc is not None else "the connection was closed")

    def data_received(self, data: bytes) -> None:
        buffer = self._input + data if self._input else data
        at, size = 0, len(buffer)
        while size - at >= 9:
            length = int.from_bytes(buffer[at : at + 3])
            if size - at < 9 + length:
                break
            payload = buffer[at + 9 : at + 9 + length]
            self._take(buffer[at + 3], buffer[at + 4], int.from_bytes(buffer[at + 5 : at + 9]), payload)
            at += 9 + length
        self._input = buffer[at:]

    # ------------------------------------------------------------------ frames

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            self._take_data(payload)
        elif kind == _PING and not flags & _ACK:
            self._write(frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            room = int.from_bytes(payload)
            if stream == 0:
                self._window += room
            else:
                self._stream_window += room
            self._send_waiting()
        elif kind == _SETTINGS and not flags & _ACK:
            for at in range(0, len(payload), 6):
                if int.from_bytes(payload[at : at + 2]) == _SETTING_INITIAL_WINDOW:
                    initial = int.from_bytes(payload[at + 2 : at + 6])
                    self._stream_window += initial - self._peers_initial_window
                    self._peers_initial_window = initial
            self._write(frame(_SETTINGS, _ACK, 0, b""))
            self._send_waiting()
        elif kind in (_RST_STREAM, _GOAWAY) or (kind == _HEADERS and flags & END_STREAM):
            self._end(f"frame {kind}: {payload!r}")

    def _take_data(self, payload: bytes) -> None:
        message = self._message + payload if self._message else payload
        at, size = 0, len(message)
        while self._ended is not None and size - at >= _PREFIX:
            end = at + _PREFIX + int.from_bytes(message[at + 1 : at + _PREFIX])
            if size < end:
                break
            self._received(message[at + _PREFIX : end])
            at = end
        self._message = message[at:]

    def _data(self, part: bytes) -> bytes:
        self._window -= len(part)
        self._stream_window -= len(part)
        return frame(_DATA, 0, _STREAM, part)

    def _send_waiting(self) -> None:
        while self._waiting and len(self._waiting[0]) <= min(self._window, self._stream_window):
            self._write(self._data(self._waiting.popleft()))

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _end(self, why: str) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            if self._transport is not None:
                self._transport.close()
            ended(why)
