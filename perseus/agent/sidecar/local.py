"""The local socket: packets in and out between the agent and the trainers' probes.

Anybody who may connect may also misbehave, so nothing here is without a limit: connections of a user, and all
together; the time until a connection's hello; the bytes read of a user in a second; what is read on the loop
rather than in a thread. What exceeds a limit concerns its user alone.
"""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from perseus.agent.link.packets import (
    MAX_PACKET_BYTES,
    SMALL_PACKET_BYTES,
    MalformedPacket,
    Message,
    Reply,
    decode,
    encode,
    is_quick,
)
from perseus.agent.sidecar.allowance import ALL_BYTES_PER_S, HELLO_BYTES, USER_BYTES_PER_S, Allowance
from perseus.agent.sidecar.complaints import Complaints
from perseus.agent.sidecar.listening import Listener, SocketAccess
from perseus.agent.sidecar.peer import Peer, UnknownPeerError, identify

_log = structlog.get_logger(__name__)

HELLO_TIMEOUT_S = 5.0
MAX_CONNECTIONS_PER_USER = 64
"""A trainer has one; no node has more GPUs."""

_MAX_CONNECTIONS = 4096
_MAX_FILES = 65_536
# A connection needs two: its socket, and its peer's pidfd. The rest is for everything else that the agent has
# open.
_FILES_PER_CONNECTION = 2
_FILES_FOR_ALL_ELSE = 256
# A trainer that floods its socket must not keep others from being heard, nor must those that connect.
_PACKETS_IN_A_ROW = 64
_ACCEPTED_IN_A_ROW = 16
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NO_ROOM_PAUSE_S = 0.2
# Deflated JSON grows, and what it grows to has to be read.
_INFLATED_COST = 16

# Packets are copied out of it before anybody else's turn comes. One byte more, so that a truncated packet
# shows.
_buffer = bytearray(MAX_PACKET_BYTES + 1)


class Line:
    """The agent's end of one probe's connection."""

    def __init__(
        self,
        connection: socket.socket,
        peer: Peer,
        allowance: Allowance | None = None,
        readers: ThreadPoolExecutor | None = None,
    ) -> None:
        self.peer = peer
        self._socket = connection
        self._allowance = allowance or Allowance(time.monotonic())
        self._readers = readers
        self._packets_in_a_row = 0
        self._has_ended = False  # the peer: nothing is added to what is queued
        self._is_over = False  # we: nothing is read any more
        self._waiting: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        if peer.pidfd is not None:
            self._loop.add_reader(peer.pidfd, self._peer_ended)

    async def receive(self) -> Message | None:
        """The next message; None when the probe or its process is gone. MalformedPacket for what is none."""
        self._packets_in_a_row += 1
        if self._packets_in_a_row == _PACKETS_IN_A_ROW:
            self._packets_in_a_row = 0
            await asyncio.sleep(self._allowance.wait_s())
        size = await self._receive_into_buffer()
        packet = memoryview(_buffer)[:size]
        if is_quick(packet):
            self._allowance.spend(size, time.monotonic())
            return decode(packet) if size else None
        self._allowance.spend(size * _INFLATED_COST, time.monotonic())
        message = await self._loop.run_in_executor(self._readers, decode, bytes(packet))
        await asyncio.sleep(self._allowance.wait_s())
        return message

    async def pay_hello(self) -> None:
        """Wait until its user may have one more hello looked into."""
        self._allowance.spend(HELLO_BYTES, time.monotonic())
        await asyncio.sleep(self._allowance.wait_s())

    async def receive_small(self) -> Message | None:
        """As `receive`, of one who is not known yet: MalformedPacket for what would take long to read."""
        size = await self._receive_into_buffer()
        packet = memoryview(_buffer)[:size]
        if not is_quick(packet):
            raise MalformedPacket(
                f"packet: expected a hello of at most {SMALL_PACKET_BYTES} bytes, not deflated, found {size}"
            )
        return decode(packet) if size else None

    async def _receive_into_buffer(self) -> int:
        """The size of the next packet; 0 at the end."""
        while not self._is_over:
            try:
                return self._socket.recv_into(_buffer)
            except BlockingIOError:
                if self._has_ended:
                    break
                await self._readable()
            except ConnectionResetError:
                # The probe left without reading a reply. Linux says so once, before what is still queued.
                continue
        return 0

    async def _readable(self) -> None:
        self._waiting = self._loop.create_future()
        self._loop.add_reader(self._socket, self._wake)
        try:
            await self._waiting
        finally:
            self._loop.remove_reader(self._socket)
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _peer_ended(self) -> None:
        """Its process is gone, though a child may hold the connection: what is queued is all there is."""
        self._stop_watching()
        self._has_ended = True
        self._wake()

    def _stop_watching(self) -> None:
        if self.peer.pidfd is not None:
            self._loop.remove_reader(self.peer.pidfd)

    def reply(self, reply: Reply) -> None:
        """Answer; a probe that is gone, or does not read, is not waited for."""
        with contextlib.suppress(OSError):
            self._socket.send(encode(reply))

    def end(self, reply: Reply) -> None:
        """Say why, and hear nothing more: `receive` finds the end at once."""
        self.reply(reply)
        self._is_over = True
        self._wake()

    def close(self) -> None:
        """End the connection."""
        self._stop_watching()
        self.peer.close()
        self._socket.close()


