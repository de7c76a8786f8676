"""Messages that wait to be sent to one agent: a queue of those that must all arrive, and the latest of
others.

An offer replaces one that still waits for the same rank, an acknowledgement the one before: a slow agent gets
the newest of each. All messages together have a bound in bytes; an agent that exceeds it does not read, and
its stream is ended.
"""

import asyncio
from collections import deque
from collections.abc import Hashable

from perseus.service.api.translate_agents import EncodedOffer
from perseus.service.domain.errors import CoordinatorError, ReaderTooSlowError
from perseus.v1 import agent_service_pb2

Answer = agent_service_pb2.ConnectResponse | EncodedOffer
"""What is sent to an agent."""

BYTES_LIMIT = 16 * 2**20
"""Bytes that may wait: enough for the orders and the plans of eight ranks with 65,536 computations each."""

_OVERHEAD_BYTES = 128
"""Memory of an empty message while it waits."""

_TAKE_BATCH = 32


class Outbox:
    """Messages on their way to one agent. Only `take` waits.

    Attributes:
        ended: done with the reason once the stream must end without sending anything more.
    """

    def __init__(self) -> None:
        self.ended: asyncio.Future[CoordinatorError] = asyncio.get_running_loop().create_future()
        self._queue: deque[agent_service_pb2.ConnectResponse] = deque()
        self._latest: dict[Hashable, Answer] = {}
        self._acknowledged: int | None = None
        self._bytes = 0
        self._is_closed = False
        # The waiting call of `take`. A future, because an asyncio.Event costs twice as much.
        self._taker: asyncio.Future[None] | None = None

    def enqueue(self, message: agent_service_pb2.ConnectResponse) -> None:
        """Queue a message; queued messages are sent in order, before the others."""
        if not self.ended.done():
            self._queue.append(message)
            self._grow(message)

    def replace(self, key: Hashable, message: Answer) -> None:
        """Put a message in place of one with the same key that still waits."""
        if not self.ended.done():
            self.drop(key)
            self._latest[key] = message
            self._grow(message)

    def acknowledge(self, sequence: int) -> None:
        """Put an acknowledgement in place of one that still waits."""
        if not self.ended.done():
            self._acknowledged = sequence
            self._wake()

    def drop(self, key: Hashable) -> None:
        """Drop the message of a key if it still waits."""
        if (message := self._latest.pop(key, None)) is not None:
            self._bytes -= _size(message)

    def end(self, error: CoordinatorError) -> None:
        """End the stream without sending anything more. The first error counts."""
        if not self.ended.done():
            self.ended.set_result(error)
        self._queue.clear()
        self._latest.clear()
        self._acknowledged = None
        self._bytes = 0
        self._wake()

    def close(self) -> None:
        """End the stream after the waiting messages have been sent."""
        self._is_closed = True
        self._wake()

    async def take(self) -> tuple[list[Answer], bool]:
        """Wait for messages; return the next few, and whether they are the last.

        Raises:
            CoordinatorError: the stream must end.
        """
        is_empty = not self._queue and not self._latest and self._acknowledged is None
        if is_empty and not self._is_closed and not self.ended.done():
            self._taker = self.ended.get_loop().create_future()
            await self._taker
        if self.ended.done():
            raise self.ended.result()
        messages: list[Answer] = [self._queue.popleft() for _ in range(min(len(self._queue), _TAKE_BATCH))]
        while self._latest and len(messages) < _TAKE_BATCH:
            messages.append(self._latest.pop(next(iter(self._latest))))
        self._bytes -= sum(map(_size, messages))
        if self._acknowledged is not None and not self._queue:
            messages.append(_acknowledgement(self._acknowledged))
            self._acknowledged = None
        has_more = bool(self._queue or self._latest)
        return messages, self._is_closed and not has_more

    def _grow(self, message: Answer) -> None:
        size = _size(message)
        # A single message is never too much: otherwise a large one could never be sent.
        if self._bytes and self._bytes + size > BYTES_LIMIT:
            self.end(ReaderTooSlowError(limit=BYTES_LIMIT))
            return
        self._bytes += size
        self._wake()

    def _wake(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)


def _acknowledgement(sequence: int) -> agent_service_pb2.ConnectResponse:
    message = agent_service_pb2.TelemetryAck(sequence=sequence)
    return agent_service_pb2.ConnectResponse(telemetry_ack=message)


def _size(message: Answer) -> int:
    return _OVERHEAD_BYTES + message.ByteSize()
