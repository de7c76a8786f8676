"""Several messages on an agent's stream as one; for both of its ends. Pure."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from perseus.v1.agent_service_pb2 import ConnectRequest, ConnectResponse, ConnectResponseBundle

T = TypeVar("T")
M = TypeVar("M", ConnectRequest, ConnectResponse)

MAX_MESSAGES = 256
"""Messages in a bundle, as the contract says."""

MAX_BYTES = 2**20
"""The largest bundle taken: a thousand batches of an ordinary iteration. A larger message comes alone."""

_HEADER_BYTES = 6
"""At most, before each message in a bundle and before all of them: a tag and a length."""


_MESSAGES = ConnectResponseBundle.MESSAGES_FIELD_NUMBER


def bundled(messages: Sequence[M], max_bytes: int) -> Iterator[M]:
    """Yield messages in order, together in bundles of at most `max_bytes`; 0 if the peer takes none."""
    for some in _together(messages, [message.ByteSize() for message in messages], max_bytes):
        if len(some) == 1:
            yield some[0]
            continue
        bundle = type(some[0])()
        bundle.bundle.messages.extend(some)
        yield bundle


def encoded_bundles(messages: Sequence[bytes], max_bytes: int) -> Iterator[bytes]:
    """Yield the coordinator's encoded messages like `bundled`."""
    for some in _together(messages, [len(message) for message in messages], max_bytes):
        if len(some) == 1:
            yield some[0]
        else:
            inner = b"".join([encoded_field(_MESSAGES, message) for message in some])
            yield encoded_field(ConnectResponse.BUNDLE_FIELD_NUMBER, inner)


def encoded_field(number: int, data: bytes) -> bytes:
    """Return an encoded message as a field of a message around it, by the field's number below 16."""
    header, size = bytearray((number << 3 | 2,)), len(data)
    while size > 0x7F:
        header.append(size & 0x7F | 0x80)
        size >>= 7
    header.append(size)
    return bytes(header) + data


def _together(messages: Sequence[T], sizes: Sequence[int], max_bytes: int) -> Iterator[Sequence[T]]:
    first, size = 0, _HEADER_BYTES
    for index, own_size in enumerate(sizes):
        own_size += _HEADER_BYTES
        is_full = not max_bytes or size + own_size > max_bytes or index - first == MAX_MESSAGES
        if first < index and is_full:
            yield messages[first:index]
            first, size = index, _HEADER_BYTES
        size += own_size
    if messages:
        yield messages[first:]
