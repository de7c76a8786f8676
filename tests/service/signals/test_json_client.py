"""The JSON client: limits on time and size, retry delays, and no key in any error."""

import asyncio
from collections.abc import Callable

import pytest
from aiohttp import web

from perseus.service.signals.json_client import MAX_BYTES, JsonClient
from perseus.service.signals.source import SourceError
from tests.service.signals.signal_server import serving

KEY = "secret-key"


async def mistake(answer: Callable[[web.Request], web.StreamResponse], path: str = "/x") -> SourceError:
    """Send a request to a server with this answer; return the error."""
    async with serving({"/x": answer}) as server:
        client = JsonClient(server.url, {"auth-token": KEY}, timeout_s=5.0)
        with pytest.raises(SourceError) as caught:
            await client.get(path, {"zone": "DE"})
        await client.close()
    assert KEY not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert server.url.rstrip("/") in str(caught.value)
    return caught.value


def of_status(status: int, **headers: str) -> Callable[[web.Request], web.Response]:
    return lambda _: web.Response(status=status, headers={k.replace("_", "-"): v for k, v in headers.items()})


@pytest.mark.parametrize(
    ("status", "headers", "wait_s"),
    [
        (401, {}, 0.0),
        (404, {"Retry_After": "60"}, 0.0),
        (429, {"Retry_After": "60"}, 60.0),
        (429, {"Retry_After": "99999999999"}, 3600.0),
        (429, {"Retry_After": "soon"}, 0.0),
        (503, {"Retry_After": "Fri, 01 Jan 2100 00:00:00 GMT"}, 3600.0),
        (503, {"Retry_After": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0.0),
        (302, {"Location": "http://127.0.0.1:1/elsewhere"}, 0.0),
    ],
)
async def test_another_status_is_an_error_and_may_ask_for_a_delay(
    status: int, headers: dict[str, str], wait_s: float
) -> None:
    found = await mistake(of_status(status, **headers))
    assert f"expected an answer, found {status}" in str(found)
    assert found.retry_after_s == wait_s


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"<html>" + b"x" * 1000, f"expected JSON, found {'<html>' + 'x' * 34!r}"),
        (b"[" * 200_000, "expected JSON"),
        (b" " * (MAX_BYTES + 1), f"expected at most {MAX_BYTES} bytes, found more"),
    ],
)
async def test_an_answer_that_is_no_json_or_too_large_is_an_error(body: bytes, text: str) -> None:
    assert text in str(await mistake(lambda _: web.Response(body=body)))


async def test_a_silent_server_is_not_waited_for() -> None:
    async def stay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(stay, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = JsonClient(f"http://127.0.0.1:{port}", timeout_s=0.2)
    with pytest.raises(SourceError, match=r"expected an answer in 0\.2 s, found none"):
        await client.get("/x")
    await client.close()
    server.close()
    with pytest.raises(SourceError, match="expected an answer, found: "):
        await client.get("/x")
    await client.close()
