"""Access to the page's server: logins, their ends, and requests that another site's page makes."""

import asyncio
import time
from http.cookies import SimpleCookie
from pathlib import Path

import aiohttp
import pytest

from perseus.demo.security import Security
from perseus.release import release
from perseus.service.domain.errors import (
    CredentialMissingError,
    LimitReachedError,
    TokenExpiredError,
    TokenRevokedError,
)
from perseus.service.domain.principals import Grant, Scope
from perseus.service.web import event_stream, sessions
from perseus.service.web.sessions import LoginRateLimiter, Sessions
from tests.ports import free_port
from tests.service.grpc_fakes import make_secured_settings, make_settings, running_here
from tests.service.web.page_server import PageServer, ask, serving, streaming
from tests.service.web.test_metrics import client_context
from tests.service.web.test_page_api import assert_refused, registration

ALONE = {"slot": 0, "slot_count": 1}
NOBODY = {"name": "", "scope": "", "requires_login": True, "may_control": False, "release": "", **ALONE}


def browser() -> aiohttp.ClientSession:
    # Browsers keep cookies for IP addresses, too.
    return aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))


async def token(
    server: PageServer, scope: Scope, name: str = "me", expire_time_s: float | None = None
) -> str:
    patterns = ("*",) if scope is Scope.AGENT else ()
    _, secret = await server.coordinator.tokens.create(name, Grant(scope, patterns), expire_time_s)
    return secret


async def test_a_login_and_its_end(tmp_path: Path) -> None:
    async with serving(tmp_path, is_open=False) as server, browser() as session:
        url, secret = server.url, await token(server, Scope.READER)
        get_jobs = f"{url}/api/JobService/ListJobs"
        assert (await ask(session, "GET", f"{url}/session")).json == NOBODY
        unknown = await ask(session, "POST", get_jobs, {})
        assert_refused(unknown, 401, "UNAUTHENTICATED", "CREDENTIAL_MISSING")
        assert unknown.headers["WWW-Authenticate"] == "Bearer"
        for path in ("api/watch/jobs", "api/watch/jobs/job", "api/ranks/job"):
            refused = await ask(session, "GET", f"{url}/{path}")
            assert_refused(refused, 401, "UNAUTHENTICATED", "CREDENTIAL_MISSING")
        assert (await ask(session, "GET", url)).status == 200

        answer = await ask(session, "POST", f"{url}/session", {"token": secret}, server.origin)
        assert answer.status == 200
        me = {
            "name": "token me",
            "scope": "reader",
            "requires_login": True,
            "may_control": False,
            "release": release(),
            **ALONE,
        }
        assert answer.json == me
        (cookie,) = SimpleCookie(answer.headers["Set-Cookie"]).values()
        assert cookie["httponly"]
        assert (cookie["samesite"], cookie["path"], cookie["secure"]) == ("Strict", "/", "")
        assert 0 < int(cookie["max-age"]) <= 12 * 3600
        assert secret not in answer.headers["Set-Cookie"]
        assert len(cookie.value) >= 43
        assert (await ask(session, "GET", f"{url}/session")).json == me
        assert (await ask(session, "POST", get_jobs, {})).status == 200

        # A reader may not control, whatever the page shows.
        finish = await ask(session, "POST", f"{url}/api/JobService/FinishJob", {"job_id": "a"}, server.origin)
        assert_refused(finish, 403, "PERMISSION_DENIED", "SCOPE_TOO_NARROW")

        gone = await ask(session, "DELETE", f"{url}/session", headers=server.origin)
        assert (gone.status, gone.text) == (204, "")
        assert (await ask(session, "GET", f"{url}/session")).json == NOBODY
        stolen = {"Cookie": f"perseus={cookie.value}"}
        async with aiohttp.ClientSession() as other:
            assert (await ask(other, "POST", get_jobs, {}, stolen)).status == 401


