"""The HTTP port: clients that speak something else there are refused, and no client keeps others out."""

import asyncio
import contextlib
import gc
import logging
import os
import socket
import ssl
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from perseus.demo.security import Security
from perseus.service.web import http_port
from perseus.service.web.listening import bind, listening
from perseus.tls.address import host_and_port
from perseus.tls.files import Role, TlsFiles, TlsSource
from tests.ports import free_port
from tests.service.grpc_fakes import make_secured_settings, running_here
from tests.service.web.page_server import site
from tests.service.web.test_metrics import client_context
from tests.tls.pairs import authority, issue

# The beginning of a gRPC client's connection to the page's port.
HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")


async def spoken_to(app: web.Application, request: bytes) -> bytes:
    async with listening(app, bind("127.0.0.1:0"), None, 1.0) as url:
        place = host_and_port(url.removeprefix("http://"))
        assert place is not None
        reader, writer = await asyncio.open_connection(*place)
        writer.write(request)
        answer = await reader.read()
        writer.close()
    return answer


@pytest.mark.parametrize("request_bytes", [HTTP_2, b"GET / HTTP/1.1\r\nno header\r\n\r\n"])
async def test_malformed_http_is_refused_without_a_traceback(
    request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with capture_logs() as reported:
        answer = await spoken_to(web.Application(), request_bytes)
    assert answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert [record for record in caplog.records if record.levelno >= logging.INFO] == []
    assert [line["log_level"] for line in reported] == ["info", "debug"]  # the first: that it listens


async def test_a_fault_in_the_server_is_logged_like_all_others() -> None:
    async def fail(_: web.Request) -> web.Response:
        raise RuntimeError("a fault")

    app = web.Application()
    app.router.add_get("/", fail)
    with capture_logs() as reported:
        answer = await spoken_to(app, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 500")
    (error,) = [line for line in reported if line["log_level"] == "error"]
    assert str(error["exc_info"]) == "a fault"


async def spoken_plainly(host: str, port: int, words: bytes) -> None:
    """Connect, send something, and wait until the other side hangs up."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(words)
    if not words:
        writer.close()
    with contextlib.suppress(ConnectionError):
        await reader.read()
    writer.close()


async def shaken(host: str, port: int, context: ssl.SSLContext) -> bool:
    """Return whether an answer comes; with TLS 1.3 a client's certificate is checked after its own
    handshake."""
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
    except (ConnectionError, ssl.SSLError):
        return False
    return answer.startswith(b"HTTP/1.1 404")


def distrust(host: str, port: int, context: ssl.SSLContext) -> None:
    """Refuse the server's certificate with an alert, which asyncio's clients don't send."""
    with (
        pytest.raises(ssl.SSLCertVerificationError),
        socket.create_connection((host, port)) as plain,
        context.wrap_socket(plain, server_hostname=host),
    ):
        pass


def of_client(trusted: Path | None, own: TlsFiles | None, version: ssl.TLSVersion) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=trusted)
    context.maximum_version = version
    if own is not None and own.certificate is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_refused_handshakes_are_logged_once_per_kind_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: ssl.TLSVersion
) -> None:
    ours, theirs = authority(tmp_path, "ours"), authority(tmp_path, "theirs")
    files, ca = issue(ours), ours.folder / "ca.pem"
    good = issue(ours, "good", ["client"], is_server=False)
    foreign = issue(theirs, "foreign", ["client"], is_server=False)
    late = issue(ours, "late", ["client"], is_server=False, begins_days=-9, ends_days=-1)
    tls = TlsSource(TlsFiles(files.certificate, files.key, ca), Role.SERVER)
    with capture_logs() as reported:
        async with listening(web.Application(), bind("127.0.0.1:0"), tls, 1.0) as url:
            place = host_and_port(url.removeprefix("https://"))
            assert place is not None
            assert await shaken(*place, of_client(ca, good, version))
            for _ in range(3):
                assert not await shaken(*place, of_client(ca, None, version))
                assert not await shaken(*place, of_client(ca, foreign, version))
            assert not await shaken(*place, of_client(ca, late, version))
            await asyncio.to_thread(distrust, *place, of_client(None, good, version))
            for _ in range(2):
                await spoken_plainly(*place, b"GET / HTTP/1.1\r\n\r\n")
            await spoken_plainly(*place, HTTP_2)
            await spoken_plainly(*place, b"")  # like a port scan
            assert await shaken(*place, of_client(ca, good, version))
    gc.collect()  # asyncio reports an exception that was not retrieved when its task is collected
    refused = [line for line in reported if line["log_level"] not in ("debug", "info")]
    assert {line["log_level"] for line in refused} == {"warning"}
    assert {line["event"] for line in refused} == {"TLS handshake refused"}
    assert all(line["peer"].startswith("127.0.0.1:") for line in refused)
    assert [line["reason"] for line in refused] == [
        "expected a certificate of the client, found none",
        "the client's certificate is not accepted: unable to get local issuer certificate",
        "the client's certificate is not accepted: certificate has expired",
        "the client ends the handshake: unknown ca",
        "expected TLS, found plain HTTP: use a URL that begins with https",
        "expected TLS, found something else",
    ]
    assert [record for record in caplog.records if record.levelno >= logging.INFO] == []


