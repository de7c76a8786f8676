"""Join an agent during training: one that started later, or restarted.

This happens between two iterations, without waiting: one poll sends a hello, a later one finds the agent's
reply. Standard library only.
"""

import logging
import socket
from collections.abc import Callable

from perseus.agent.link.packets import MAX_PACKET_BYTES, MalformedPacket, Reply, decode

_log = logging.getLogger("perseus.probe")

PERIOD_NS = 10 * 10**9
"""Time between two attempts: one costs the trainer some ten microseconds."""


class Rejoin:
    """One rank's attempts to join the agent at `path`, the first of them a period after `now_ns`.

    `hello` makes the packet that introduces it.
    """

    def __init__(self, path: str, hello: Callable[[], bytes], now_ns: int) -> None:
        self._path = path
        self._hello = hello
        self._next_try_ns = now_ns + PERIOD_NS
        self._socket: socket.socket | None = None

    def poll(self, now_ns: int) -> socket.socket | None:
        """Connect if it is time, or check for the reply; return the socket once the agent accepts."""
        if self._socket is None:
            if now_ns >= self._next_try_ns:
                self._next_try_ns = now_ns + PERIOD_NS
                self._socket = self._try_connect()
            return None
        try:
            packet = self._socket.recv(MAX_PACKET_BYTES)
            reply = decode(packet) if packet else None
        except BlockingIOError:
            return None  # a suspended agent replies once it resumes
        except (OSError, MalformedPacket) as error:
            _log.debug("%s: no agent yet: %s", self._path, error)
            reply = None
        sock, self._socket = self._socket, None
        if isinstance(reply, Reply) and reply.ok:
            return sock
        sock.close()
        return None

    def close(self) -> None:
        """End the attempt."""
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
