"""The live page's requests: sessions, the services' calls, the ranks in columns, and event streams.

docs/protocol.md lists the requests.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from urllib.parse import quote

from aiohttp import hdrs, web

from perseus.release import release
from perseus.service.api.calls import Call
from perseus.service.api.rpc_scopes import READERS
from perseus.service.domain.errors import (
    AuthenticationError,
    InvalidFieldError,
    MalformedMessageError,
    UnknownCallError,
)
from perseus.service.domain.principals import ANYBODY, Principal, Scope
from perseus.service.shell.coordinator import Coordinator
from perseus.service.web.access import HttpAuthenticator
from perseus.service.web.event_sources import JobList, JobUpdates
from perseus.service.web.event_stream import EventSource, EventStreams
from perseus.service.web.json_text import as_json, from_json, large_to_json
from perseus.service.web.origin import check_origin
from perseus.service.web.other_slots import overview
from perseus.service.web.rank_grid import RankGrid
from perseus.service.web.sessions import LoginRateLimiter
from perseus.service.web.single_flight_cache import SingleFlightCache

_JSON = "application/json"
_PACKAGE = "perseus.v1"

_CACHED_CALLS = frozenset(
    f"/{_PACKAGE}.{name}"
    for name in ("JobService/GetTimeline", "FrontierService/GetFrontier", "LedgerService/ListLedgerEntries")
)
"""Calls with slow answers that are requested again and again: one answer serves all readers for a while."""

_MAX_ANSWERS = 64
BODY_S = 30.0
"""How long a request's body may take."""


_EVENT_ID = re.compile(r"(\d{1,9}):(\d{1,18})")
_NUMBER = re.compile(r"\d{1,18}")