async def test_failed_logins(tmp_path: Path) -> None:
    async with serving(tmp_path, is_open=False) as server, browser() as session:
        path, origin = f"{server.url}/session", server.origin
        wrong = await ask(session, "POST", path, {"token": "perseus_wrong"}, origin)
        assert_refused(wrong, 401, "UNAUTHENTICATED", "TOKEN_UNKNOWN")
        agent = await ask(session, "POST", path, {"token": await token(server, Scope.AGENT)}, origin)
        assert_refused(agent, 403, "PERMISSION_DENIED", "SCOPE_TOO_NARROW")
        bodies: tuple[object, ...] = ({}, {"token": 5}, [], "x")
        for body in bodies:
            assert_refused(
                await ask(session, "POST", path, body, origin), 400, "INVALID_ARGUMENT", "INVALID_FIELD"
            )
        deep = await ask(session, "POST", path, b"[" * 60_000, origin)
        assert_refused(deep, 400, "INVALID_ARGUMENT", "MALFORMED_MESSAGE")
        for _ in range(sessions.MAX_ATTEMPTS):
            late = await ask(session, "POST", path, {"token": "perseus_wrong"}, origin)
        assert_refused(late, 429, "RESOURCE_EXHAUSTED", "LIMIT_REACHED")
        assert int(late.headers["Retry-After"]) >= 5
        assert "Set-Cookie" not in late.headers


async def test_an_operator_controls_from_our_own_page_only(tmp_path: Path) -> None:
    async with serving(tmp_path, is_open=False) as server, browser() as session:
        url, secret = server.url, await token(server, Scope.OPERATOR)
        elsewhere = await ask(session, "POST", f"{url}/session", {"token": secret}, {"Origin": "http://evil"})
        assert_refused(elsewhere, 403, "PERMISSION_DENIED", "ORIGIN_MISMATCH")
        assert "Set-Cookie" not in elsewhere.headers
        login = await ask(session, "POST", f"{url}/session", {"token": secret}, server.origin)
        assert login.json["may_control"]
        register = f"{url}/api/JobService/RegisterJob"
        port = url.rpartition(":")[2]
        for origin in (
            "http://evil.example",
            "null",
            f"https://127.0.0.1:{port}",
            "http://127.0.0.1:1",
            f"{url}.evil",
        ):
            refused = await ask(session, "POST", register, registration(), {"Origin": origin})
            assert_refused(refused, 403, "PERMISSION_DENIED", "ORIGIN_MISMATCH")
            assert refused.json["metadata"]["expected"] == url
            read = await ask(session, "POST", f"{url}/api/JobService/ListJobs", {}, {"Origin": origin})
            assert_refused(read, 403, "PERMISSION_DENIED", "ORIGIN_MISMATCH")
        missing = await ask(session, "POST", register, registration())
        assert_refused(missing, 403, "PERMISSION_DENIED", "ORIGIN_MISMATCH")
        form = await ask(
            session,
            "POST",
            register,
            b"{}",
            {**server.origin, "Content-Type": "application/x-www-form-urlencoded"},
        )
        assert_refused(form, 400, "INVALID_ARGUMENT", "INVALID_FIELD")
        out = await ask(session, "DELETE", f"{url}/session", headers={"Origin": "http://evil.example"})
        assert out.status == 403
        assert (await ask(session, "POST", f"{url}/api/JobService/ListJobs", {})).json["jobs"] == []
        assert (await ask(session, "POST", register, registration(), server.origin)).status == 200

        # A program sends its token itself; no browser does that for another site.
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as program:
            assert (await ask(program, "POST", register, registration("b"))).status == 200
            refused = await ask(program, "POST", register, registration("c"), {"Origin": "http://evil"})
            assert_refused(refused, 403, "PERMISSION_DENIED", "ORIGIN_MISMATCH")
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer perseus_wrong"}) as program:
            assert (await ask(program, "POST", register, registration("b"))).status == 401


