"""The coordinator's port: plaintext or TLS, with certificates that can be renewed while it listens.

gRPC asks for the certificates before every handshake; open streams keep theirs. It speaks TLS 1.2 and 1.3
and nothing older, and has no setting for that.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import cast

import grpc
import structlog

from perseus.background import background_task
from perseus.service.domain.errors import AddressUnavailableError, CertificatesUnusableError
from perseus.service.settings import CoordinatorSettings
from perseus.tls.address import OTHER_SCHEMES, host_and_port
from perseus.tls.files import Role, TlsError, TlsFiles, TlsSource

_log = structlog.get_logger(__name__)

POLL_S = 60.0
"""Pause between looks whether certificates were renewed or are about to expire."""


class Port:
    """The port that the settings configure.

    Raises:
        CertificatesUnusableError: names the file.
    """

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._address = settings.listen
        self._is_insecure = settings.insecure
        self._source: TlsSource | None = None
        self._keeping: asyncio.Task[None] | None = None
        if settings.tls_certificate is None:
            return
        files = TlsFiles(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
        try:
            self._source = TlsSource(files, Role.SERVER)
        except TlsError as error:
            raise CertificatesUnusableError(cause=error) from None

    def bind(self, server: grpc.aio.Server) -> str:
        """Let a server listen on the port; return the address with the real port number.

        Raises:
            AddressUnavailableError: it is taken, or invalid.
        """
        try:
            port = (
                server.add_secure_port(self._address, _credentials(self._source))
                if self._source is not None
                else server.add_insecure_port(self._address)
            )
        except RuntimeError as error:
            raise AddressUnavailableError(address=self._address, cause=error) from None
        if self._source is not None:
            self._keeping = background_task("certificates", _keep_fresh(self._source))
        elif self._is_insecure:
            _log.warning(
                "insecure: plaintext, and anybody who reaches this address may do anything",
                address=self._address,
            )
        if self._address.startswith("unix"):
            return self._address
        return f"{self._address.rpartition(':')[0]}:{port}"

    @property
    def tls(self) -> TlsSource | None:
        """The certificates in use; None for plaintext."""
        return self._source

    async def close(self) -> None:
        """Stop renewing certificates."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)


def check_free(address: str) -> None:
    """Check that an address can be bound, without listening there.

    A start that would fail at it then fails before it has made a database.

    Raises:
        AddressUnavailableError: it is taken, or invalid.
    """
    if address.startswith("unix:"):  # a socket that is there is replaced
        path = Path(address.removeprefix("unix:").removeprefix("//"))
        if not os.access(path.parent, os.W_OK):
            raise AddressUnavailableError(address=address, cause=f"can't write to the folder {path.parent}")
        if path.exists() and not path.is_socket():
            raise AddressUnavailableError(
                address=address, cause="expected a socket or nothing there, found a file"
            )
    if address.startswith(OTHER_SCHEMES):  # gRPC has them for clients only
        raise AddressUnavailableError(address=address, cause="expected HOST:PORT, or unix:PATH")
    found = host_and_port(address)
    if found is None:
        return
    host, port = found
    failure: OSError | None = None
    try:
        places = socket.getaddrinfo(
            None if host == "*" else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        places, failure = [], error
    for family, kind, _, _, where in places:
        try:
            with socket.socket(family, kind) as bound:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind(where)
            return  # one of a name's addresses is enough for gRPC
        except OSError as error:
            failure = error
    raise AddressUnavailableError(address=address, cause=(failure and failure.strerror) or failure) from None


def _credentials(source: TlsSource) -> grpc.ServerCredentials:
    served = source.generation

    def configuration() -> grpc.ServerCertificateConfiguration:
        material = source.material
        assert material.key is not None and material.certificate is not None  # noqa: PT018 - the settings ensure it
        return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.ca)

    def newer() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC's threads, one at a time; None means unchanged."""
        nonlocal served
        source.poll()
        if served == source.generation:
            return None
        served = source.generation
        return configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        cast(Callable[[], grpc.ServerCertificateConfiguration], newer),
        require_client_authentication=source.files.ca is not None,
    )


async def _keep_fresh(source: TlsSource) -> None:
    """Notice certificates that are renewed or about to expire, even if nobody connects."""
    while True:
        await asyncio.sleep(POLL_S)
        await asyncio.to_thread(source.poll)
