"""The local socket: packets between the agent and the trainers' probes.

Any client may misbehave, so everything here has a limit: connections per user and in total; the time until a
connection's hello; the bytes read from a user per second; the size of packets read on the event loop rather
than in a thread. A user who exceeds a limit affects only themselves.

The socket is created in a folder that nobody else can enter, gets its permissions and group there, listens,
and only then moves into place: an unauthorised client can never connect.

OSError
 ├─ SocketInUseError     another agent, or something else, has the path
 └─ NoSuchGroupError     the node does not have the configured group
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
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog

from perseus.agent.link.packets import (
    MAX_PACKET_BYTES,
    SMALL_PACKET_BYTES,
    MalformedPacket,
    Message,
    Packing,
    Reply,
    decode,
    decode_all,
    encode,
    is_quick,
)
from perseus.agent.sidecar.peer import Peer, UnknownPeerError, identify
from perseus.rate_limited_log import RateLimitedLog

_log = structlog.get_logger(__name__)

DEFAULT_GROUP = "perseus"
"""The group that may connect by default, if the node has it."""

# When it is full, the kernel refuses clients that connect without blocking, as probes do.
_BACKLOG = 1024
_MAX_PATH_BYTES = 107  # sockaddr_un, less the final zero
_NOBODY_ELSE = 0o600


class SocketInUseError(OSError):
    """The socket's path is taken."""


class NoSuchGroupError(OSError):
    """There is no such group, or the agent may not give files to it."""


@dataclass(frozen=True, slots=True)
class SocketAccess:
    """Permissions and group of the socket (None: `DEFAULT_GROUP`, if the node has it)."""

    mode: int = 0o660
    group: str | None = None


class Listener:
    """A listening socket at a path."""

    def __init__(self, path: Path, access: SocketAccess) -> None:
        """Listen at `path`; creates a missing folder. Raises OSError as described above."""
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
        """Stop listening and remove the socket, unless another one has replaced it."""
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
            os.fchmod(self.socket.fileno(), _NOBODY_ELSE)  # bind gives the file this mode, despite the umask
            self.socket.bind(f"/proc/self/fd/{folder}/socket")
            gid = _give_to_group(private / "socket", access)
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


def _give_to_group(path: Path, access: SocketAccess) -> int | None:
    """Give the socket file to its group and return the group's number; None to keep the agent's own."""
    name = access.group
    wanted = DEFAULT_GROUP if name is None else name
    try:
        gid = grp.getgrnam(wanted).gr_gid
        os.chown(path, -1, gid)
    except KeyError:
        problem = "this node has no such group (groupadd creates one)"
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


# --- Limits on users' data ----------------------------------------------------------------------------------
#
# The agent reads users' data no faster than this; the rest waits in their sockets. A trainer's probe drops
# marks that its socket has no room for, so a user who sends too much loses only their own marks and leaves
# the event loop free for others. All users together may use a third of it. A user who sends less than half of
# that is never delayed, however much others send.


ALL_BYTES_PER_S = 512 * 1024
"""For all users: about 16,000 marks; 48,000 fill a core, and a node with 8 GPUs sends a few thousand."""

USER_BYTES_PER_S = ALL_BYTES_PER_S / 2
"""No user alone may use it all."""

BURST_BYTES = 1024 * 1024

HELLO_BYTES = 64 * 1024
"""Cost of a hello or a health question: both involve subprocesses and driver calls."""

_LITTLE_BYTES = BURST_BYTES / 2
"""A user with this much left has sent little lately and does not wait for others."""


class TokenBucket:
    """The token bucket of one user or of all: fills at a rate up to a burst; one packet may overdraw it.

    `of_all` is the bucket of all users together: each user's spending counts there, too.
    """

    def __init__(
        self, now_s: float, rate_bytes_per_s: float = USER_BYTES_PER_S, of_all: "TokenBucket | None" = None
    ) -> None:
        self._rate_bytes_per_s = rate_bytes_per_s
        self._of_all = of_all
        self._left = float(BURST_BYTES)
        self._at_s = now_s

    def spend(self, size: int, now_s: float) -> None:
        """Note that `size` bytes were read."""
        self._left = min(BURST_BYTES, self._left + (now_s - self._at_s) * self._rate_bytes_per_s) - size
        self._at_s = now_s
        if self._of_all is not None:
            self._of_all.spend(size, now_s)

    def is_full(self, now_s: float) -> bool:
        """Whether the bucket may be dropped without loss."""
        return self._left + (now_s - self._at_s) * self._rate_bytes_per_s >= BURST_BYTES

    def wait_s(self) -> float:
        """Return how long to pause reading from this user, as of the latest `spend`."""
        own_s = max(0.0, -self._left / self._rate_bytes_per_s)
        if self._of_all is None or self._left >= _LITTLE_BYTES:
            return own_s
        return max(own_s, self._of_all.wait_s())