async def test_a_handshake_that_never_ends_holds_up_neither_others_nor_the_end(tmp_path: Path) -> None:
    files = issue(authority(tmp_path))
    tls = TlsSource(TlsFiles(files.certificate, files.key), Role.SERVER)
    context = of_client(files.ca, None, ssl.TLSVersion.TLSv1_3)
    async with asyncio.timeout(20), listening(web.Application(), bind("127.0.0.1:0"), tls, 1.0) as url:
        place = host_and_port(url.removeprefix("https://"))
        assert place is not None
        reader, writer = await asyncio.open_connection(*place)
        assert await shaken(*place, context)
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()


# ---------------------------------------------------------------------- connections


HALF = b"GET /metrics HTTP/1.1\r\nHost: board\r\nX-Half: "
HALF_BODY = (
    b"POST /session HTTP/1.1\r\nHost: board\r\nOrigin: http://board\r\n"
    b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
)


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "QUIET_S", 0.5)
    monkeypatch.setattr(http_port, "SWEEP_S", 0.05)
    monkeypatch.setattr("perseus.service.web.page_api.BODY_S", 1.5)
    monkeypatch.setattr(http_port, "MAX_CONNECTIONS_OF_ONE", 8)


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("message", [b"", HALF, HALF_BODY])
async def test_half_a_request_keeps_nobody_out_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: bytes
) -> None:
    monkeypatch.setattr(http_port, "QUIET_S", 60.0)  # until the others are refused
    known = site(tmp_path, http_hosts="board")
    async with known as here, asyncio.timeout(20), aiohttp.ClientSession() as session:
        place = host_and_port(here.url.removeprefix("http://"))
        assert place is not None
        with capture_logs() as logs, contextlib.ExitStack() as stack:

            async def opened() -> asyncio.StreamReader:
                reader, writer = await asyncio.open_connection(*place)
                stack.callback(writer.close)
                writer.write(message)
                return reader

            silent = [await opened() for _ in range(8)]
            refused = [await opened() for _ in range(50)]
            assert [await each.read() for each in refused] == 50 * [b""], "as many as one address may have"
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"{here.url}/metrics")
            monkeypatch.setattr(http_port, "QUIET_S", 0.0)
            answers = [await each.read() for each in silent]
            assert all(answer == b"" or answer.startswith(b"HTTP/1.1 408 ") for answer in answers)
            async with session.get(f"{here.url}/metrics") as answer:
                assert answer.status == 200
        reported = [line for line in logs if line["event"] == "connection refused"]
        assert [line["reason"] for line in reported] == ["TOO_MANY_CONNECTIONS"], "once in a while"


@pytest.mark.usefixtures("hurry")
async def test_an_event_stream_is_not_a_quiet_connection(tmp_path: Path) -> None:
    async with site(tmp_path) as here, aiohttp.ClientSession() as session:
        async with session.get(f"{here.url}/api/watch/jobs") as stream:
            assert await stream.content.readline()
            await asyncio.sleep(1.0)  # longer than a quiet connection may last
            assert not stream.content.at_eof()
            assert not stream.connection.transport.is_closing()  # type: ignore[union-attr]
        async with session.get(f"{here.url}/metrics") as answer:
            assert answer.status == 200


async def test_a_client_that_does_not_end_tls_does_not_outlast_the_server(tmp_path: Path) -> None:
    security = Security(tmp_path / "security")
    settings = make_secured_settings(tmp_path, security, http=f"127.0.0.1:{free_port()}")
    host, _, port = str(settings.http).partition(":")
    context = client_context(security)
    with socket.socket() as plain:
        async with running_here(settings):
            await asyncio.to_thread(plain.connect, (host, int(port)))
            client = await asyncio.to_thread(context.wrap_socket, plain, server_hostname=host)
            client.send(b"GET / HTTP/1.1\r\nHost: board\r\nX-Half: ")
        with socket.socket(fileno=os.dup(client.fileno())) as line, contextlib.suppress(ConnectionResetError):
            line.settimeout(10.0)
            while line.recv(65_536):  # to the end of the connection, not just of TLS
                pass
        client.close()
