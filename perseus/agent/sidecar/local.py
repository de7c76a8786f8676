"""The local socket: packets in and out between the agent and the trainers' probes.

OSError
 └─ SocketInUseError     another agent, or something else, has the path
"""

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from perseus.agent.link.packets import MAX_PACKET_BYTES, Message, Reply, decode, encode

_log = structlog.get_logger(__name__)

_BACKLOG = 128
_MAX_PATH_BYTES = 107  # sockaddr_un, less the final zero
# A trainer that floods its socket must not keep others from being heard.
_PACKETS_IN_A_ROW = 64


class SocketInUseError(OSError):
    """The socket's path is taken."""


class Line:
    """The agent's end of one probe's connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray(MAX_PACKET_BYTES + 1)  # one byte more, so that a truncated packet shows
        self._packets_in_a_row = 0

    async def receive(self) -> Message | None:
        """The next message; None when the probe's end is closed. MalformedPacket for what is none."""
        loop = asyncio.get_running_loop()
        self._packets_in_a_row += 1
        if self._packets_in_a_row == _PACKETS_IN_A_ROW:
            self._packets_in_a_row = 0
            await asyncio.sleep(0)
        while True:
            try:
                size = await loop.sock_recv_into(self._socket, self._buffer)
            except ConnectionResetError:
                # The probe left without reading a reply. Linux says so once, before what is still queued.
                continue
            return decode(memoryview(self._buffer)[:size]) if size else None

    def reply(self, reply: Reply) -> None:
        """Answer; a probe that is gone, or does not read, is not waited for."""
        with contextlib.suppress(OSError):
            self._socket.send(encode(reply))

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


class LocalServer:
    """Listens at `path` and gives each connection to `serve`, which need not close it."""

    def __init__(self, path: Path, serve: Callable[[Line], Awaitable[None]]) -> None:
        self._path = path
        self._serve = serve
        self._listener = _listen(path)
        self._lines: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Stop listening, end all connections and remove the socket."""
        tasks = [self._accepting, *self._lines]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        self._path.unlink(missing_ok=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listener)
            connection.setblocking(False)
            task = asyncio.create_task(self._converse(Line(connection)))
            self._lines.add(task)
            task.add_done_callback(self._lines.discard)

    async def _converse(self, line: Line) -> None:
        try:
            await self._serve(line)
        except Exception:  # of one trainer's conversation; the others go on
            _log.exception("connection failed")
        finally:
            line.close()


def _listen(path: Path) -> socket.socket:
    """A listening socket at `path`, whose folder is made where it is missing.

    It is put into place only when it listens: whoever sees it can connect. Any user may connect, since
    trainers do not run as the agent's user; access is restricted by the folder's permissions.
    """
    size = len(os.fsencode(path))
    if size > _MAX_PATH_BYTES:
        raise OSError(f"{path}: expected a socket path of at most {_MAX_PATH_BYTES} bytes, found {size}")
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    _check_free(path)
    unfinished = path.with_name(f".{os.getpid()}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(unfinished))
        unfinished.chmod(0o666)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        unfinished.rename(path)
    except BaseException:
        listener.close()
        unfinished.unlink(missing_ok=True)
        raise
    return listener


def _check_free(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketInUseError(f"{path}: expected no file, or an agent's socket, found something else")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return  # left by an agent that died
        except OSError as error:
            raise SocketInUseError(f"{path}: expected an agent's socket, found another: {error}") from error
    raise SocketInUseError(f"{path}: expected no agent there, found one that listens")
