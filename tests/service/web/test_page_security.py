"""Access to the page's server: logins, their ends, scrapes, and requests that another site's page makes."""

import asyncio
import time
from collections.abc import AsyncIterator
from http.cookies import SimpleCookie
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from perseus.demo.security import Security
from perseus.metrics.readings import Readings
from perseus.release import release
from perseus.service.domain.errors import (
    CredentialMissingError,
    LimitReachedError,
    TokenExpiredError,
    TokenRevokedError,
)
from perseus.service.domain.principals import Grant, Scope
from perseus.service.shell.tokens import Tokens
from perseus.service.shell.writer import Writer
from perseus.service.storage.sql_store import SqlStore
from perseus.service.web import event_stream, sessions
from perseus.service.web.access import HttpAuthenticator
from perseus.service.web.app import make_app
from perseus.service.web.scrape import Scrape
from perseus.service.web.sessions import LoginRateLimiter, Sessions
from tests.ports import free_port
from tests.service.grpc_fakes import make_secured_settings, running_here
from tests.service.web.page_server import browsing, guarded, site
from tests.service.web.test_metrics import client_context
from tests.service.web.test_page_api import assert_refused, registration

ALONE = {"slot": 0, "slot_count": 1}
NOBODY = {"name": "", "scope": "", "requires_login": True, "may_control": False, "release": "", **ALONE}


@pytest.fixture
def wall_s() -> list[float]:
    """The time of the tokens, which a test can advance."""
    return [time.time()]


@pytest.fixture
async def tokens(tmp_path: Path, wall_s: list[float]) -> AsyncIterator[Tokens]:
    store = await SqlStore.open(tmp_path / "tokens.db")
    writer = Writer(store)
    writing = asyncio.create_task(writer.run())
    yield Tokens(store, writer, clock=lambda: wall_s[0])
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    await store.close()


async def test_a_login_and_its_end(tmp_path: Path) -> None:
    async with guarded(tmp_path) as server:
        secret = await server.token(Scope.READER)
        assert (await server.get("session")).json == NOBODY
        unknown = await server.call("ListJobs", {})
        assert_refused(unknown, 401, "UNAUTHENTICATED", "CREDENTIAL_MISSING")
        assert unknown.headers["WWW-Authenticate"] == "Bearer"
        for path in ("api/watch/jobs", "api/watch/jobs/job", "api/ranks/job"):
            assert_refused(await server.get(path), 401, "UNAUTHENTICATED", "CREDENTIAL_MISSING")
        assert (await server.get()).status == 200
        assert (await server.get("metrics")).status == 200, "on loopback anybody may scrape"

        answer = await server.log_in(secret)
        assert answer.status == 200
        me = NOBODY | {"name": "token me", "scope": "reader", "release": release()}
        assert answer.json == me
        (cookie,) = SimpleCookie(answer.headers["Set-Cookie"]).values()
        assert cookie["httponly"]
        assert (cookie["samesite"], cookie["path"], cookie["secure"]) == ("Strict", "/", "")
        assert 0 < int(cookie["max-age"]) <= 12 * 3600
        assert secret not in answer.headers["Set-Cookie"]
        assert len(cookie.value) >= 43
        assert (await server.get("session")).json == me
        assert (await server.call("ListJobs", {})).status == 200

        # A reader may not control, whatever the page shows.
        finish = await server.call("FinishJob", {"job_id": "a"})
        assert_refused(finish, 403, "PERMISSION_DENIED", "SCOPE_TOO_NARROW")

        gone = await server.log_out()
        assert (gone.status, gone.text) == (204, "")
        assert (await server.get("session")).json == NOBODY
        async with browsing(server.url) as other:
            stolen = server.origin | {"Cookie": f"perseus={cookie.value}"}
            assert (await other.call("ListJobs", {}, stolen)).status == 401