HELLO_TIMEOUT_S = 5.0
REFUSAL_LOG_PERIOD_S = 10.0
"""Period in which the log reports the same refusal of a user once."""
MAX_CONNECTIONS_PER_USER = 64
"""A trainer has one; no node has more GPUs."""

_MAX_CONNECTIONS = 4096
_MAX_FILES = 65_536
# A connection needs two: its socket and its peer's pidfd. The rest is for the agent's other files.
_FILES_PER_CONNECTION = 2
_FILES_FOR_ALL_ELSE = 256
# Neither a trainer that floods its socket nor new connections may starve the others.
_MESSAGES_IN_A_ROW = 64
_ACCEPTED_IN_A_ROW = 16
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NO_ROOM_PAUSE_S = 0.2
# Deflated JSON expands, and the expanded text must be parsed.
_INFLATED_COST = 16

# Packets are copied out of it before another task runs. The extra byte reveals truncated packets.
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
        self._messages_in_a_row = 0
        self._has_ended = False  # the peer has: nothing more will be queued
        self._is_over = False  # we have ended it: nothing more is read
        self._waiting: asyncio.Future[None] | None = None
        self._is_watched = False  # the loop reports when there is something to read
        self._has_answered = False
        self._packing = Packing(False)
        self._loop = asyncio.get_running_loop()
        if peer.pidfd is not None:
            self._loop.add_reader(peer.pidfd, self._peer_ended)

    async def receive(self) -> Sequence[Message]:
        """Return the messages of the next packet; none when the probe or its process is gone.

        Raises MalformedPacket.
        """
        if self._messages_in_a_row >= _MESSAGES_IN_A_ROW:
            self._messages_in_a_row = 0
            await asyncio.sleep(self._allowance.wait_s())
        size = await self._receive_into_buffer()
        packet = memoryview(_buffer)[:size]
        if is_quick(packet):
            self._allowance.spend(size, time.monotonic())
            messages = decode_all(packet) if size else []
            self._messages_in_a_row += len(messages)
            return messages
        self._allowance.spend(size * _INFLATED_COST, time.monotonic())
        message = await self._loop.run_in_executor(self._readers, decode, bytes(packet))
        await asyncio.sleep(self._allowance.wait_s())
        return [message]

    async def pay_hello(self) -> None:
        """Wait until the user's token bucket allows one more hello."""
        self._allowance.spend(HELLO_BYTES, time.monotonic())
        await asyncio.sleep(self._allowance.wait_s())

    async def receive_small(self) -> Message | None:
        """Receive from an unknown peer: raises MalformedPacket also for packets that take long to parse."""
        size = await self._receive_into_buffer()
        packet = memoryview(_buffer)[:size]
        if not is_quick(packet):
            raise MalformedPacket(
                f"packet: expected a hello of at most {SMALL_PACKET_BYTES} bytes, not deflated, found {size}"
            )
        return decode(packet) if size else None

    async def _receive_into_buffer(self) -> int:
        """Receive the next packet and return its size; 0 at the end."""
        while not self._is_over:
            try:
                return self._socket.recv_into(_buffer)
            except BlockingIOError:
                if self._has_ended:
                    break
                await self._readable()
            except ConnectionResetError:
                # The probe left without reading a reply. Linux reports that once, before the queued packets.
                continue
        return 0

    async def _readable(self) -> None:
        self._waiting = self._loop.create_future()
        if not self._is_watched:
            self._loop.add_reader(self._socket, self._wake)
            self._is_watched = True
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is None:
            self._unwatch()  # nobody reads now, and the loop would report it again and again
        elif not self._waiting.done():
            self._waiting.set_result(None)

    def _unwatch(self) -> None:
        if self._is_watched:
            self._loop.remove_reader(self._socket)
            self._is_watched = False

    def _peer_ended(self) -> None:
        """Note the end of the peer's process: only queued packets count, even if a child is connected."""
        self._stop_watching()
        self._has_ended = True
        self._wake()

    def _stop_watching(self) -> None:
        if self.peer.pidfd is not None:
            self._loop.remove_reader(self.peer.pidfd)

    def reply(self, reply: Reply) -> None:
        """Send a reply without waiting for a probe that is gone or does not read."""
        self.send(reply)
        if not self._has_answered:
            self._has_answered = True
            if self._packing.is_allowed:
                self.send(self._packing)

    def allow_packing(self, is_allowed: bool) -> None:
        """Let the probe pack marks, or not, from its next iteration on, once its hello was answered."""
        if self._packing.is_allowed != is_allowed:
            self._packing = Packing(is_allowed)
            if self._has_answered:
                self.send(self._packing)

    def send(self, message: Message) -> None:
        """Send a message without waiting for a peer that is gone or does not read."""
        with contextlib.suppress(OSError):
            self._socket.send(encode(message))

    def end(self, reply: Reply) -> None:
        """Send a final reply and stop reading: `receive` returns None at once."""
        self.reply(reply)
        self._is_over = True
        self._wake()

    def close(self) -> None:
        """Close the connection."""
        self._stop_watching()
        self._unwatch()
        self.peer.close()
        self._socket.close()


