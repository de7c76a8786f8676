"""Connections of the HTTP port: no client can keep others out."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from structlog.testing import capture_logs

from perseus.demo.security import Security
from perseus.service.web import http_port
from tests.ports import free_port
from tests.service.grpc_fakes import make_secured_settings, running_here
from tests.service.web.page_server import site
from tests.service.web.test_metrics import client_context

HALF = b"GET /metrics HTTP/1.1\r\nHost: board\r\nX-Half: "
HALF_BODY = (
    b"POST /session HTTP/1.1\r\nHost: board\r\nOrigin: http://board\r\n"
    b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
)


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "QUIET_S", 0.5)
    monkeypatch.setattr(http_port, "SWEEP_S", 0.05)
    monkeypatch.setattr("perseus.service.web.page_api.BODY_S", 1.5)
    monkeypatch.setattr(http_port, "MAX_CONNECTIONS_OF_ONE", 8)


async def opened(url: str, message: bytes) -> asyncio.StreamReader:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(message)
    kept.append(writer)
    return reader


kept: list[asyncio.StreamWriter] = []


@pytest.fixture(autouse=True)
def _all_closed() -> Iterator[None]:
    yield
    for writer in kept:
        writer.close()
    kept.clear()


@pytest.mark.parametrize("message", [b"", HALF, HALF_BODY])
async def test_half_a_request_keeps_nobody_out_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: bytes
) -> None:
    monkeypatch.setattr(http_port, "QUIET_S", 60.0)  # until the others are refused
    async with site(tmp_path) as here, asyncio.timeout(20), aiohttp.ClientSession() as session:
        with capture_logs() as logs:
            silent = [await opened(here.url, message) for _ in range(8)]
            refused = [await opened(here.url, message) for _ in range(50)]
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
            its_own = {socket_of(client.fileno())}
            theirs = connected_to(int(port)) - its_own
            assert theirs
        assert connected_to(int(port)) <= its_own, "nobody waits for its answer"
        client.close()


def socket_of(descriptor: int | str) -> str:
    with suppress(OSError):  # the listing's own descriptor
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


def connected_to(port: int) -> set[str]:
    """Return this process's sockets with that port at either end, except listening ones."""
    found = set()
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        parts = line.split()
        if f":{port:04X}" in f"{parts[1]} {parts[2]}" and parts[3] != "0A":
            found.add(f"socket:[{parts[9]}]")
    return found & {socket_of(descriptor) for descriptor in os.listdir("/proc/self/fd")}