class PageApi:
    """The handlers of the page's requests.

    Args:
        coordinator: serves the requests.
        calls: the services' calls that may be made.
        access: authenticates requests; None without authentication.
    """

    def __init__(
        self, coordinator: Coordinator, calls: Iterable[Call], access: HttpAuthenticator | None
    ) -> None:
        self._calls: Mapping[str, Call] = {call.rpc: call for call in calls}
        self._access = access
        self._login_rate_limiter = LoginRateLimiter()
        self._coordinator = coordinator
        self._streams = EventStreams()
        self._grid = RankGrid(coordinator.jobs)
        self._answers: SingleFlightCache[str] = SingleFlightCache(_MAX_ANSWERS)

    def add_to(self, app: web.Application) -> None:
        """Add the routes."""
        app.router.add_get("/session", self._show_session, allow_head=False)
        app.router.add_post("/session", self._begin_session)
        app.router.add_delete("/session", self._end_session)
        app.router.add_post("/api/{service}/{method}", self._call)
        app.router.add_get("/jobs/{job_id}", self._lead_to_job)
        app.router.add_get("/api/fleet", self._show_fleet, allow_head=False)
        app.router.add_get("/api/watch/jobs", self._watch_jobs, allow_head=False)
        app.router.add_get("/api/watch/jobs/{job_id}", self._watch_job, allow_head=False)
        app.router.add_get("/api/ranks/{job_id}", self._ranks, allow_head=False)
        app.on_shutdown.append(self._end_streams)

    # ------------------------------------------------------------------ sessions

    async def _show_session(self, request: web.Request) -> web.Response:
        try:
            principal = self._asking(request)
        except AuthenticationError:
            return self._session(None)
        return self._session(principal)

    async def _begin_session(self, request: web.Request) -> web.Response:
        check_origin(request, is_needed=True)
        secret = _token_in(await _body(request))
        if self._access is None:
            return self._session(ANYBODY)
        self._login_rate_limiter.take(request.remote or "")
        session_id, principal = await self._access.sessions.begin(secret)
        response = self._session(principal)
        self._access.set_cookie(request, response, session_id)
        return response

    async def _end_session(self, request: web.Request) -> web.Response:
        check_origin(request, is_needed=True)
        response = web.Response(status=204)
        if self._access is not None and (session_id := self._access.session_id(request)) is not None:
            await self._access.sessions.end(session_id)
            self._access.drop_cookie(request, response)
        return response

    def _asking(self, request: web.Request) -> Principal:
        return ANYBODY if self._access is None else self._access.identify(request)

    def _check_reader(self, request: web.Request) -> Principal:
        return ANYBODY if self._access is None else self._access.check(request, READERS)

    def _session(self, principal: Principal | None) -> web.Response:
        scope = principal.grant.scope if principal is not None else None
        fleet = self._coordinator.fleet
        return _json_answer(
            as_json(
                {
                    "name": principal.name if principal is not None else "",
                    "scope": scope.value if scope is not None else "",
                    "requires_login": self._access is not None,
                    "may_control": scope is Scope.OPERATOR,
                    "release": release() if principal is not None else "",
                    "slot": fleet.served if principal is not None else 0,
                    "slot_count": len(fleet.slots) if principal is not None else 1,
                }
            )
        )

    # ------------------------------------------------------------------ calls

    async def _call(self, request: web.Request) -> web.Response:
        principal = self._asking(request)
        rpc = f"/{_PACKAGE}.{request.match_info['service']}/{request.match_info['method']}"
        call = self._calls.get(rpc)
        if call is None:
            raise UnknownCallError(rpc=rpc)
        call.check_scope(principal)
        check_origin(request, is_needed=not call.is_reading)
        asked = from_json(await _body(request), call.request_type)

        async def make() -> str:
            return await large_to_json(await call.answer(principal, asked))

        if call.rpc in _CACHED_CALLS:  # every reader may see the same answer
            key = call.rpc, asked.SerializeToString(deterministic=True)
            return _json_answer(await self._answers.get(key, make))
        return _json_answer(await make())

    async def _show_fleet(self, request: web.Request) -> web.Response:
        self._check_reader(request)
        fleet, jobs = self._coordinator.fleet, self._coordinator.jobs
        key = tuple(fleet.members), tuple(fleet.slots)  # an answer outlives no takeover
        return _json_answer(await self._answers.get(key, lambda: overview(fleet, jobs)))

    async def _lead_to_job(self, request: web.Request) -> web.Response:
        """Lead to a job on the page that shows it. Who is not logged in logs in here, and is led on then."""
        job_id, page_url = request.match_info["job_id"], ""
        with suppress(AuthenticationError):
            self._check_reader(request)
            page_url = self._coordinator.fleet.page_url(job_id)
        place = f"{page_url or '..'}/#/jobs/{quote(job_id, safe='')}"
        return web.Response(status=302, headers={hdrs.LOCATION: place})

    async def _ranks(self, request: web.Request) -> web.Response:
        self._check_reader(request)
        body, packed = await self._grid.answer(request.match_info["job_id"])
        headers = {hdrs.CONTENT_TYPE: _JSON, hdrs.CACHE_CONTROL: "no-store", hdrs.VARY: "Accept-Encoding"}
        if "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, ""):
            return web.Response(body=packed, headers={**headers, hdrs.CONTENT_ENCODING: "gzip"})
        return web.Response(body=body, headers=headers)

    # ------------------------------------------------------------------ event streams

    async def _watch_jobs(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, lambda: JobList(self._coordinator.live))

    async def _watch_job(self, request: web.Request) -> web.StreamResponse:
        job_id = request.match_info["job_id"]
        return await self._stream(request, lambda: JobUpdates(self._coordinator.jobs, job_id))

    async def _stream(
        self, request: web.Request, open_source: Callable[[], EventSource]
    ) -> web.StreamResponse:
        principal = self._check_reader(request)
        asked = principal.name, request.path, open_source, _after(request)
        async with self._streams.reading(*asked) as (reader, opening):
            return await reader.serve(request, lambda: self._check_reader(request), opening)

    async def _end_streams(self, _: web.Application) -> None:
        self._streams.end("DRAINING")


def _json_answer(text: str) -> web.Response:
    headers = {hdrs.CONTENT_TYPE: _JSON, hdrs.CACHE_CONTROL: "no-store"}
    return web.Response(body=text.encode(), headers=headers)


async def _body(request: web.Request) -> bytes:
    """Return the body. Its type must be JSON: no form of another site can claim that.

    Raises:
        InvalidFieldError: it has another type.
    """
    if request.content_type != _JSON:
        raise InvalidFieldError(field="Content-Type", expected=_JSON, found=repr(request.content_type))
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None


def _token_in(body: bytes) -> str:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError(cause=error) from None
    token = found.get("token") if isinstance(found, dict) else None
    if not isinstance(token, str):
        raise InvalidFieldError(field="token", expected="a text", found=type(token).__name__)
    return token


def _after(request: web.Request) -> tuple[int, int] | None:
    """Return the run and the event after which a reader wants to begin; None if it does not ask."""
    if (again := _EVENT_ID.fullmatch(request.headers.get("Last-Event-ID", ""))) is not None:
        return int(again[1]), int(again[2])
    asked = {}
    for name in ("run_number", "after_sequence"):
        text = request.query.get(name)
        if text is not None and not (_NUMBER.fullmatch(text) and text.isascii()):
            raise InvalidFieldError(field=name, expected="0 or more", found=repr(text[:64]))
        asked[name] = text
    if asked["after_sequence"] is None:
        return None
    return int(asked["run_number"] or 0), int(asked["after_sequence"])
