"""Where the HTTP server listens: plaintext, or TLS with the certificates that gRPC has.

A renewed certificate is taken by listening anew on the same socket: connections that are open keep theirs,
and at no moment does nobody listen.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from perseus.service.domain.errors import AddressUnavailableError
from perseus.tls.address import host_and_port
from perseus.tls.files import TlsSource
from perseus.tls.server import server_context

_log = structlog.get_logger(__name__)

_BACKLOG = 128
_LOOK_S = 5.0
"""How often it is looked for renewed certificates; gRPC's port reads their files."""


class _Log(logging.Handler):
    """Has aiohttp's errors told as all others are; what is no HTTP is its sender's mistake, and no error."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            _log.debug("no HTTP, or none that is understood", request=record.getMessage())
        else:
            _log.error("HTTP", message=record.getMessage(), exc_info=error)


_server_log = logging.Logger(f"{__name__}.aiohttp", logging.WARNING)
_server_log.addHandler(_Log())


@contextlib.asynccontextmanager
async def listening(
    app: web.Application, address: str, tls: TlsSource | None, shutdown_grace_s: float
) -> AsyncIterator[str]:
    """Serve for the length of the block, which gets the bound URL.

    Raises:
        AddressUnavailableError: the address is taken, or none.
    """
    runner = web.AppRunner(app, access_log=None, logger=_server_log, shutdown_timeout=shutdown_grace_s)
    await runner.setup()
    try:
        with _bound(address) as bound:
            host, port = bound.getsockname()[:2]
            url = f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
            site = await _listen(runner, bound, tls)
            renewing = asyncio.create_task(_renew(runner, bound, tls, site)) if tls is not None else None
            _log.info("listening for HTTP", url=url)
            try:
                yield url
            finally:
                if renewing is not None:
                    renewing.cancel()
                    await asyncio.gather(renewing, return_exceptions=True)
    finally:
        await runner.cleanup()


def _bound(address: str) -> socket.socket:
    found = host_and_port(address)
    if found is None:
        raise AddressUnavailableError(address=address, cause="expected HOST:PORT")
    host, port = found
    try:
        family, _, _, _, where = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise AddressUnavailableError(address=address, cause=error.strerror or error) from None


async def _listen(runner: web.AppRunner, bound: socket.socket, tls: TlsSource | None) -> web.SockSite:
    context = server_context(tls.material) if tls is not None else None
    site = web.SockSite(runner, bound.dup(), ssl_context=context, backlog=_BACKLOG)
    await site.start()
    return site


async def _renew(runner: web.AppRunner, bound: socket.socket, tls: TlsSource, site: web.SockSite) -> None:
    generation = tls.generation
    while True:
        await asyncio.sleep(_LOOK_S)
        if generation != tls.generation:
            generation, before = tls.generation, site
            site = await _listen(runner, bound, tls)
            await before.stop()