class LocalServer:
    """Listens at `path` and gives each connection to `serve`, which need not close it."""

    def __init__(self, path: Path, access: SocketAccess, serve: Callable[[Line], Awaitable[None]]) -> None:
        """OSError as `Listener`."""
        self._serve = serve
        self._most = _most_connections()
        self._complaints = Complaints(_log)
        # One, so that reading what is large takes no more than one core.
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._conversations: dict[asyncio.Task[None], Line] = {}
        self._connection_counts: Counter[int] = Counter()
        self._of_all = Allowance(time.monotonic(), ALL_BYTES_PER_S)
        self._allowances: dict[int, Allowance] = {}
        self._listener = Listener(path, access)
        self._loop = asyncio.get_running_loop()
        self._resume: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._listener.socket, self._accept)

    async def close(self) -> None:
        """Stop listening, end all connections and remove the socket."""
        self._loop.remove_reader(self._listener.socket)
        if self._resume is not None:
            self._resume.cancel()
        tasks = list(self._conversations)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._listener.close()

    def _accept(self) -> None:
        """Take who waits to be connected; the others have their turn in between."""
        for _ in range(_ACCEPTED_IN_A_ROW):
            try:
                connection, _address = self._listener.socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._pause(error)
                    return
                continue  # of that one connection
            self._take(connection)

    def _pause(self, error: OSError) -> None:
        """Accept nobody for a moment: they wait, and whoever is served is not disturbed."""
        self._complaints.complain(os.geteuid(), "no room for connections", "NO_ROOM", error=error.strerror)
        self._loop.remove_reader(self._listener.socket)

        def resume() -> None:
            self._resume = None
            self._loop.add_reader(self._listener.socket, self._accept)

        self._resume = self._loop.call_later(_NO_ROOM_PAUSE_S, resume)

    def _take(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            peer = identify(connection)
        except (UnknownPeerError, OSError) as error:
            self._turn_away(connection, -1, "PEER_NOT_KNOWN", str(error))
            return
        uid = peer.uid
        if self._connection_counts[uid] >= MAX_CONNECTIONS_PER_USER:
            most = f"expected at most {MAX_CONNECTIONS_PER_USER} connections of a user, found more"
            problem = ("TOO_MANY_CONNECTIONS", most)
        elif self._connection_counts.total() >= self._most:
            problem = ("TOO_MANY_CONNECTIONS", f"expected at most {self._most} connections, found more")
        else:
            self._converse(connection, peer)
            return
        peer.close()
        self._turn_away(connection, uid, *problem)

    def _turn_away(self, connection: socket.socket, uid: int, reason: str, message: str) -> None:
        self._complaints.complain(uid, "connection refused", reason, message=message)
        with contextlib.suppress(OSError):
            connection.send(encode(Reply(False, reason, message)))
        connection.close()

    def _converse(self, connection: socket.socket, peer: Peer) -> None:
        uid = peer.uid
        if uid not in self._allowances:
            now_s = time.monotonic()
            self._allowances = {
                other: allowance
                for other, allowance in self._allowances.items()
                if other in self._connection_counts or not allowance.is_full(now_s)
            }
            self._allowances[uid] = Allowance(now_s, USER_BYTES_PER_S, self._of_all)
        line = Line(connection, peer, self._allowances[uid], self._readers)
        self._connection_counts[uid] += 1
        task = asyncio.create_task(self._run(line))
        self._conversations[task] = line
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        line = self._conversations.pop(task)
        uid = line.peer.uid
        line.close()
        self._connection_counts[uid] -= 1
        if not self._connection_counts[uid]:
            del self._connection_counts[uid]

    async def _run(self, line: Line) -> None:
        try:
            await self._serve(line)
        except Exception:  # of one trainer's conversation; the others go on
            _log.exception("connection failed")


def _most_connections() -> int:
    """How many connections there is room for, with as many files open as the agent may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, _MAX_FILES) or hard == resource.RLIM_INFINITY:
        soft = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(_MAX_CONNECTIONS, (soft - _FILES_FOR_ALL_ELSE) // _FILES_PER_CONNECTION))
