"""The connections of the HTTP port, taken one by one, so that nobody's keep others out.

There are at most so many, of one address and in all: agents need file descriptors, too. One that has no
request under way is closed after a while: it is idle, sends its head slowly, or not at all. What is refused
is told of now and then, and so is a TLS handshake that fails, of which asyncio's servers say nothing. A
renewed certificate is what the next connection is shown; those that are open keep theirs.
"""

import asyncio
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakSet

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from perseus.service.api.refusal_log import RefusalLog
from perseus.service.web.errors import Handler
from perseus.tls.files import TlsSource
from perseus.tls.server import server_context

_log = structlog.get_logger(__name__)

MAX_CONNECTIONS = 1024
MAX_CONNECTIONS_OF_ONE = 256
"""Of one address: a proxy's, say, before all who look at the page."""

QUIET_S = 30.0
"""So long a connection may be without a request under way."""

_HANDSHAKE_S = 30.0
_SHUTDOWN_S = 1.0
"""Browsers do not answer when they are told of the end; the file descriptor is kept so long."""

_SWEEP_S = 5.0
_PAUSE_S = 1.0
"""Before the next connection is taken, where there is no file descriptor for it."""

_WORDS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "expected a certificate of the client, found none",
    "HTTP_REQUEST": "expected TLS, found plain HTTP: its URL begins with https",
    "WRONG_VERSION_NUMBER": "expected TLS, found something else",
}


@dataclass(slots=True, eq=False)
class _Connection:
    """One that was taken; `transport`: None until it is secure. `request_count`: of those under way."""

    address: str
    quiet_since_s: float
    transport: asyncio.BaseTransport | None = None
    request_count: int = 0


class Connections:
    """The connections that are open, and which of them have requests under way."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._open: list[_Connection] = []
        # Also those that are closing: over TLS that takes two.
        self._transports: WeakSet[asyncio.BaseTransport] = WeakSet()
        # A quarter of the file descriptors, if that is less: the others are for agents and the store.
        self._limit = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)

    def begin(self, address: str) -> _Connection | None:
        """Note a connection from an address; None if there are too many."""
        if len(self._open) >= self._limit or self._count_of(address) >= MAX_CONNECTIONS_OF_ONE:
            self.sweep()
        if len(self._open) >= self._limit or self._count_of(address) >= MAX_CONNECTIONS_OF_ONE:
            return None
        connection = _Connection(address, self._monotonic())
        self._open.append(connection)
        return connection

    def secured(self, connection: _Connection, transport: asyncio.BaseTransport) -> None:
        """It may say something from now on."""
        connection.transport = transport
        self._transports.add(transport)

    async def abort(self) -> None:
        """Close all at once, whatever is under way: nobody would do it once the loop has ended."""
        for transport in self._transports:
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()
        await asyncio.sleep(0)  # their sockets are closed in the loop's next turn

    def end(self, connection: _Connection) -> None:
        """It came to nothing."""
        self._open.remove(connection)

    def sweep(self) -> None:
        """Close those that are quiet for long, and forget those that have ended."""
        now_s = self._monotonic()
        for each in self._open:
            is_quiet = not each.request_count and now_s >= each.quiet_since_s + QUIET_S
            if is_quiet and isinstance(each.transport, asyncio.WriteTransport):
                each.transport.abort()
        self._open = [
            each for each in self._open if each.transport is None or not each.transport.is_closing()
        ]

    def _count_of(self, address: str) -> int:
        return Counter(each.address for each in self._open)[address]

    @property
    def note_requests(self) -> Middleware:
        """A middleware, for all requests of the port."""

        @web.middleware
        async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection = next((each for each in self._open if each.transport is request.transport), None)
            if connection is None:  # it has ended already
                return await handler(request)
            connection.request_count += 1
            try:
                return await handler(request)
            finally:
                connection.request_count -= 1
                connection.quiet_since_s = self._monotonic()

        return note


class HttpPort:
    """Takes the connections of a socket that listens, and hands them to a server once they are secure.

    `tls`: None for plain HTTP.
    """

    def __init__(
        self, server: web.Server, bound: socket.socket, tls: TlsSource | None, connections: Connections
    ) -> None:
        self._server = server
        self._bound = bound
        self._tls = tls
        self._generation = -1
        self._context: ssl.SSLContext | None = None
        self._connections = connections
        self._refusal_log = RefusalLog()
        self._beginning: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Take connections until cancelled; those whose handshakes go on then are closed."""
        loop = asyncio.get_running_loop()
        self._bound.setblocking(False)
        sweeping = asyncio.create_task(self._sweep())
        try:
            while True:
                try:
                    connection, where = await loop.sock_accept(self._bound)
                except ConnectionAbortedError:
                    continue
                except OSError as error:
                    self._refusal_log.record(
                        "all", "no connection can be taken for a while", str(error.strerror)
                    )
                    await asyncio.sleep(_PAUSE_S)
                    continue
                task = asyncio.create_task(self._take(connection, where[0], f"{where[0]}:{where[1]}"))
                self._beginning.add(task)
                task.add_done_callback(self._beginning.discard)
        finally:
            tasks = [sweeping, *self._beginning]
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._connections.sweep()

    async def _take(self, connection: socket.socket, address: str, peer: str) -> None:
        noted = self._connections.begin(address)
        if noted is None:
            connection.close()
            self._refusal_log.record(peer, "connection refused", "TOO_MANY_CONNECTIONS")
            return
        if self._tls is not None and self._generation != self._tls.generation:
            self._generation, self._context = self._tls.generation, server_context(self._tls.material)
        is_secured = self._context is not None
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                self._server,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=_HANDSHAKE_S if is_secured else None,
                ssl_shutdown_timeout=_SHUTDOWN_S if is_secured else None,
            )
            self._connections.secured(noted, transport)
        except ssl.SSLError as error:
            self._refusal_log.record(peer, "TLS handshake refused", _words(error))
        except OSError as error:  # gone, or silent, as whoever looks whether a port is open
            _log.debug("no TLS handshake", peer=peer, reason=str(error))
        finally:
            if noted.transport is None:
                self._connections.end(noted)


def _words(error: ssl.SSLError) -> str:
    reason = error.reason or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate is not accepted: {error.verify_message}"
    if "ALERT" in reason:  # what the client said of us
        return f"the client ends the handshake: {reason.rpartition('ALERT_')[2].lower().replace('_', ' ')}"
    return _WORDS.get(reason, reason.lower().replace("_", " "))
