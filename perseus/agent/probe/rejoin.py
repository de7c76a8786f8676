"""Joining an agent in the midst of training: one that came later, or that was restarted.

Looked after between two iterations, and nothing is waited for: a hello is sent at one look, the agent's reply
found at a later one. Standard library only.
"""

import logging
import socket
from collections.abc import Callable

from perseus.agent.link.packets import MAX_PACKET_BYTES, MalformedPacket, Reply, decode

_log = logging.getLogger("perseus.probe")

PERIOD_NS = 10 * 10**9
"""Between two tries: one costs the trainer some ten microseconds."""


class Rejoin:
    """One rank's tries to join the agent at `path`, the first of them a period after `now_ns`.

    `hello` makes the packet that introduces it.
    """

    def __init__(self, path: str, hello: Callable[[], bytes], now_ns: int) -> None:
        self._path = path
        self._hello = hello
        self._next_try_ns = now_ns + PERIOD_NS
        self._socket: socket.socket | None = None

    def poll(self, now_ns: int) -> socket.socket | None:
        """Try where it is time, or see whether the agent has replied; the line, once it has agreed."""
        if self._socket is None:
            if now_ns >= self._next_try_ns:
                self._next_try_ns = now_ns + PERIOD_NS
                self._socket = self._try_connect()
            return None
        try:
            packet = self._socket.recv(MAX_PACKET_BYTES)
            reply = decode(packet) if packet else None
        except BlockingIOError:
            return None  # one that is stopped replies when it goes on
        except (OSError, MalformedPacket) as error:
            _log.debug("%s: no agent yet: %s", self._path, error)
            reply = None
        sock, self._socket = self._socket, None
        if isinstance(reply, Reply) and reply.ok:
            return sock
        sock.close()
        return None

    def close(self) -> None:
        """Give up."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _try_connect(self) -> socket.socket | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            sock.connect(self._path)
            sock.send(self._hello())
        except OSError as error:
            _log.debug("%s: no agent yet: %s", self._path, error)
            sock.close()
            return None
        return sock