async def test_failed_logins(tmp_path: Path) -> None:
    async with guarded(tmp_path) as server:
        wrong = await server.log_in("perseus_wrong")
        assert_refused(wrong, 401, "UNAUTHENTICATED", "TOKEN_UNKNOWN")
        agent = await server.log_in(await server.token(Scope.AGENT))
        assert_refused(agent, 403, "PERMISSION_DENIED", "SCOPE_TOO_NARROW")
        bodies: tuple[object, ...] = ({}, {"token": 5}, [], "x")
        for body in bodies:
            assert_refused(await server.post("session", body), 400, "INVALID_ARGUMENT", "INVALID_FIELD")
        deep = await server.post("session", b"[" * 60_000)
        assert_refused(deep, 400, "INVALID_ARGUMENT", "MALFORMED_MESSAGE")
        for _ in range(sessions.MAX_ATTEMPTS):
            late = await server.log_in("perseus_wrong")
        assert_refused(late, 429, "RESOURCE_EXHAUSTED", "LIMIT_REACHED")
        assert int(late.headers["Retry-After"]) >= 5
        assert "Set-Cookie" not in late.headers


async def test_an_operator_controls_from_our_own_page_only(tmp_path: Path) -> None:
    async with guarded(tmp_path) as server:
        url, secret = server.url, (tmp_path / "operator.token").read_text().strip()
        elsewhere = await server.log_in(secret, {"Origin": "http://evil"})
        assert_refused(elsewhere, 403, "PERMISSION_DENIED", "ORIGIN_MISMATCH")
        assert "Set-Cookie" not in elsewhere.headers
        assert (await server.log_in(secret)).json["may_control"]
        port = url.rpartition(":")[2]
        evil = "http://evil.example", "null", f"https://127.0.0.1:{port}", "http://127.0.0.1:1", f"{url}.evil"
        for origin in evil:
            refused = await server.call("RegisterJob", registration(), {"Origin": origin})
            assert_refused(refused, 403, "PERMISSION_DENIED", "ORIGIN_MISMATCH")
            assert refused.json["metadata"]["expected"] == url
            read = await server.call("ListJobs", {}, {"Origin": origin})
            assert_refused(read, 403, "PERMISSION_DENIED", "ORIGIN_MISMATCH")
        missing = await server.call("RegisterJob", registration(), {})
        assert_refused(missing, 403, "PERMISSION_DENIED", "ORIGIN_MISMATCH")
        as_form = server.origin | {"Content-Type": "application/x-www-form-urlencoded"}
        form = await server.call("RegisterJob", b"{}", as_form)
        assert_refused(form, 400, "INVALID_ARGUMENT", "INVALID_FIELD")
        assert (await server.log_out({"Origin": "http://evil.example"})).status == 403
        assert (await server.call("ListJobs", {}, {})).json["jobs"] == []
        assert (await server.call("RegisterJob", registration())).status == 200

        # A program sends its token itself; no browser does that for another site.
        async with browsing(url, headers={"Authorization": f"Bearer {secret}"}) as program:
            assert (await program.call("RegisterJob", registration("b"), {})).status == 200
            refused = await program.call("RegisterJob", registration("c"), {"Origin": "http://evil"})
            assert_refused(refused, 403, "PERMISSION_DENIED", "ORIGIN_MISMATCH")
        async with browsing(url, headers={"Authorization": "Bearer perseus_wrong"}) as program:
            assert (await program.call("RegisterJob", registration("b"), {})).status == 401


async def test_a_rebound_name_is_refused(tmp_path: Path) -> None:
    async with site(tmp_path) as server:
        port = server.url.rpartition(":")[2]
        rebound = "evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}"
        for host in (*rebound, "", "[", "a@localhost.b"):
            for path in ("", "session", "api/watch/jobs", "metrics"):
                refused = await server.get(path, {"Host": host})
                assert_refused(refused, 403, "PERMISSION_DENIED", "HOST_UNKNOWN")
        hosts = ("localhost", f"LOCALHOST:{port}", "a.localhost.", "[::1]:80", "10.1.2.3")
        for host in hosts:
            assert (await server.get("session", {"Host": host})).status == 200, host

    async with site(tmp_path, http_hosts="Board, other") as server:
        for host, status in (("board", 200), ("other:80", 200), ("third", 403)):
            assert (await server.get("session", {"Host": host})).status == status, host
        port = server.url.rpartition(":")[2]
        # Our page under that name has that origin.
        for origin, status in ((f"http://board:{port}", 200), (server.url, 403)):
            board = {"Host": f"board:{port}", "Origin": origin}
            assert (await server.call("RegisterJob", registration(), board)).status == status


