"""A rank's connection to the agent of its node: made, lost and rejoined, and the agent's messages on it.

Before training the connection waits for the agent's replies; during training it never waits, and never
raises. Without an agent, packets are dropped. It joins an agent that starts later, or restarts, between two
iterations.

A child that the trainer forks (a data loader, a checkpoint writer) closes the inherited connection at once:
it is not the rank, and would keep the agent from seeing the trainer's end. Its packets are dropped.
"""

import logging
import os
import socket
import weakref
from collections.abc import Callable
from time import monotonic_ns

from perseus.agent.link.address import SOCKET_VARIABLE
from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import (
    MARK_BYTES,
    MAX_PACKED_MARKS,
    MAX_PACKET_BYTES,
    SAVING,
    MalformedPacket,
    Packing,
    Reply,
    Saving,
    decode,
)
from perseus.agent.probe.rejoin import Rejoin
from perseus.agent.probe.tested_versions import untested

_log = logging.getLogger("perseus.probe")

# After a change of order, ranks with the old one are live for a moment: the registration is repeated then.
_JOB_EXISTS = "JOB_ALREADY_EXISTS"
# Interval of polling for the agent's notices: one poll costs the trainer a microsecond or two.
_NOTICE_PERIOD_NS = 10**9
_MAX_NOTICE_BYTES = 16 * 1024
_MAX_PACKED_BYTES = MAX_PACKED_MARKS * MARK_BYTES
_MAX_REPORTED_DROPPED = 2**31 - 1  # limit of a mark's field


