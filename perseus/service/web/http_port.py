"""The connections of the HTTP port, accepted one by one, so that no client can keep others out.

Their number is bounded, for one address and in all: agents need file descriptors, too. A connection without a
request under way is closed after a while, whether it is idle, sends its head slowly, or sends nothing.
Refusals are logged at a limited rate, and so are failed TLS handshakes, which asyncio's servers don't report.
New connections get a renewed certificate; open ones keep theirs.
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

from perseus.background import background_task
from perseus.service.api.refusal_log import RefusalLog
from perseus.service.web.errors import Handler
from perseus.tls.files import TlsSource
from perseus.tls.server import server_context

_log = structlog.get_logger(__name__)

MAX_CONNECTIONS = 1024
MAX_CONNECTIONS_OF_ONE = 256
"""For one address: that may be a proxy before all readers of the page."""

QUIET_S = 30.0
"""How long a connection may have no request under way."""

_HANDSHAKE_S = 30.0
_SHUTDOWN_S = 1.0
"""Browsers do not answer the end of TLS; the file descriptor is kept this long."""

SWEEP_S = 5.0
"""Pause between looks for quiet connections."""
_PAUSE_S = 1.0
"""Pause before the next connection is accepted, when no file descriptor is left."""

_WORDS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "expected a certificate of the client, found none",
    "HTTP_REQUEST": "expected TLS, found plain HTTP: use a URL that begins with https",
    "WRONG_VERSION_NUMBER": "expected TLS, found something else",
}


@dataclass(slots=True, eq=False)
class _Connection:
    """An accepted connection; `transport` is None until it is secure. `request_count`: requests under way."""

    address: str
    quiet_since_s: float
    transport: asyncio.BaseTransport | None = None
    request_count: int = 0


class Connections:
    """The open connections, and their requests under way."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._open: list[_Connection] = []
        # Including those that are closing: over TLS that takes two steps.
        self._transports: WeakSet[asyncio.BaseTransport] = WeakSet()
        # A quarter of the file descriptors, if that is less: the rest is for agents and the store.
        self._limit = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)

    def begin(self, address: str) -> _Connection | None:
        """Register a connection from an address; return None if there are too many."""
        if len(self._open) >= self._limit or self._count_of(address) >= MAX_CONNECTIONS_OF_ONE:
            self.sweep()
        if len(self._open) >= self._limit or self._count_of(address) >= MAX_CONNECTIONS_OF_ONE:
            return None
        connection = _Connection(address, self._monotonic())
        self._open.append(connection)
        return connection

    def secured(self, connection: _Connection, transport: asyncio.BaseTransport) -> None:
        """Note that a connection is secure, with its transport."""
        connection.transport = transport
        self._transports.add(transport)

    async def abort(self) -> None:
        """Close all connections at once, with their requests: after the loop's end nobody would."""
        for transport in self._transports:
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()
        await asyncio.sleep(0)  # their sockets are closed in the loop's next turn

    def end(self, connection: _Connection) -> None:
        """Drop a connection that failed before it was secure."""
        self._open.remove(connection)

    def sweep(self) -> None:
        """Close connections that have been quiet for long, and drop those that have ended."""
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
        """A middleware that counts the requests under way."""

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
    """Accepts the connections of a listening socket, and hands them to a server once they are secure.

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
        """Accept connections until cancelled; then close those that are still in their handshake."""
        loop = asyncio.get_running_loop()
        self._bound.setblocking(False)
        sweeping = background_task("quiet connections", self._sweep())
        try:
            while True:
                try:
                    connection, where = await loop.sock_accept(self._bound)
                except ConnectionAbortedError:
                    continue
                except OSError as error:
                    self._refusal_log.record(
                        "all", "no connection can be accepted for a while", str(error.strerror)
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
            await asyncio.sleep(SWEEP_S)
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
        except OSError as error:  # gone or silent, as a port scan is
            _log.debug("no TLS handshake", peer=peer, reason=str(error))
        finally:
            if noted.transport is None:
                self._connections.end(noted)


def _words(error: ssl.SSLError) -> str:
    reason = error.reason or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate is not accepted: {error.verify_message}"
    if "ALERT" in reason:  # the client refuses us
        return f"the client ends the handshake: {reason.rpartition('ALERT_')[2].lower().replace('_', ' ')}"
    return _WORDS.get(reason, reason.lower().replace("_", " "))
