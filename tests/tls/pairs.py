"""Valid and invalid certificates, and a coordinator's port that uses them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc

from perseus.certificates import Authority
from perseus.service.listening import Port
from perseus.service.settings import CoordinatorSettings
from perseus.tls.files import TlsFiles

LOCAL = ["localhost", "127.0.0.1"]


def authority(folder: Path, name: str = "Test CA") -> Authority:
    return Authority.create(folder / name, name, timedelta(days=100))


def issue(
    by: Authority,
    stem: str = "own",
    names: list[str] | None = None,
    *,
    is_server: bool = True,
    begins_days: float = -1,
    ends_days: float = 30,
) -> TlsFiles:
    """Write a certificate, its key and its CA, valid between two days from now."""
    now = datetime.now(UTC)
    certificate, key = by.issue(
        by.folder / stem,
        names or LOCAL,
        is_server=is_server,
        begins=now + timedelta(days=begins_days),
        ends=now + timedelta(days=ends_days),
    )
    return TlsFiles(certificate, key, by.folder / "ca.pem")


@asynccontextmanager
async def listening(files: TlsFiles | None, client_ca: Path | None = None) -> AsyncIterator[str]:
    """A gRPC server without services on a coordinator's port."""
    settings = CoordinatorSettings(
        listen="127.0.0.1:0",
        tls_certificate=files.certificate if files is not None else None,
        tls_key=files.key if files is not None else None,
        tls_client_ca=client_ca,
    )
    server = grpc.aio.server()
    port = Port(settings)
    address = port.bind(server)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)
        await port.close()
