"""The HTTP server's address: plaintext, or TLS with gRPC's certificates."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from perseus.background import background_task
from perseus.service.domain.errors import AddressUnavailableError
from perseus.service.web.http_port import Connections, HttpPort
from perseus.tls.address import host_and_port
from perseus.tls.files import TlsSource

_log = structlog.get_logger(__name__)

_BACKLOG = 128
_LINGERING_S = 2.0
"""How long the rest of a request is read that was refused before its end."""


class _Log(logging.Handler):
    """Logs aiohttp's errors as ours; a malformed request is its sender's fault, and no error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record of aiohttp."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            _log.debug("malformed HTTP request", request=record.getMessage())
        else:
            _log.error("HTTP", message=record.getMessage(), exc_info=error)


_server_log = logging.Logger(f"{__name__}.aiohttp", logging.WARNING)
_server_log.addHandler(_Log())


@contextlib.asynccontextmanager
async def listening(
    app: web.Application, bound: socket.socket, tls: TlsSource | None, shutdown_grace_s: float
) -> AsyncIterator[str]:
    """Serve on a socket of `bind` for the length of the block, which gets its URL; then close it."""
    connections = Connections()
    app.middlewares.insert(0, connections.note_requests)
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=_server_log,
        shutdown_timeout=shutdown_grace_s,
        lingering_time=_LINGERING_S,
    )
    await runner.setup()
    try:
        with bound:
            host, port = bound.getsockname()[:2]
            url = f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
            _log.info("listening for HTTP", url=url)
            assert runner.server is not None
            taking = background_task("HTTP", HttpPort(runner.server, bound, tls, connections).run())
            try:
                yield url
            finally:
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)
    finally:
        await runner.cleanup()
        await connections.abort()


def bind(address: str) -> socket.socket:
    """Return a socket that listens on an address; connections wait there until they are served.

    Raises:
        AddressUnavailableError: the address is taken, or invalid.
    """
    found = host_and_port(address)
    if found is None:
        raise AddressUnavailableError(address=address, cause="expected HOST:PORT")
    host, port = found
    try:
        family, _, _, _, where = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise AddressUnavailableError(address=address, cause=error.strerror or error) from None
