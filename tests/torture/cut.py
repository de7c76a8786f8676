"""A way to a database that can be cut without a word, as by a switch that fails: nothing arrives any more."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CHUNK_BYTES = 65_536


class Cut:
    """Forwards connections on a port of loopback to a Unix socket, unless it is cut."""

    def __init__(self, socket: Path) -> None:
        self.port = 0
        self._socket = socket
        self._loop = asyncio.new_event_loop()
        self._is_whole = asyncio.Event()
        self._is_listening = threading.Event()
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Forward nothing more, and answer no new connection."""
        self._loop.call_soon_threadsafe(self._is_whole.clear)

    def mend(self) -> None:
        """Reset what was open, and forward new connections."""
        self._loop.call_soon_threadsafe(self._reset)

    def stop(self) -> None:
        """End `run`."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def wait_until_listening(self) -> None:
        """Wait until the port is known."""
        assert self._is_listening.wait(10.0), "expected a port"

    def run(self) -> None:
        """Forward until `stop`."""
        self._is_whole.set()
        server = self._loop.run_until_complete(asyncio.start_server(self._forward, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._is_listening.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for each in tasks:
            each.cancel()
        self._loop.run_until_complete(asyncio.wait(tasks) if tasks else asyncio.sleep(0))
        self._loop.run_until_complete(asyncio.sleep(0))  # their connections are closed
        self._loop.close()

    def _reset(self) -> None:
        for each in self._writers:
            each.transport.abort()
        self._is_whole.set()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened = [writer]
        try:
            with suppress(OSError, asyncio.CancelledError):
                await self._is_whole.wait()
                theirs, ours = await asyncio.open_unix_connection(self._socket)
                opened.append(ours)
                await asyncio.gather(self._pump(reader, ours), self._pump(theirs, writer))
        finally:
            for each in opened:  # pumps that are cancelled before they begin close nothing
                each.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while data := await reader.read(_CHUNK_BYTES):
                await self._is_whole.wait()
                writer.write(data)
                await writer.drain()
        finally:
            self._writers.discard(writer)
            writer.close()


@contextmanager
def way_to(socket: Path) -> Iterator[Cut]:
    """Forward to a socket for the length of the block."""
    found = Cut(socket)
    thread = threading.Thread(target=found.run)
    thread.start()
    try:
        found.wait_until_listening()
        yield found
    finally:
        found.stop()
        thread.join()
