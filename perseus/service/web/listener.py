"""One reader of server-sent events: what waits for it is bounded, and whoever does not read is cut off."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress

from aiohttp import ClientConnectionError, hdrs, web

from perseus.service.api.statuses import MAPPED, STATUSES, unexpected
from perseus.service.domain.errors import LimitReachedError
from perseus.service.web.json_text import as_json

HEARTBEAT_S = 15.0
"""After so long without news a comment is sent: proxies keep the connection, and what is gone is noticed."""

CHECK_S = 1.0
"""How often it is looked whether a quiet reader may still read."""

MOST_WAITING_BYTES = 4 * 2**20
"""For one reader. The bytes themselves are the same for all readers of the same."""

MOST_STREAMS = 512
MOST_STREAMS_OF_ONE = 64

_HEARTBEAT = b": \n\n"
_HEADERS = {
    hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8",
    hdrs.CACHE_CONTROL: "no-store",
    "X-Accel-Buffering": "no",  # proxies of that kind would hold it back
}


def event(name: str, data: str, event_id: str = "") -> bytes:
    """Return a server-sent event; `data` is JSON on one line."""
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {name}\ndata: {data}\n\n".encode()


class Listener:
    """What waits for one reader."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._wake = asyncio.Event()
        self._end_reason = ""
        self._cut_off: Callable[[], None] | None = None

    def tell(self, chunk: bytes) -> None:
        """Tell it something, unless it has ended; one that does not keep up is cut off."""
        if self._end_reason:
            return
        if self._waiting_bytes + len(chunk) > MOST_WAITING_BYTES:
            self._waiting.clear()
            self._waiting_bytes = 0
            self.end("READER_TOO_SLOW")
            if self._cut_off is not None:
                self._cut_off()  # it does not read: it could not be told either
            return
        self._waiting.append(chunk)
        self._waiting_bytes += len(chunk)
        self._wake.set()

    def end(self, reason: str) -> None:
        """End it, once it has read what waits."""
        self._end_reason = self._end_reason or reason
        self._wake.set()

    async def serve(
        self, request: web.Request, check: Callable[[], object], beginning: AsyncIterator[bytes]
    ) -> web.StreamResponse:
        """Send a beginning, and then what it is told, until either side ends it.

        `check` raises AuthenticationError once the reader may read no more: asked before everything sent, and
        while nothing is.
        """
        response = web.StreamResponse(headers=_HEADERS)
        with suppress(ConnectionResetError, ClientConnectionError):  # it is gone, maybe before the first word
            await response.prepare(request)
            transport = request.transport
            if transport is not None:
                self._cut_off = transport.abort
            try:
                async for first in beginning:
                    check()
                    await response.write(first)
                while (chunk := await self._next(check)) is not None:
                    check()
                    await response.write(chunk)
                reason = self._end_reason
            except (ConnectionResetError, ClientConnectionError):
                raise
            except Exception as error:
                told = error if isinstance(error, MAPPED) else unexpected(error, request.path)
                reason = STATUSES[type(told)].reason
            await response.write(event("end", as_json({"reason": reason})))
            await response.write_eof()
        return response

    async def _next(self, check: Callable[[], object]) -> bytes | None:
        """Return what comes next, a heartbeat where nothing comes for long, None at the end."""
        quiet_s = 0.0
        while True:
            if self._waiting:
                chunk = self._waiting.popleft()
                self._waiting_bytes -= len(chunk)
                return chunk
            if self._end_reason:
                return None
            self._wake.clear()
            try:
                async with asyncio.timeout(CHECK_S):
                    await self._wake.wait()
            except TimeoutError:
                check()
                quiet_s += CHECK_S
                if quiet_s >= HEARTBEAT_S:
                    return _HEARTBEAT


class Places:
    """How many streams there may be, of one principal and of all."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    @contextmanager
    def place(self, principal: str) -> Iterator[None]:
        """For the length of a block: one stream more.

        Raises:
            LimitReachedError: it would be too many.
        """
        own, total = self._counts.get(principal, 0) + 1, sum(self._counts.values()) + 1
        for who, count, limit in ((principal, own, MOST_STREAMS_OF_ONE), ("everybody", total, MOST_STREAMS)):
            if count > limit:
                raise LimitReachedError(principal=who, what="event streams at once", limit=limit, found=count)
        self._counts[principal] = own
        try:
            yield
        finally:
            self._counts[principal] -= 1
            if not self._counts[principal]:
                del self._counts[principal]
