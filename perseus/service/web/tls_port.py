"""Connections over TLS, shaken hands with one by one, so that a handshake that fails is told of.

asyncio's servers say nothing of those. A renewed certificate is what the next connection is shown; those that
are open keep theirs.
"""

import asyncio
import socket
import ssl

import structlog
from aiohttp import web

from perseus.service.api.complaints import Complaints
from perseus.tls.files import TlsSource
from perseus.tls.server import server_context

_log = structlog.get_logger(__name__)

_HANDSHAKE_S = 30.0
_PAUSE_S = 1.0
"""Before the next connection is taken, where there is no file descriptor for it."""

_WORDS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "expected a certificate of the client, found none",
    "HTTP_REQUEST": "expected TLS, found plain HTTP: its URL begins with https",
    "WRONG_VERSION_NUMBER": "expected TLS, found something else",
}


class TlsPort:
    """Takes the connections of a socket that listens, and hands them to a server once they are secure."""

    def __init__(self, server: web.Server, bound: socket.socket, tls: TlsSource) -> None:
        self._server = server
        self._bound = bound
        self._tls = tls
        self._generation = tls.generation
        self._context = server_context(tls.material)
        self._complaints = Complaints()
        self._shaking: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Take connections until cancelled; those whose handshakes go on then are closed."""
        loop = asyncio.get_running_loop()
        self._bound.setblocking(False)
        try:
            while True:
                try:
                    connection, where = await loop.sock_accept(self._bound)
                except ConnectionAbortedError:
                    continue
                except OSError as error:
                    _log.error("no connection can be taken for a while", reason=error.strerror)
                    await asyncio.sleep(_PAUSE_S)
                    continue
                task = asyncio.create_task(self._shake(connection, f"{where[0]}:{where[1]}"))
                self._shaking.add(task)
                task.add_done_callback(self._shaking.discard)
        finally:
            for each in self._shaking:
                each.cancel()
            await asyncio.gather(*self._shaking, return_exceptions=True)

    async def _shake(self, connection: socket.socket, peer: str) -> None:
        if self._generation != self._tls.generation:
            self._generation, self._context = self._tls.generation, server_context(self._tls.material)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._server, connection, ssl=self._context, ssl_handshake_timeout=_HANDSHAKE_S
            )
        except ssl.SSLError as error:
            self._complaints.complain(peer, "TLS handshake refused", _words(error))
        except OSError as error:  # gone, or silent, as whoever looks whether a port is open
            _log.debug("no TLS handshake", peer=peer, reason=str(error))


def _words(error: ssl.SSLError) -> str:
    reason = error.reason or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate is not accepted: {error.verify_message}"
    if "ALERT" in reason:  # what the client said of us
        return f"the client ends the handshake: {reason.rpartition('ALERT_')[2].lower().replace('_', ' ')}"
    return _WORDS.get(reason, reason.lower().replace("_", " "))