class LocalServer:
    """Listens at `path` and passes each connection to `serve`, which need not close it."""

    def __init__(
        self, path: Path, access: SocketAccess, serve: Callable[[ProbeConnection], Awaitable[None]]
    ) -> None:
        """Start listening. Raises OSError as `Listener`."""
        self._serve = serve
        self._most = _max_connections()
        self._refusal_log = RateLimitedLog(_log, REFUSAL_LOG_PERIOD_S)
        # A single thread, so that large packets use at most one core.
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._conversations: dict[asyncio.Task[None], ProbeConnection] = {}
        self._connection_counts: Counter[int] = Counter()
        self._of_all = TokenBucket(time.monotonic(), ALL_BYTES_PER_S)
        self._buckets: dict[int, TokenBucket] = {}
        self._listener = Listener(path, access)
        self._loop = asyncio.get_running_loop()
        self._resume: asyncio.TimerHandle | None = None
        self._unidentified: socket.socket | None = None
        self._loop.add_reader(self._listener.socket, self._accept)

    async def close(self) -> None:
        """Stop listening, end all connections and remove the socket."""
        self._loop.remove_reader(self._listener.socket)
        if self._resume is not None:
            self._resume.cancel()
        if self._unidentified is not None:
            self._unidentified.close()
        tasks = list(self._conversations)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._listener.close()

    def _accept(self) -> None:
        """Accept a few waiting connections, then let other tasks run."""
        for _ in range(_ACCEPTED_IN_A_ROW):
            try:
                connection, _address = self._listener.socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._pause(error)
                    return
                continue  # concerns only that connection
            connection.setblocking(False)
            self._take(connection)
            if self._resume is not None:
                return

    def _pause(self, error: OSError) -> None:
        """Accept nothing for a moment: new clients wait, and existing connections are not affected."""
        self._refusal_log.warning("no room for connections", error=error.strerror)
        self._loop.remove_reader(self._listener.socket)

        def resume() -> None:
            self._resume = None
            connection, self._unidentified = self._unidentified, None
            if connection is not None:
                self._take(connection)
            if self._resume is None:
                self._loop.add_reader(self._listener.socket, self._accept)

        self._resume = self._loop.call_later(_NO_ROOM_PAUSE_S, resume)

    def _take(self, connection: socket.socket) -> None:
        try:
            peer = identify(connection)
        except (UnknownPeerError, OSError) as error:
            cause = error.__cause__ if isinstance(error, UnknownPeerError) else error
            if isinstance(cause, OSError) and cause.errno in _NO_ROOM:
                self._unidentified = connection
                self._pause(cause)
                return
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
        probe = ProbeConnection(connection, peer, self._buckets[uid], self._readers)
        self._connection_counts[uid] += 1
        task = asyncio.create_task(self._run(probe))
        self._conversations[task] = probe
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        probe = self._conversations.pop(task)
        uid = probe.peer.uid
        probe.close()
        self._connection_counts[uid] -= 1
        if not self._connection_counts[uid]:
            del self._connection_counts[uid]

    async def _run(self, probe: ProbeConnection) -> None:
        try:
            await self._serve(probe)
        except Exception:  # only this trainer's conversation ends
            _log.exception("connection failed")


def _max_connections() -> int:
    """Return how many connections the limit on open files allows, after raising that limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, _MAX_FILES) or hard == resource.RLIM_INFINITY:
        soft = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(_MAX_CONNECTIONS, (soft - _FILES_FOR_ALL_ELSE) // _FILES_PER_CONNECTION))
