"""The local socket: packets in and out between the agent and the trainers' probes.

Anybody who may connect may also misbehave, so nothing here is without a limit: connections of a user, and all
together; the time until a connection's hello; the bytes read of a user in a second; what is read on the loop
rather than in a thread. What exceeds a limit concerns its user alone.

The socket is made in a folder that nobody else can enter, gets its permissions and its group there, listens,
and only then is moved into place: at no moment can somebody connect who may not.

OSError
 ├─ SocketInUseError     another agent, or something else, has the path
 └─ NoSuchGroupError     the group that was asked for is none of this node's
"""

import asyncio
import contextlib
import errno
import grp
import os
import resource
import socket
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from perseus.agent.sidecar.peer import Peer, UnknownPeerError, identify
from perseus.rate_limited_log import RateLimitedLog

_log = structlog.get_logger(__name__)

DEFAULT_GROUP = "perseus"
"""The group that may connect where none is named, if the node has it."""

# Whoever connects without waiting (a probe does) is turned away by the kernel where it is full.
_BACKLOG = 1024
_MAX_PATH_BYTES = 107  # sockaddr_un, less the final zero
_NOBODY_ELSE = 0o600


class SocketInUseError(OSError):
    """The socket's path is taken."""


class NoSuchGroupError(OSError):
    """There is no such group, or the agent may not give files to it."""


@dataclass(frozen=True, slots=True)
class SocketAccess:
    """Who may connect: permissions, and the name of a group (None: `DEFAULT_GROUP`, if the node has it)."""

    mode: int = 0o660
    group: str | None = None


