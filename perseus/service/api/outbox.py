"""What waits to be sent to one agent: the latest of each thing, and one queue for what must all arrive.

An offer replaces the one that still waits for the same rank, an acknowledgement the one before: a slow
agent gets the newest of each, and takes no memory.
"""

import asyncio
from collections import deque
from collections.abc import Hashable

from perseus.service.domain.errors import CoordinatorError, ReaderTooSlowError
from perseus.v1 import agent_service_pb2

ANSWER_LIMIT = 100_000
"""Answers that may wait (room for all ranks of a large job); an agent that asks on unread is ended."""


class Outbox:
    """Messages on their way to one agent. `take` waits; nothing else does."""

    def __init__(self) -> None:
        self._answers: deque[agent_service_pb2.ConnectResponse] = deque()
        self._latest: dict[Hashable, agent_service_pb2.ConnectResponse] = {}
        self._error: CoordinatorError | None = None
        self._is_closed = False
        self._wake = asyncio.Event()

    def answer(self, message: agent_service_pb2.ConnectResponse) -> None:
        """Queue a message; all of these are sent, in order, before the others."""
        if len(self._answers) >= ANSWER_LIMIT:
            self.end(ReaderTooSlowError(limit=ANSWER_LIMIT))
        else:
            self._answers.append(message)
            self._wake.set()

    def replace(self, key: Hashable, message: agent_service_pb2.ConnectResponse) -> None:
        """Let this message wait in place of the one of the same key."""
        self._latest.pop(key, None)
        self._latest[key] = message
        self._wake.set()

    def drop(self, key: Hashable) -> None:
        """Let nothing of this key wait any more."""
        self._latest.pop(key, None)

    def end(self, error: CoordinatorError) -> None:
        """End the stream instead of sending anything more. The first error counts."""
        self._error = self._error or error
        self._answers.clear()
        self._latest.clear()
        self._wake.set()

    def close(self) -> None:
        """End the stream after what waits now has been sent."""
        self._is_closed = True
        self._wake.set()

    async def take(self) -> tuple[list[agent_service_pb2.ConnectResponse], bool]:
        """Wait for messages; return all, and whether they are the last.

        Raises:
            CoordinatorError: the stream is to end.
        """
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None:
            raise self._error
        messages = [*self._answers, *self._latest.values()]
        self._answers.clear()
        self._latest.clear()
        return messages, self._is_closed