async def test_a_rebound_name_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, aiohttp.ClientSession() as session:
        port = server.url.rpartition(":")[2]
        for host in (
            "evil.example",
            f"evil.example:{port}",
            f"127.0.0.1.evil.example:{port}",
            "",
            "[",
            "a@localhost.b",
        ):
            for path in ("/", "/session", "/api/watch/jobs", "/metrics"):
                refused = await ask(session, "GET", f"{server.url}{path}", headers={"Host": host})
                assert_refused(refused, 403, "PERMISSION_DENIED", "HOST_UNKNOWN")
        hosts = ("localhost", f"LOCALHOST:{port}", "a.localhost.", "[::1]:80", "10.1.2.3", f"board:{port}")
        for host in hosts:
            found = await ask(session, "GET", f"{server.url}/session", headers={"Host": host})
            assert found.status == 200, host
        # Our page under that name has that origin.
        board = {"Host": f"board:{port}", "Origin": f"http://board:{port}"}
        register = f"{server.url}/api/JobService/RegisterJob"
        assert (await ask(session, "POST", register, registration(), board)).status == 200
        mixed = {"Host": f"board:{port}", "Origin": server.url}
        assert (await ask(session, "POST", register, registration(), mixed)).status == 403


async def test_no_login_is_needed_under_insecure(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, aiohttp.ClientSession() as session:
        everybody = {
            "name": "anybody",
            "scope": "operator",
            "requires_login": False,
            "may_control": True,
            "release": release(),
            **ALONE,
        }
        assert (await ask(session, "GET", f"{server.url}/session")).json == everybody
        login = await ask(session, "POST", f"{server.url}/session", {"token": "x"}, server.origin)
        assert login.json == everybody
        assert "Set-Cookie" not in login.headers


@pytest.mark.parametrize("path", ["api/watch/jobs", "api/watch/jobs/job"])
async def test_a_revoked_token_ends_session_and_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(event_stream, "CHECK_S", 0.05)
    async with serving(tmp_path, is_open=False) as server, browser() as session:
        url = server.url
        operator = {"Authorization": f"Bearer {await token(server, Scope.OPERATOR, 'op')}"}
        async with aiohttp.ClientSession(headers=operator) as program:
            await ask(program, "POST", f"{url}/api/JobService/RegisterJob", registration())
        secret = await token(server, Scope.READER)
        await ask(session, "POST", f"{url}/session", {"token": secret}, server.origin)
        async with streaming(session, f"{url}/{path}") as stream:
            await stream.next()
            await server.coordinator.tokens.revoke("me")
            assert await stream.until_end() == "TOKEN_REVOKED"
        refused = await ask(session, "POST", f"{url}/api/JobService/ListJobs", {})
        assert_refused(refused, 401, "UNAUTHENTICATED", "TOKEN_REVOKED")
        assert (await ask(session, "GET", f"{url}/session")).json == NOBODY


async def test_logging_out_ends_the_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "CHECK_S", 0.05)
    async with serving(tmp_path, is_open=False) as server, browser() as session:
        secret = await token(server, Scope.READER)
        await ask(session, "POST", f"{server.url}/session", {"token": secret}, server.origin)
        async with streaming(session, f"{server.url}/api/watch/jobs") as stream:
            await stream.next()
            await ask(session, "DELETE", f"{server.url}/session", headers=server.origin)
            assert await stream.until_end() == "CREDENTIAL_MISSING"


async def test_streams_of_one_principal_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MAX_STREAMS_OF_ONE", 2)
    async with serving(tmp_path) as server, aiohttp.ClientSession() as session:
        url = f"{server.url}/api/watch/jobs"
        async with streaming(session, url) as first, streaming(session, url) as second:
            await asyncio.gather(first.next(), second.next())
            refused = await ask(session, "GET", url)
            assert_refused(refused, 429, "RESOURCE_EXHAUSTED", "LIMIT_REACHED")


