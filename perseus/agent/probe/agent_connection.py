"""A rank's line to the agent of its node: had, lost and joined again, and what the agent says on it.

Before training the agent's replies are waited for; in it nothing is, and nothing raises. Without an agent
packets go nowhere. An agent that appears later, or that was restarted, is joined between two iterations.

A child that the trainer forks (a data loader, a checkpoint writer) closes the connection that it inherits at
once: it would keep the agent from seeing the trainer's end, and it is not the rank. Its line leads nowhere.
"""

import logging
import os
import socket
import weakref
from collections.abc import Callable
from time import monotonic_ns

from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import MAX_PACKET_BYTES, MalformedPacket, Reply, decode
from perseus.agent.probe.rejoin import Rejoin

_log = logging.getLogger("perseus.probe")

# Ranks that train otherwise than before are live for a moment: the registration is made again then.
_JOB_EXISTS = "JOB_ALREADY_EXISTS"
# How often a look is taken at what the agent says of itself: one costs the trainer a microsecond or two.
_NOTICE_PERIOD_NS = 10**9
_MAX_NOTICE_BYTES = 16 * 1024
_MAX_REPORTED_DROPPED = 2**31 - 1  # what a mark has room for


class AgentConnection:
    """One rank's. Made by `introduce`; `hello` makes the packet that introduces the rank.

    Attributes:
        send: sends a packet, and raises OSError for `not_sent`; bound once, as marks must cost little.
        dropped_count: packets dropped so far because the socket was full.
        dropped_here_count: those since the connection of now began: an agent counts what it is told on each.
    """

    def __init__(self, rank: Rank, path: str, hello: Callable[[], bytes], sock: socket.socket | None) -> None:
        self._rank = rank
        self._path = path
        self._hello = hello
        self._socket = sock
        self.send: Callable[[bytes], object] = sock.send if sock is not None else _discard
        self.dropped_count = 0
        self.dropped_here_count = 0
        self._rejoin = Rejoin(path, hello, monotonic_ns()) if sock is None else None
        # What says what the rank belongs to, once it has said so, and whether the agent answers to it.
        self._membership: bytes | None = None
        self._is_answered = False
        # While training: what it belongs to is to be sent; what became of the registration is yet to be said.
        self._is_unsent = False
        self._is_registering = False
        self._notice_at_ns = 0
        _connections.add(self)

    @classmethod
    def introduce(
        cls, rank: Rank, path: str, hello: Callable[[], bytes], timeout_s: float
    ) -> "AgentConnection":
        """Introduce a rank to the agent at `path`, and wait for the reply; without one, say so in the log."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(timeout_s)
            sock.connect(path)
            sock.send(hello())
            reply = _receive_reply(sock)
        except (OSError, MalformedPacket) as error:
            _log.warning("%s: no agent at %s (%s): training goes on at stock clocks", rank, path, error)
            sock.close()
            return cls(rank, path, hello, None)
        if not reply.ok:
            _log.warning(
                "%s: the agent at %s refuses: %s: training goes on at stock clocks", rank, path, reply.message
            )
            sock.close()
            return cls(rank, path, hello, None)
        if reply.message:
            _log.warning(
                "%s: the agent at %s: %s: training goes on at stock clocks", rank, path, reply.message
            )
        sock.setblocking(False)
        return cls(rank, path, hello, sock)

    @property
    def is_connected(self) -> bool:
        """Whether an agent listens, as far as known."""
        return self._socket is not None

    def join_job(self, membership: bytes, *, is_answered: bool, timeout_s: float, waits: bool) -> bool:
        """Say what the rank belongs to, now and to every agent that is joined later.

        `is_answered`: it is a registration, and the answer is waited for, unless `waits` is off. Returns
        whether it was taken, or may be, as far as known; a refusal is logged.
        """
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
        """Between two iterations: see to the agent, and hear what it says. Waits for nothing."""
        if self._rejoin is not None or self._is_unsent or self._is_registering:
            self._maintain_connection()
        elif monotonic_ns() >= self._notice_at_ns:
            self._hear_notices()

    def not_sent(self, error: OSError) -> None:
        """A packet could not be sent: it is dropped, or the line is of no use any more."""
        if isinstance(error, BlockingIOError):
            self.dropped_count += 1
            self.dropped_here_count = min(self.dropped_here_count + 1, _MAX_REPORTED_DROPPED)
        else:
            self._lose(error)

    def send_last(self, packet: bytes, timeout_s: float) -> None:
        """Send what is worth waiting for room in the socket."""
        if self._socket is None:
            return
        try:
            self._socket.settimeout(timeout_s)
            self._socket.send(packet)
            self._socket.setblocking(False)
        except OSError as error:
            self._lose(error)

    def close(self) -> None:
        """Close the connection, and join no agent any more."""
        if self._socket is not None and self.dropped_count:
            _log.warning(
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
            self._socket, self.send = None, _discard

    def after_fork(self) -> None:
        """In the child: the parent's connection goes on, without us."""
        self._let_go()
        self._is_registering = False

    def _lose(self, error: Exception) -> None:
        """The line is of no use any more: say so once, and do nothing until there is another."""
        if self._socket is not None and (refusal := _final_reply(self._socket)) is not None:
            _log.warning(
                "%s: the agent refuses: %s: training goes on at stock clocks", self._rank, refusal.message
            )
        else:
            _log.warning("%s: lost the agent (%s): training goes on at stock clocks", self._rank, error)
        self._disconnect()
        self._is_unsent = self._is_registering = False
        self._rejoin = Rejoin(self._path, self._hello, monotonic_ns())

    def _maintain_connection(self) -> None:
        """Between two iterations: join an agent if there is one, say what the rank belongs to, hear of it."""
        try:
            if self._rejoin is not None and (sock := self._rejoin.poll(monotonic_ns())) is not None:
                _log.info("%s: joined the agent at %s", self._rank, self._path)
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
                self._log_registration(reply, is_known=True)
        except BlockingIOError:
            pass  # no room for it yet, or no reply
        except (OSError, MalformedPacket) as error:
            self._lose(error)

    def _hear_notices(self) -> None:
        """Between two iterations, now and then: hear what became of the rank, if the agent says something."""
        self._notice_at_ns = monotonic_ns() + _NOTICE_PERIOD_NS
        if self._socket is None:
            return
        try:
            self._log_notice(_receive_reply(self._socket, _MAX_NOTICE_BYTES, socket.MSG_DONTWAIT))
        except BlockingIOError:
            pass  # nothing, as nearly always
        except (OSError, MalformedPacket) as error:
            self._lose(error)

    def _receive_answer(self, sock: socket.socket) -> Reply:
        """The answer to a registration; notices that came before it are logged."""
        while (reply := _receive_reply(sock)).is_notice:
            self._log_notice(reply)
        return reply

    def _log_notice(self, notice: Reply) -> None:
        _log.log(logging.INFO if notice.ok else logging.WARNING, "%s: %s", self._rank, notice.message)

    def _log_registration(self, reply: Reply, *, is_known: bool = False) -> None:
        """`is_known`: the job was registered before, and its ranks may be live as they were until now."""
        if not reply.ok and is_known and reply.reason == _JOB_EXISTS:
            _log.info(
                "%s: the job is registered anew once all of its ranks are: %s", self._rank, reply.message
            )
        elif not reply.ok:
            _log.error("%s: job not registered: %s", self._rank, reply.message)
        elif reply.message:
            _log.info("%s: %s", self._rank, reply.message)


_connections: "weakref.WeakSet[AgentConnection]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for connection in list(_connections):
        connection.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _discard(_packet: bytes) -> None:
    """Send nothing: there is no agent."""


def _final_reply(sock: socket.socket) -> Reply | None:
    """Why the agent has closed a connection, if it said so."""
    sock.setblocking(False)
    for _ in range(3):  # Linux reports a reset once, before what is still queued
        try:
            reply = _receive_reply(sock)
        except ConnectionResetError:
            continue
        except (OSError, MalformedPacket):
            return None
        if not reply.ok:
            return reply
    return None


def _receive_reply(sock: socket.socket, max_bytes: int = MAX_PACKET_BYTES, flags: int = 0) -> Reply:
    packet = sock.recv(max_bytes, flags)
    if not packet:
        raise ConnectionResetError("the agent closed the connection")
    reply = decode(packet)
    if not isinstance(reply, Reply):
        raise MalformedPacket(f"expected a reply, found {type(reply).__name__}")
    return reply