async def test_no_login_is_needed_under_insecure(tmp_path: Path) -> None:
    async with site(tmp_path) as server:
        everybody = {
            "name": "anybody",
            "scope": "operator",
            "requires_login": False,
            "may_control": True,
            "release": release(),
            **ALONE,
        }
        assert (await server.get("session")).json == everybody
        login = await server.log_in("x")
        assert login.json == everybody
        assert "Set-Cookie" not in login.headers


@pytest.mark.parametrize("path", ["jobs", "jobs/job"])
async def test_a_revoked_token_ends_session_and_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(event_stream, "CHECK_S", 0.05)
    async with guarded(tmp_path) as server:
        operator = {"Authorization": f"Bearer {await server.token(Scope.OPERATOR, 'op')}"}
        async with browsing(server.url, headers=operator) as program:
            await program.call("RegisterJob", registration())
        await server.log_in(await server.token(Scope.READER))
        async with server.watch(path) as stream:
            await stream.next()
            await server.coordinator.tokens.revoke("me")
            assert await stream.until_end() == "TOKEN_REVOKED"
        assert_refused(await server.call("ListJobs", {}), 401, "UNAUTHENTICATED", "TOKEN_REVOKED")
        assert (await server.get("session")).json == NOBODY


async def test_logging_out_ends_the_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "CHECK_S", 0.05)
    async with guarded(tmp_path) as server:
        await server.log_in(await server.token(Scope.READER))
        async with server.watch("jobs") as stream:
            await stream.next()
            await server.log_out()
            assert await stream.until_end() == "CREDENTIAL_MISSING"


async def test_streams_of_one_principal_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MAX_STREAMS_OF_ONE", 2)
    async with site(tmp_path) as server, server.watch("jobs") as first, server.watch("jobs") as second:
        await asyncio.gather(first.next(), second.next())
        refused = await server.get("api/watch/jobs")
        assert_refused(refused, 429, "RESOURCE_EXHAUSTED", "LIMIT_REACHED")


async def test_over_tls_the_cookie_is_for_tls_and_this_host_only(tmp_path: Path) -> None:
    security = Security(tmp_path / "security")
    http = f"127.0.0.1:{free_port()}"
    settings = make_secured_settings(tmp_path, security, http=http)
    connector = aiohttp.TCPConnector(ssl=client_context(security))
    async with running_here(settings), browsing(f"https://{http}", connector=connector) as browser:
        answer = await browser.log_in(security.token_file.read_text().strip())
        assert answer.json["may_control"], answer.text
        (cookie,) = SimpleCookie(answer.headers["Set-Cookie"]).values()
        assert cookie.key == "__Host-perseus"
        assert cookie["secure"]
        assert cookie["httponly"]
        assert not cookie["domain"]
        assert (await browser.call("ListJobs", {})).json["jobs"] == []
        assert (await browser.call("ListJobs", {}, {"Origin": f"http://{http}"})).status == 403


async def test_scrapes_need_a_reader_or_an_operator_where_others_reach_the_port(tokens: Tokens) -> None:
    async def nothing() -> Readings:
        return Readings()

    _, reader = await tokens.create("prometheus", Grant(Scope.READER), None)
    _, operator = await tokens.create("admin", Grant(Scope.OPERATOR), None)
    _, agent = await tokens.create("agents", Grant(Scope.AGENT, ("*",)), None)
    app = make_app(Scrape(nothing), HttpAuthenticator(tokens, {}))
    async with TestClient(TestServer(app)) as client:

        async def status(credential: str | None) -> int:
            headers = {} if credential is None else {"Authorization": credential}
            response = await client.get("/metrics", headers=headers)
            text = await response.text()
            assert response.status != 403 or "expected" in text
            assert agent not in text
            return response.status

        assert [await status(each) for each in (None, "Basic abc", "Bearer perseus_wrong")] == [401] * 3
        assert [await status(f"Bearer {each}") for each in (agent, reader, operator)] == [403, 200, 200]
        await tokens.revoke("prometheus")
        assert await status(f"Bearer {reader}") == 401