async def test_over_tls_the_cookie_is_for_tls_and_this_host_only(tmp_path: Path) -> None:
    security = Security(tmp_path / "security")
    http = f"127.0.0.1:{free_port()}"
    settings = make_secured_settings(tmp_path, security, http=http)
    connector = aiohttp.TCPConnector(ssl=client_context(security))
    jar = aiohttp.CookieJar(unsafe=True)
    async with running_here(settings), aiohttp.ClientSession(connector=connector, cookie_jar=jar) as session:
        url = f"https://{http}"
        secret = security.token_file.read_text().strip()
        answer = await ask(session, "POST", f"{url}/session", {"token": secret}, {"Origin": url})
        assert answer.json["may_control"], answer.text
        (cookie,) = SimpleCookie(answer.headers["Set-Cookie"]).values()
        assert cookie.key == "__Host-perseus"
        assert cookie["secure"]
        assert cookie["httponly"]
        assert not cookie["domain"]
        jobs = await ask(session, "POST", f"{url}/api/JobService/ListJobs", {}, {"Origin": url})
        assert jobs.json["jobs"] == []
        downgraded = await ask(
            session, "POST", f"{url}/api/JobService/ListJobs", {}, {"Origin": f"http://{http}"}
        )
        assert downgraded.status == 403


async def test_a_coordinator_on_loopback_requires_a_login_but_lets_anybody_scrape(tmp_path: Path) -> None:
    http, file = f"127.0.0.1:{free_port()}", tmp_path / "operator.token"
    settings = make_settings(
        tmp_path, http=http, http_hosts="Board, other", insecure=False, operator_token_file=file
    )
    async with running_here(settings), browser() as session:
        url = f"http://{http}"
        jobs = f"{url}/api/JobService/ListJobs"
        assert (await ask(session, "GET", f"{url}/metrics")).status == 200
        assert_refused(await ask(session, "POST", jobs, {}), 401, "UNAUTHENTICATED", "CREDENTIAL_MISSING")
        login = {"token": file.read_text().strip()}
        assert (await ask(session, "POST", f"{url}/session", login, {"Origin": url})).json["may_control"]
        assert (await ask(session, "POST", jobs, {})).json["jobs"] == []
        for host, status in (("board", 200), ("other:80", 200), ("third", 403)):
            answer = await ask(session, "GET", f"{url}/session", headers={"Host": host})
            assert answer.status == status, host


# ---------------------------------------------------------------------- sessions alone


async def test_sessions_end_with_time_and_with_their_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, is_open=False) as server:
        now_s = [0.0]
        some = Sessions(server.coordinator.tokens, lambda: now_s[0])
        secret = await token(server, Scope.READER)
        session_id, principal = await some.begin(secret)
        assert some.find(session_id) == principal
        now_s[0] = sessions.LIFETIME_S
        with pytest.raises(CredentialMissingError):
            some.find(session_id)
        session_id, _ = await some.begin(secret)
        assert len(some) == 1, "ended sessions are dropped"
        with pytest.raises(CredentialMissingError):
            some.find(session_id + "x")
        await server.coordinator.tokens.revoke("me")
        with pytest.raises(TokenRevokedError):
            some.find(session_id)

        wall_s = [time.time()]
        monkeypatch.setattr(server.coordinator.tokens, "_clock", lambda: wall_s[0])
        brief = await token(server, Scope.READER, "brief", wall_s[0] + 60)
        session_id, _ = await some.begin(brief)
        wall_s[0] += 60
        with pytest.raises(TokenExpiredError):
            some.find(session_id)


async def test_sessions_are_bounded_and_replace_their_tokens_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS_PER_TOKEN", 3)
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 4)
    async with serving(tmp_path, is_open=False) as server:
        some = Sessions(server.coordinator.tokens, lambda: 0.0)
        mine, others = await token(server, Scope.READER), await token(server, Scope.OPERATOR, "other")
        other_id, _ = await some.begin(others)
        ids = [(await some.begin(mine))[0] for _ in range(5)]
        assert len(some) == 4
        for ended in ids[:2]:
            with pytest.raises(CredentialMissingError):
                some.find(ended)
        assert {some.find(each).name for each in ids[2:]} == {"token me"}
        assert some.find(other_id).name == "token other"


async def test_sessions_outlive_a_restart_and_those_that_were_ended_do_not(tmp_path: Path) -> None:
    async with serving(tmp_path, is_open=False) as server:
        secret = await token(server, Scope.READER)
        some = Sessions(server.coordinator.tokens)
        kept, principal = await some.begin(secret)
        ended, _ = await some.begin(secret)
        await some.end(ended)
    async with serving(tmp_path, is_open=False) as server:
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
