"""Authentication of scrapes on an address that others can reach: a reader or an operator, by token or
certificate."""

import time

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from perseus.metrics.readings import Readings
from perseus.service.domain.principals import Grant, Scope
from perseus.service.shell.tokens import Tokens
from perseus.service.web.access import HttpAuthenticator
from perseus.service.web.app import make_app
from perseus.service.web.scrape import Scrape
from tests.service.web.page_server import nothing


async def answer(app: web.Application, headers: dict[str, str] | None = None) -> tuple[int, str]:
    async with TestClient(TestServer(app)) as client:
        response = await client.get("/metrics", headers=headers or {})
        return response.status, await response.text()


async def test_scopes(tokens: Tokens) -> None:
    _, reader = await tokens.create("prometheus", Grant(Scope.READER), None)
    _, operator = await tokens.create("admin", Grant(Scope.OPERATOR), None)
    _, agent = await tokens.create("agents", Grant(Scope.AGENT, ("*",)), None)

    async def status(credential: str | None) -> int:
        headers = {} if credential is None else {"Authorization": credential}
        found, text = await answer(make_app(Scrape(nothing), HttpAuthenticator(tokens, {})), headers)
        assert found != 403 or "expected" in text
        assert agent not in text
        return found

    assert [await status(each) for each in (None, "Basic abc", "Bearer perseus_wrong")] == [401] * 3
    assert [await status(f"Bearer {each}") for each in (agent, reader, operator)] == [403, 200, 200]
    await tokens.revoke("prometheus")
    assert await status(f"Bearer {reader}") == 401


async def test_a_browser_may_be_logged_in_at_several_slots_on_one_host(tokens: Tokens) -> None:
    request = make_mocked_request("GET", "/", headers={"Cookie": "perseus=first; perseus-1=second"})
    assert HttpAuthenticator(tokens, {}).session_id(request) == "first"
    assert HttpAuthenticator(tokens, {}, slot=1).session_id(request) == "second"


async def test_no_authentication_is_needed_on_loopback() -> None:
    status, text = await answer(make_app(Scrape(nothing), None))
    assert (status, "process_cpu_seconds_total" in text) == (200, True)


async def test_the_details_of_a_fault_are_only_in_the_log() -> None:
    async def failing() -> Readings:
        raise ArithmeticError("planted")

    status, text = await answer(make_app(Scrape(failing), None))
    assert status == 500
    assert "planted" not in text


async def test_simultaneous_scrapes_share_an_answer() -> None:
    count = 0

    async def counted() -> Readings:
        nonlocal count
        count += 1
        return Readings()

    now_s = [time.monotonic()]
    scrape = Scrape(counted, lambda: now_s[0])
    text = await scrape.answer("text/plain")
    assert await scrape.answer("text/plain") is text
    assert "openmetrics" in (await scrape.answer("application/openmetrics-text; version=1.0.0"))[1]
    assert count == 1
    now_s[0] += 1.0
    await scrape.answer("text/plain")
    assert count == 2