async def test_a_browser_may_be_logged_in_at_several_slots_on_one_host(tokens: Tokens) -> None:
    request = make_mocked_request("GET", "/", headers={"Cookie": "perseus=first; perseus-1=second"})
    assert HttpAuthenticator(tokens, {}).session_id(request) == "first"
    assert HttpAuthenticator(tokens, {}, slot=1).session_id(request) == "second"


# ---------------------------------------------------------------------- sessions alone


async def secret_of(tokens: Tokens, name: str, expire_time_s: float | None = None) -> str:
    return (await tokens.create(name, Grant(Scope.READER), expire_time_s))[1]


async def test_sessions_end_with_time_and_with_their_token(tokens: Tokens, wall_s: list[float]) -> None:
    now_s = [0.0]
    some = Sessions(tokens, lambda: now_s[0])
    secret = await secret_of(tokens, "me")
    session_id, principal = await some.begin(secret)
    assert some.find(session_id) == principal
    now_s[0] = sessions.LIFETIME_S
    with pytest.raises(CredentialMissingError):
        some.find(session_id)
    session_id, _ = await some.begin(secret)
    assert len(some) == 1, "ended sessions are dropped"
    with pytest.raises(CredentialMissingError):
        some.find(session_id + "x")
    await tokens.revoke("me")
    with pytest.raises(TokenRevokedError):
        some.find(session_id)

    session_id, _ = await some.begin(await secret_of(tokens, "brief", wall_s[0] + 60))
    wall_s[0] += 60
    with pytest.raises(TokenExpiredError):
        some.find(session_id)


async def test_sessions_are_bounded_and_replace_their_tokens_oldest(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS_PER_TOKEN", 3)
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 4)
    some = Sessions(tokens, lambda: 0.0)
    mine, others = await secret_of(tokens, "me"), await secret_of(tokens, "other")
    other_id, _ = await some.begin(others)
    ids = [(await some.begin(mine))[0] for _ in range(5)]
    assert len(some) == 4
    for ended in ids[:2]:
        with pytest.raises(CredentialMissingError):
            some.find(ended)
    found = [some.find(each).name for each in (*ids[2:], other_id)]
    assert found == ["token me", "token me", "token me", "token other"]


async def test_sessions_outlive_a_restart_and_those_that_were_ended_do_not(tmp_path: Path) -> None:
    async with guarded(tmp_path) as server:
        secret = await server.token(Scope.READER)
        some = Sessions(server.coordinator.tokens)
        kept, principal = await some.begin(secret)
        ended, _ = await some.begin(secret)
        await some.end(ended)
    async with guarded(tmp_path) as server:
        some = Sessions(server.coordinator.tokens)
        assert some.find(kept) == principal
        with pytest.raises(CredentialMissingError):
            some.find(ended)
        await server.coordinator.tokens.revoke("me")
        with pytest.raises(TokenRevokedError):
            some.find(kept)


def test_attempts_come_back_with_time_and_are_bounded_by_address() -> None:
    now_s = [0.0]
    attempts = LoginRateLimiter(lambda: now_s[0])
    for _ in range(sessions.MAX_ATTEMPTS):
        attempts.take("10.0.0.1")
    for _ in range(100):  # more attempts do not prolong the wait
        with pytest.raises(LimitReachedError):
            attempts.take("10.0.0.1")
    attempts.take("10.0.0.2")
    now_s[0] += sessions.ATTEMPT_S
    attempts.take("10.0.0.1")
    with pytest.raises(LimitReachedError):
        attempts.take("10.0.0.1")
    for number in range(5_000):
        attempts.take(f"other-{number}")
    assert len(attempts._left) <= 1_024
