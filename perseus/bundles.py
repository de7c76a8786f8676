"""Several messages on an agent's stream as one; for both of its ends. Pure."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from perseus.v1.agent_service_pb2 import ConnectRequest, ConnectResponse

M = TypeVar("M", ConnectRequest, ConnectResponse)

MAX_MESSAGES = 256
"""Messages in a bundle, as the contract says."""

MAX_BYTES = 2**20
"""The largest bundle taken: a thousand batches of an ordinary iteration. A larger message comes alone."""

_HEADER_BYTES = 6
"""At most, before each message in a bundle and before all of them: a tag and a length."""


def bundled(messages: Sequence[M], max_bytes: int) -> Iterator[M]:
    """Yield messages in order, together in bundles of at most `max_bytes`; 0 if the peer takes none."""
    together: list[M] = []
    size = _HEADER_BYTES
    for message in messages:
        own_size = _HEADER_BYTES + message.ByteSize() if max_bytes else 0
        if together and (not max_bytes or size + own_size > max_bytes or len(together) == MAX_MESSAGES):
            yield _bundle(together)
            together, size = [], _HEADER_BYTES
        together.append(message)
        size += own_size
    if together:
        yield _bundle(together)


def _bundle(messages: Sequence[M]) -> M:
    if len(messages) == 1:
        return messages[0]
    bundle = type(messages[0])()
    bundle.bundle.messages.extend(messages)
    return bundle
