"""Messages as JSON and back: protobuf's mapping, with the fields' own names, and default values included."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

from perseus.service.domain.errors import MalformedMessageError

Asked = TypeVar("Asked", bound=Message)

_MAX_DEPTH = 24
"""Bound on nested messages; the contract's deepest has 8 levels."""

_LARGE_BYTES = 16_384
"""A larger message takes milliseconds, so it is made in a thread that takes turns with the loop."""

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

# One large message at a time: more threads would delay the loop's turns.
_maker = ThreadPoolExecutor(1, "json")


def as_json(value: object) -> str:
    """Return plain values as JSON, on one line."""
    return _encode(value)


def to_json(message: Message) -> str:
    """Return a small message as JSON, on one line."""
    return _encode(_plain(message))


async def large_to_json(message: Message) -> str:
    """Return a message of any size as JSON, without blocking the loop."""
    if message.ByteSize() <= _LARGE_BYTES:
        return to_json(message)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_maker, lambda: "".join(_pieces(_plain(message))))


def from_json(text: bytes, kind: type[Asked]) -> Asked:
    """Parse a message from JSON.

    Raises:
        MalformedMessageError: the text is not such a message.
    """
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise json_format.ParseError(f"expected an object, found {type(found).__name__}")
        _encode(found).encode()  # Half a surrogate pair is invalid, and raises SystemErrors in protobuf.
        return json_format.ParseDict(found, kind(), max_recursion_depth=_MAX_DEPTH)
    except (json_format.ParseError, ValueError, RecursionError) as error:
        raise MalformedMessageError(cause=error) from None


def _plain(message: Message) -> Any:
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _pieces(value: Any) -> Iterator[str]:
    """Yield JSON in small pieces: Python's encoder holds the interpreter while it works on one."""
    if isinstance(value, dict) and any(isinstance(inner, dict | list) for inner in value.values()):
        for number, (key, inner) in enumerate(value.items()):
            yield f"{',' if number else '{'}{_encode(key)}:"
            yield from _pieces(inner)
        yield "}"
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        for number, inner in enumerate(value):
            yield "," if number else "["
            yield from _pieces(inner)
        yield "]"
    else:
        yield _encode(value)