class Listener:
    """A listening socket at a path."""

    def __init__(self, path: Path, access: SocketAccess) -> None:
        """Listen at `path`, whose folder is made where it is missing. OSError, see above."""
        size = len(os.fsencode(path))
        if size > _MAX_PATH_BYTES:
            raise OSError(f"{path}: expected a socket path of at most {_MAX_PATH_BYTES} bytes, found {size}")
        self._path = path
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _check_free(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._identity = self._put_in_place(access)
        except BaseException:
            self.socket.close()
            raise

    def close(self) -> None:
        """Stop listening, and remove the socket, unless another one has its place."""
        self.socket.close()
        try:
            found = self._path.lstat()
        except FileNotFoundError:
            return
        if (found.st_dev, found.st_ino) == self._identity:
            self._path.unlink()

    def _put_in_place(self, access: SocketAccess) -> tuple[int, int]:
        private = Path(tempfile.mkdtemp(prefix=".perseus-", dir=self._path.parent))  # 0700
        folder = os.open(private, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(self.socket.fileno(), _NOBODY_ELSE)  # what bind makes has this, whatever the umask
            self.socket.bind(f"/proc/self/fd/{folder}/socket")
            gid = _group_to_give(private / "socket", access)
            if gid is not None:
                os.chown("socket", -1, gid, dir_fd=folder, follow_symlinks=False)
            os.chmod("socket", access.mode, dir_fd=folder)
            self.socket.listen(_BACKLOG)
            self.socket.setblocking(False)
            found = os.stat("socket", dir_fd=folder, follow_symlinks=False)
            os.rename("socket", self._path, src_dir_fd=folder)
        except BaseException:
            (private / "socket").unlink(missing_ok=True)
            raise
        finally:
            os.close(folder)
            private.rmdir()
        return found.st_dev, found.st_ino


def _group_to_give(path: Path, access: SocketAccess) -> int | None:
    """The group that the socket is to have; None to leave it with the agent's own."""
    name = access.group
    wanted = DEFAULT_GROUP if name is None else name
    try:
        gid = grp.getgrnam(wanted).gr_gid
        os.chown(path, -1, gid)
    except KeyError:
        problem = "this node has no such group (groupadd makes one)"
    except PermissionError:
        problem = "the agent is neither root nor a member of it"
    else:
        return gid
    if name is not None:
        raise NoSuchGroupError(
            f"socket_group: expected a group to give the socket to, found {name!r}: {problem}"
        )
    if os.geteuid() == 0 and not access.mode & stat.S_IWOTH:  # who may write may connect
        _log.warning("only root may connect", group=wanted, reason=problem)
    return None


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


# --- How much users may say ---------------------------------------------------------------------------------
#
# What they send is read no faster than this, and the rest waits in their sockets. A trainer's probe drops
# marks that its socket has no room for, so who says too much loses marks of their own; the agent's loop has
# time for others. All users together may fill a third of it. Who says less than half of that is not held
# up, however many others say more.


ALL_BYTES_PER_S = 512 * 1024
"""Of all users: some 16,000 marks; 48,000 fill a core, and a node with 8 GPUs sends a few thousand."""

USER_BYTES_PER_S = ALL_BYTES_PER_S / 2
"""Nobody alone has all."""

BURST_BYTES = 1024 * 1024

HELLO_BYTES = 64 * 1024
"""What a hello costs, and a question after health: both are looked into, by processes and in the driver."""

_LITTLE_BYTES = BURST_BYTES / 2
"""Who has so much left said little lately, and does not wait for others."""


class TokenBucket:
    """A user's, or that of all. It fills at a rate, up to a burst, and may be overdrawn by one packet.

    `of_all` is what all users have together: what one spends is spent there, too.
    """

    def __init__(
        self, now_s: float, rate_bytes_per_s: float = USER_BYTES_PER_S, of_all: "TokenBucket | None" = None
    ) -> None:
        self._rate_bytes_per_s = rate_bytes_per_s
        self._of_all = of_all
        self._left = float(BURST_BYTES)
        self._at_s = now_s

    def spend(self, size: int, now_s: float) -> None:
        """Something of `size` bytes was read."""
        self._left = min(BURST_BYTES, self._left + (now_s - self._at_s) * self._rate_bytes_per_s) - size
        self._at_s = now_s
        if self._of_all is not None:
            self._of_all.spend(size, now_s)

    def is_full(self, now_s: float) -> bool:
        """Whether nothing would be lost by forgetting it."""
        return self._left + (now_s - self._at_s) * self._rate_bytes_per_s >= BURST_BYTES

    def wait_s(self) -> float:
        """How long to read nothing more of this user, as of the latest `spend`."""
        own_s = max(0.0, -self._left / self._rate_bytes_per_s)
        if self._of_all is None or self._left >= _LITTLE_BYTES:
            return own_s
        return max(own_s, self._of_all.wait_s())


HELLO_TIMEOUT_S = 5.0
REFUSAL_LOG_PERIOD_S = 10.0
"""How often the log tells that a user does the same wrong."""
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


class ProbeConnection:
    """The agent's end of one probe's connection."""

    def __init__(
        self,
        connection: socket.socket,
        peer: Peer,
        bucket: TokenBucket | None = None,
        readers: ThreadPoolExecutor | None = None,
    ) -> None:
        self.peer = peer
        self._socket = connection
        self._allowance = bucket or TokenBucket(time.monotonic())
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

    def __init__(
        self, path: Path, access: SocketAccess, serve: Callable[[ProbeConnection], Awaitable[None]]
    ) -> None:
        """OSError as `Listener`."""
        self._serve = serve
        self._most = _max_connections()
        self._refusal_log = RateLimitedLog(_log, REFUSAL_LOG_PERIOD_S)
        # One, so that reading what is large takes no more than one core.
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._conversations: dict[asyncio.Task[None], ProbeConnection] = {}
        self._connection_counts: Counter[int] = Counter()
        self._of_all = TokenBucket(time.monotonic(), ALL_BYTES_PER_S)
        self._buckets: dict[int, TokenBucket] = {}
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
        self._refusal_log.warning("no room for connections", error=error.strerror)
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
            maximum = f"expected at most {MAX_CONNECTIONS_PER_USER} connections of a user, found more"
            problem = ("TOO_MANY_CONNECTIONS", maximum)
        elif self._connection_counts.total() >= self._most:
            problem = ("TOO_MANY_CONNECTIONS", f"expected at most {self._most} connections, found more")
        else:
            self._converse(connection, peer)
            return
        peer.close()
        self._turn_away(connection, uid, *problem)

    def _turn_away(self, connection: socket.socket, uid: int, reason: str, message: str) -> None:
        self._refusal_log.warning("connection refused", uid, reason, uid=uid, reason=reason, message=message)
        with contextlib.suppress(OSError):
            connection.send(encode(Reply(False, reason, message)))
        connection.close()

    def _converse(self, connection: socket.socket, peer: Peer) -> None:
        uid = peer.uid
        if uid not in self._buckets:
            now_s = time.monotonic()
            self._buckets = {
                other: bucket
                for other, bucket in self._buckets.items()
                if other in self._connection_counts or not bucket.is_full(now_s)
            }
            self._buckets[uid] = TokenBucket(now_s, USER_BYTES_PER_S, self._of_all)
        line = ProbeConnection(connection, peer, self._buckets[uid], self._readers)
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

    async def _run(self, line: ProbeConnection) -> None:
        try:
            await self._serve(line)
        except Exception:  # of one trainer's conversation; the others go on
            _log.exception("connection failed")


def _max_connections() -> int:
    """How many connections there is room for, with as many files open as the agent may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, _MAX_FILES) or hard == resource.RLIM_INFINITY:
        soft = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(_MAX_CONNECTIONS, (soft - _FILES_FOR_ALL_ELSE) // _FILES_PER_CONNECTION))
