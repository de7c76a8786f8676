"""Admission of agents' messages: in order, and only so many in each turn of the event loop.

Thousands of streams may have a message at the same moment, and handling them all would keep the loop from
leases, health checks and the writer for a second. So each turn takes as many as some milliseconds allow, the
others wait in the order in which they came, and all wait while too much work is to be stored. Unread messages
wait with their agents, by HTTP/2's flow control.
"""

import asyncio
from collections import deque
from collections.abc import Callable

TURN_MESSAGES = 64
"""How many messages are taken in one turn of the loop: with batches of an ordinary iteration, some 5 ms."""


class Admission:
    """The readers of agents' streams, in order.

    Args:
        has_room: whether the writer takes more work; whoever makes room calls `resume`.
    """

    def __init__(self, has_room: Callable[[], bool], monotonic: Callable[[], float]) -> None:
        self._has_room = has_room
        self._monotonic = monotonic
        # Readers that wait, how many messages each has, and since when it waits.
        self._waiting: deque[tuple[asyncio.Future[None], int, float]] = deque()
        self._left_count = TURN_MESSAGES
        self._next_turn: asyncio.Handle | None = None

    def is_admitted(self, message_count: int) -> bool:
        """Return whether messages may be handled at once; otherwise `wait` first."""
        if self._waiting or self._left_count <= 0 or not self._has_room():
            return False
        self._take(message_count)
        return True

    async def wait(self, message_count: int) -> None:
        """Wait, behind those who already wait, until messages may be handled."""
        reader: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((reader, message_count, self._monotonic()))
        self.resume()
        await reader

    def resume(self) -> None:
        """Admit readers from the next turn on, if there is room."""
        if self._waiting and self._next_turn is None and self._has_room():
            self._next_turn = asyncio.get_running_loop().call_soon(self._begin_turn)

    @property
    def waiting_count(self) -> int:
        """How many readers wait."""
        return len(self._waiting)

    def waited_s(self) -> float:
        """How long the next reader has waited, seconds."""
        return self._monotonic() - self._waiting[0][2] if self._waiting else 0.0

    def _take(self, message_count: int) -> None:
        self._left_count -= message_count
        if self._next_turn is None:
            self._next_turn = asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._next_turn, self._left_count = None, TURN_MESSAGES
        while self._waiting and self._left_count > 0 and self._has_room():
            reader, message_count, _ = self._waiting.popleft()
            if not reader.done():  # else its stream has ended meanwhile
                reader.set_result(None)
                self._take(message_count)
        self.resume()
