"""Streams of server-sent events: each made once for all its readers, and bounded for each of them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from aiohttp import ClientConnectionError, hdrs, web

from perseus.service.api.statuses import MAPPED, MappedError, reason_of, unexpected
from perseus.service.domain.errors import LimitReachedError
from perseus.service.web.json_text import as_json

HEARTBEAT_S = 15.0
"""After this long without news a comment is sent: it keeps proxies' connections open and reveals dead
ones."""

CHECK_S = 1.0
"""How often a quiet reader's permission is checked."""

MAX_WAITING_BYTES = 4 * 2**20
"""Bound for one reader. The bytes themselves are shared by all readers of the same stream."""

MAX_STREAMS = 512
MAX_STREAMS_OF_ONE = 64

_HEARTBEAT = b": \n\n"
_HEADERS = {
    hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8",
    hdrs.CACHE_CONTROL: "no-store",
    "X-Accel-Buffering": "no",  # nginx and its like would buffer the stream
}


def event(name: str, data: str, event_id: str = "") -> bytes:
    """Return a server-sent event; `data` is JSON on one line."""
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {name}\ndata: {data}\n\n".encode()


class Reader:
    """One reader's end of a stream: the chunks that wait for it."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._wake = asyncio.Event()
        self._end_reason = ""
        self._cut_off: Callable[[], None] | None = None

    def send(self, chunk: bytes) -> None:
        """Queue a chunk, unless the reader has ended; cut off a reader that does not keep up."""
        if self._end_reason:
            return
        if self._waiting_bytes + len(chunk) > MAX_WAITING_BYTES:
            self._waiting.clear()
            self._waiting_bytes = 0
            self.end("READER_TOO_SLOW")
            if self._cut_off is not None:
                self._cut_off()  # it does not read, so it would not get the event `end` either
            return
        self._waiting.append(chunk)
        self._waiting_bytes += len(chunk)
        self._wake.set()

    def end(self, reason: str) -> None:
        """End the stream for this reader, after the waiting chunks."""
        self._end_reason = self._end_reason or reason
        self._wake.set()

    async def serve(
        self, request: web.Request, check: Callable[[], object], opening: AsyncIterator[bytes]
    ) -> web.StreamResponse:
        """Write the opening, and then the queue, until either side ends the stream.

        `check` is called before every write, and regularly while nothing is written; it raises
        AuthenticationError once the reader may read no more.
        """
        response = web.StreamResponse(headers=_HEADERS)
        with suppress(ConnectionResetError, ClientConnectionError):  # the reader has gone
            await response.prepare(request)
            transport = request.transport
            if transport is not None:
                self._cut_off = transport.abort
            try:
                async for first in opening:
                    check()
                    await response.write(first)
                while (chunk := await self._next(check)) is not None:
                    check()
                    await response.write(chunk)
                reason = self._end_reason
            except (ConnectionResetError, ClientConnectionError):
                raise
            except Exception as error:
                reason = reason_of(_mapped(error, request.path))
            await response.write(event("end", as_json({"reason": reason})))
            await response.write_eof()
        return response

    async def _next(self, check: Callable[[], object]) -> bytes | None:
        """Return the next chunk, a heartbeat after a long silence, or None at the end."""
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


class EventSource(Protocol):
    """The source of a stream."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield chunks of news, b"" where there is none. Openings are available after the first one."""

    def opening(self, after: tuple[int, int] | None) -> AsyncIterator[bytes]:
        """Return the chunks that a new reader gets first, up to the last chunk yielded so far.

        `after`: the run and the event after which the reader wants to begin, if it asks for that; run 0 is
        the latest one.
        """


class EventStream:
    """One source's events, sent to all readers."""

    def __init__(self, name: str, source: EventSource) -> None:
        self.user_count = 0  # readers, and those who wait until it is ready
        self.end_reason = ""
        self._name = name
        self._source = source
        self._readers: set[Reader] = set()
        self._is_ready = asyncio.Event()
        self._error: Exception | None = None
        self._task = asyncio.create_task(self._run())

    async def join(self, reader: Reader, after: tuple[int, int] | None) -> AsyncIterator[bytes]:
        """Add a reader once the source is ready; return its opening, which the source's next chunk follows.

        Raises:
            Exception: the source failed.
        """
        await self._is_ready.wait()
        if self._error is not None:
            raise self._error
        self._readers.add(reader)
        if self.end_reason:
            reader.end(self.end_reason)
        return self._source.opening(after)

    def leave(self, reader: Reader) -> None:
        """Remove a reader."""
        self._readers.discard(reader)

    def end(self, reason: str) -> None:
        """End the stream for all readers."""
        self.end_reason = self.end_reason or reason
        self._is_ready.set()
        for reader in self._readers:
            reader.end(self.end_reason)

    async def close(self) -> None:
        """Stop the source."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            async for chunk in self._source.chunks():
                self._is_ready.set()
                if chunk:
                    for reader in self._readers:
                        reader.send(chunk)
            self.end("RUN_ENDED")
        except Exception as error:
            self._error = _mapped(error, self._name)
            self.end(reason_of(self._error))


class EventStreams:
    """The streams that have readers, by their names."""

    def __init__(self) -> None:
        self._streams: dict[str, EventStream] = {}
        self._counts: dict[str, int] = {}  # of readers, by principal

    @asynccontextmanager
    async def reading(
        self, principal: str, name: str, open_source: Callable[[], EventSource], after: tuple[int, int] | None
    ) -> AsyncIterator[tuple[Reader, AsyncIterator[bytes]]]:
        """Yield, for the length of a block, a reader of a stream and its opening.

        The first reader opens the source.

        Raises:
            LimitReachedError: the principal, or all together, would have too many readers.
            CoordinatorError: the source failed, for example because the job does not exist.
        """
        own, total = self._counts.get(principal, 0) + 1, sum(self._counts.values()) + 1
        for who, count, limit in ((principal, own, MAX_STREAMS_OF_ONE), ("everybody", total, MAX_STREAMS)):
            if count > limit:
                raise LimitReachedError(principal=who, what="event streams at once", limit=limit, found=count)
        stream = self._streams.get(name)
        if stream is None or stream.end_reason:
            stream = self._streams[name] = EventStream(name, open_source())
        reader = Reader()
        stream.user_count += 1
        self._counts[principal] = own
        try:
            yield reader, await stream.join(reader, after)
        finally:
            self._counts[principal] -= 1
            if not self._counts[principal]:
                del self._counts[principal]
            stream.leave(reader)
            stream.user_count -= 1
            if not stream.user_count:
                if self._streams.get(name) is stream:
                    del self._streams[name]
                await stream.close()

    def end(self, reason: str) -> None:
        """End all streams."""
        for stream in self._streams.values():
            stream.end(reason)


def _mapped(error: Exception, where: str) -> MappedError:
    return error if isinstance(error, MAPPED) else unexpected(error, where)