class AgentConnection:
    """One rank's connection. Made by `introduce`; `hello` makes the packet that introduces the rank.

    Attributes:
        send: sends or packs a mark, and raises OSError for `not_sent`; bound once, because marks must be
            cheap.
        dropped_count: packets dropped so far because the socket was full.
        dropped_here_count: those on the current connection, since agents count per connection.
        saving: what the job's plans save, as far as the agent knows; only the job's first rank receives it.
    """

    def __init__(self, rank: Rank, path: str, hello: Callable[[], bytes], sock: socket.socket | None) -> None:
        self._rank = rank
        self._path = path
        self._hello = hello
        self._socket = sock
        self.send: Callable[[bytes], object] = sock.send if sock is not None else _discard
        self.dropped_count = 0
        self.dropped_here_count = 0
        self.saving: Saving | None = None
        self._has_logged_saving = False
        self._rejoin = Rejoin(path, hello, monotonic_ns()) if sock is None else None
        # The registration or membership packet, once sent, whether the agent answers it, and whether it is in
        # place of an earlier one.
        self._membership: bytes | None = None
        self._is_answered = self._is_change = False
        # While training: the membership is still to be sent; the answer to the registration is outstanding.
        self._is_unsent = False
        self._is_registering = False
        self._notice_at_ns = 0
        self._packed = bytearray()
        self._is_packing = False
        _connections.add(self)

    @classmethod
    def introduce(
        cls, rank: Rank, path: str, hello: Callable[[], bytes], timeout_s: float
    ) -> "AgentConnection":
        """Introduce a rank to the agent at `path`, and wait for the reply; log a missing one."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(timeout_s)
            sock.connect(path)
            sock.send(hello())
            reply = _receive(sock)
            if not isinstance(reply, Reply):
                raise MalformedPacket(f"expected a reply, found {type(reply).__name__}")
        except (OSError, MalformedPacket) as error:
            _log.warning(
                "%s: no agent at %s (%s): training continues at stock clocks, and joins an agent that starts "
                "there later (systemctl start perseus-agent, or perseus agent; %s names another socket)",
                rank,
                path,
                error,
                SOCKET_VARIABLE,
            )
            sock.close()
            return cls(rank, path, hello, None)
        if not reply.ok:
            _log.warning(
                "%s: the agent at %s refuses: %s: training continues at stock clocks",
                rank,
                path,
                reply.message,
            )
            sock.close()
            return cls(rank, path, hello, None)
        if reply.message:
            _log.warning(
                "%s: the agent at %s: %s: training continues at stock clocks", rank, path, reply.message
            )
        else:
            _log_attached(rank, path)
        sock.setblocking(False)
        return cls(rank, path, hello, sock)

    @property
    def is_connected(self) -> bool:
        """Whether an agent is connected, as far as known."""
        return self._socket is not None

    def join_job(self, membership: bytes, *, is_answered: bool, timeout_s: float, waits: bool) -> bool:
        """Send the rank's membership, now and to every agent that is joined later.

        `is_answered`: it is a registration, and the call waits for the answer unless `waits` is off. Returns
        whether it was accepted, or may still be, as far as known; a refusal is logged.
        """
        self._is_change = self._membership not in (None, membership)
        self._membership, self._is_answered = membership, is_answered
        if self._socket is None:
            return False
        if not waits:
            self._is_unsent = True
            self._maintain_connection()
            return True
        try:
            self._socket.settimeout(timeout_s)
            self._socket.send(membership)
            reply = self._receive_answer(self._socket) if is_answered else Reply(True)
            self._socket.setblocking(False)
        except (OSError, MalformedPacket) as error:
            self._lose(error)
            return False
        self._log_registration(reply)
        return reply.ok

    def maintain(self) -> None:
        """Maintain the connection and read messages, between two iterations and without waiting."""
        if self._rejoin is not None or self._is_unsent or self._is_registering:
            self._maintain_connection()
        elif self._is_packing or monotonic_ns() >= self._notice_at_ns:
            self._hear_notices()

    def _pack(self, mark: bytes) -> None:
        """Keep a mark back, to be sent with others in one packet."""
        self._packed += mark
        if len(self._packed) == _MAX_PACKED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send the marks that were kept back."""
        if not self._packed or self._socket is None:
            return
        packed, self._packed = self._packed, bytearray()
        try:
            self._socket.send(packed)
        except OSError as error:
            self.not_sent(error, len(packed) // MARK_BYTES)

    def not_sent(self, error: OSError, mark_count: int = 1) -> None:
        """Handle a send error: count dropped marks, or give up the connection."""
        if isinstance(error, BlockingIOError):
            self.dropped_count += mark_count
            self.dropped_here_count = min(self.dropped_here_count + mark_count, _MAX_REPORTED_DROPPED)
        else:
            self._lose(error)

    def send_report(self, packet: bytes) -> None:
        """Send a packet that is no mark, if the socket has room."""
        self.flush()
        if self._socket is None:
            return
        try:
            self._socket.send(packet)
        except BlockingIOError:
            _log.debug("%s: the agent's socket is full: not reported", self._rank)
        except OSError as error:
            self._lose(error)

    def send_last(self, packet: bytes, timeout_s: float) -> None:
        """Send an important packet, and wait for room in the socket."""
        if self._socket is None:
            return
        try:
            self._socket.settimeout(timeout_s)
            if self._packed:
                self._socket.send(self._packed)
                self._packed.clear()
            self._socket.send(packet)
            self._socket.setblocking(False)
        except OSError as error:
            self._lose(error)

    def close(self) -> None:
        """Close the connection for good."""
        if self._socket is not None and self.dropped_count:
            _log.debug(
                "%s: %d marks dropped because the agent's socket was full", self._rank, self.dropped_count
            )
        self._let_go()

    def _let_go(self) -> None:
        if self._rejoin is not None:
            self._rejoin.close()
            self._rejoin = None
        self._disconnect()

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket, self.send, self.saving = None, _discard, None
        self._packed.clear()
        self._is_packing = False

    def after_fork(self) -> None:
        """Close the child's copy; the parent's connection stays open."""
        self._let_go()
        self._is_registering = False

    def _lose(self, error: Exception) -> None:
        """Log the lost connection once, and drop packets until there is another."""
        if self._socket is not None and (refusal := _final_reply(self._socket)) is not None:
            _log.warning(
                "%s: the agent refuses: %s: training continues at stock clocks", self._rank, refusal.message
            )
        else:
            lasting = f"training continues at stock clocks until one answers at {self._path}"
            _log.warning("%s: lost the agent (%s): %s", self._rank, error, lasting)
        self._disconnect()
        self._is_unsent = self._is_registering = False
        self._rejoin = Rejoin(self._path, self._hello, monotonic_ns())

    def _maintain_connection(self) -> None:
        """Join an agent if there is one, send the membership, read the answer."""
        try:
            if self._rejoin is not None and (sock := self._rejoin.poll(monotonic_ns())) is not None:
                _log_attached(self._rank, self._path)
                self._rejoin, self._socket, self.send = None, sock, sock.send
                self.dropped_here_count = 0
                self._is_unsent = self._membership is not None
            if self._socket is None:
                return
            if self._is_unsent and self._membership is not None:
                self._socket.send(self._membership)
                self._is_unsent, self._is_registering = False, self._is_answered
            elif self._is_registering:
                reply = self._receive_answer(self._socket)
                self._is_registering = False
                self._log_registration(reply)
        except BlockingIOError:
            pass  # no room in the socket yet, or no reply
        except (OSError, MalformedPacket) as error:
            self._lose(error)

    def _hear_notices(self) -> None:
        """Read what the agent sends unasked; before each iteration while packing, else once a period."""
        self._notice_at_ns = monotonic_ns() + _NOTICE_PERIOD_NS
        try:
            while self._socket is not None:
                heard = _receive(self._socket, _MAX_NOTICE_BYTES, socket.MSG_DONTWAIT)
                if isinstance(heard, Packing):
                    self._follow_packing(heard)
                else:
                    self._log_notice(heard)
        except BlockingIOError:
            pass  # no notice, the usual case
        except (OSError, MalformedPacket) as error:
            self._lose(error)

    def _follow_packing(self, packing: Packing) -> None:
        self.flush()
        if self._socket is not None:
            self._is_packing = packing.is_allowed
            self.send = self._pack if packing.is_allowed else self._socket.send

    def _receive_answer(self, sock: socket.socket) -> Reply:
        """Return the answer to a registration; handle what arrives before it."""
        while True:
            heard = _receive(sock)
            if isinstance(heard, Packing):
                self._follow_packing(heard)
            elif heard.is_notice:
                self._log_notice(heard)
            else:
                return heard

    def _log_notice(self, notice: Reply) -> None:
        if notice.reason == SAVING:
            self.saving = notice.saving
            if notice.saving is not None and not self._has_logged_saving:
                self._has_logged_saving = True
                job_id = self._rank.job_id
                _log.info("%s: planned: saves %s: perseus jobs show %s", self._rank, notice.saving, job_id)
            return
        _log.log(logging.DEBUG if notice.ok else logging.WARNING, "%s: %s", self._rank, notice.message)

    def _log_registration(self, reply: Reply) -> None:
        """Log the answer. Ranks with the order before a change may be live."""
        if not reply.ok and self._is_change and reply.reason == _JOB_EXISTS:
            _log.debug(
                "%s: the job changes once all of its ranks have registered the change: %s",
                self._rank,
                reply.message,
            )
        elif not reply.ok:
            _log.error("%s: job not registered: %s", self._rank, reply.message)
        elif reply.message:
            _log.warning("%s: training continues at stock clocks: %s", self._rank, reply.message)


_connections: "weakref.WeakSet[AgentConnection]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for connection in list(_connections):
        connection.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _log_attached(rank: Rank, path: str) -> None:
    note = f"; not tested with {', '.join(untested)}" if untested else ""
    _log.info("%s: attached to the agent at %s, to be measured and planned%s", rank, path, note)


def _discard(_packet: bytes) -> None:
    """Drop the packet: there is no agent."""


def _final_reply(sock: socket.socket) -> Reply | None:
    """Return the refusal with which the agent closed a connection, if any."""
    sock.setblocking(False)
    for _ in range(3):  # Linux reports a reset once, before what is still queued
        try:
            heard = _receive(sock)
        except ConnectionResetError:
            continue
        except (OSError, MalformedPacket):
            return None
        if isinstance(heard, Reply) and not heard.ok:
            return heard
    return None


def _receive(sock: socket.socket, max_bytes: int = MAX_PACKET_BYTES, flags: int = 0) -> Reply | Packing:
    packet = sock.recv(max_bytes, flags)
    if not packet:
        raise ConnectionResetError("the agent closed the connection")
    heard = decode(packet)
    if not isinstance(heard, Reply | Packing):
        raise MalformedPacket(f"expected a reply, found {type(heard).__name__}")
    return heard
