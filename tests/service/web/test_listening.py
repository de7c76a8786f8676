"""What the HTTP server says of those who speak something else to its port."""

import asyncio
import logging

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from perseus.service.web.listening import listening
from perseus.tls.address import host_and_port

# As a gRPC client speaks that was told the page's port.
HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")


async def spoken_to(app: web.Application, request: bytes) -> bytes:
    async with listening(app, "127.0.0.1:0", None, 1.0) as url:
        place = host_and_port(url.removeprefix("http://"))
        assert place is not None
        reader, writer = await asyncio.open_connection(*place)
        writer.write(request)
        answer = await reader.read()
        writer.close()
    return answer


@pytest.mark.parametrize("request_bytes", [HTTP_2, b"GET / HTTP/1.1\r\nno header\r\n\r\n"])
async def test_what_is_no_http_is_refused_without_a_traceback(
    request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with capture_logs() as told:
        answer = await spoken_to(web.Application(), request_bytes)
    assert answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert [record for record in caplog.records if record.levelno >= logging.INFO] == []
    assert [line["log_level"] for line in told] == ["info", "debug"]  # the first: that it listens


async def test_a_fault_of_ours_is_told_as_all_others_are() -> None:
    async def fail(_: web.Request) -> web.Response:
        raise RuntimeError("a fault")

    app = web.Application()
    app.router.add_get("/", fail)
    with capture_logs() as told:
        answer = await spoken_to(app, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 500")
    (error,) = [line for line in told if line["log_level"] == "error"]
    assert str(error["exc_info"]) == "a fault"
