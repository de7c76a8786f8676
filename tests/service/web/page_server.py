"""The page's server over a real socket, without gRPC beside it; and a client that behaves like a browser."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from perseus.metrics.readings import Readings
from perseus.service.api.calls import unary_calls
from perseus.service.api.frontier_service import FrontierService
from perseus.service.api.job_service import JobService
from perseus.service.api.ledger_service import LedgerService
from perseus.service.api.power_service import PowerService
from perseus.service.domain.principals import Grant, Scope
from perseus.service.domain.retention import Retention
from perseus.service.job.rules import Rules
from perseus.service.shell.coordinator import Coordinator
from perseus.service.solving.worker_pool import JOBS, REQUESTS, WorkerPool
from perseus.service.storage.sql_store import SqlStore
from perseus.service.web.access import HttpAuthenticator
from perseus.service.web.app import make_app
from perseus.service.web.listening import bind, listening
from perseus.service.web.origin import Hosts
from perseus.service.web.page_api import PageApi
from perseus.service.web.page_files import PageFile
from perseus.service.web.scrape import Scrape
from perseus.v1 import frontier_service_pb2, job_service_pb2, ledger_service_pb2, power_service_pb2
from tests.ports import free_port
from tests.service.grpc_fakes import ALL_PLACES, Client, FakeAgent, ThreadWorker, connected, make_settings

FILES = {
    "index.html": PageFile.of("index.html", b"<!doctype html>" + b"<p>jobs</p>" * 100),
    "view/main.js": PageFile.of("view/main.js", b"// " + b"x" * 500),
    "tiny.css": PageFile.of("tiny.css", b"p{}"),
}


async def nothing() -> Readings:
    return Readings()


_OPERATED = ("SetBudget", "CancelBudget", "ListBudgets")


@dataclass
class Browser:
    """A browser at a URL: it keeps cookies, and posts as our page does unless the headers say otherwise."""

    url: str
    session: aiohttp.ClientSession

    @property
    def origin(self) -> dict[str, str]:
        return {"Origin": self.url}

    async def get(self, path: str = "", headers: Mapping[str, str] | None = None) -> "Answer":
        return await ask(self.session, "GET", f"{self.url}/{path}", headers=headers)

    async def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> "Answer":
        sent = self.origin if headers is None else headers
        return await ask(self.session, "POST", f"{self.url}/{path}", body, sent)

    async def call(self, method: str, body: object, headers: Mapping[str, str] | None = None) -> "Answer":
        """Make a call about jobs."""
        return await self.post(f"api/JobService/{method}", body, headers)

    async def log_in(self, secret: str, headers: Mapping[str, str] | None = None) -> "Answer":
        return await self.post("session", {"token": secret}, headers)

    async def log_out(self, headers: Mapping[str, str] | None = None) -> "Answer":
        sent = self.origin if headers is None else headers
        return await ask(self.session, "DELETE", f"{self.url}/session", headers=sent)

    def watch(
        self, path: str, headers: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager["Stream"]:
        return streaming(self.session, f"{self.url}/api/watch/{path}", headers)


@asynccontextmanager
async def browsing(url: str, **options: Any) -> AsyncIterator[Browser]:
    # Browsers keep cookies for IP addresses, too.
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True), **options) as session:
        yield Browser(url, session)


@dataclass
class PageServer(Browser):
    """A coordinator whose page is served at a URL, and a browser there."""

    coordinator: Coordinator

    async def token(self, scope: Scope, name: str = "me", expire_time_s: float | None = None) -> str:
        patterns = ("*",) if scope is Scope.AGENT else ()
        _, secret = await self.coordinator.tokens.create(name, Grant(scope, patterns), expire_time_s)
        return secret


@asynccontextmanager
async def serving(
    folder: Path,
    *,
    is_open: bool = True,
    is_at_rest: bool = False,
    files: Mapping[str, PageFile] = FILES,
) -> AsyncIterator[PageServer]:
    """Serve the page; `is_open`: without authentication; `is_at_rest`: leases do not expire."""
    store = await SqlStore.open(folder / "jobs.db")
    job_solver, request_solver = (
        WorkerPool(JOBS, 1, 60.0, new_worker=ThreadWorker),
        WorkerPool(REQUESTS, 1, 60.0, new_worker=ThreadWorker),
    )
    try:
        coordinator = Coordinator(
            store, job_solver, request_solver, Rules(lease_s=30.0, baseline_iterations=3), Retention()
        )
        await coordinator.start()
        background = asyncio.ensure_future(coordinator.writer.run() if is_at_rest else coordinator.run())
        jobs, quotas = coordinator.jobs, coordinator.quotas
        protos = (
            job_service_pb2.DESCRIPTOR,
            frontier_service_pb2.DESCRIPTOR,
            ledger_service_pb2.DESCRIPTOR,
            power_service_pb2.DESCRIPTOR,
        )
        services = {name: each for file in protos for name, each in file.services_by_name.items()}
        calls = [
            *unary_calls(services["JobService"], JobService(jobs, quotas)),
            *unary_calls(services["FrontierService"], FrontierService(jobs, quotas), but_for=("Solve",)),
            *unary_calls(services["LedgerService"], LedgerService(coordinator.ledger, coordinator.quotas)),
            *unary_calls(services["PowerService"], PowerService(coordinator.power, quotas), _OPERATED),
        ]
        access = None if is_open else HttpAuthenticator(coordinator.tokens, {})
        app = make_app(Scrape(nothing), access, PageApi(coordinator, calls, access), files, Hosts({"board"}))
        try:
            async with listening(app, bind("127.0.0.1:0"), None, 1.0) as url, browsing(url) as browser:
                yield PageServer(url, browser.session, coordinator)
        finally:
            await coordinator.close()
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)
    finally:
        job_solver.close()
        request_solver.close()
        await store.close()


@dataclass
class Site(Browser):
    """A whole coordinator, by gRPC and in a browser."""

    client: Client

    @property
    def metrics(self) -> str:
        return f"{self.url}/metrics"

    async def train(self, state: int, count: int = 0) -> FakeAgent:
        """Train the job until it has a state, and for some iterations more."""
        agent = FakeAgent(self.client, "agent", ALL_PLACES)
        await agent.join()
        await agent.iterate_until(self.client, state)
        await agent.iterate(count)
        return agent


@asynccontextmanager
async def site(folder: Path, **settings: Any) -> AsyncIterator[Site]:
    http = f"127.0.0.1:{free_port()}"
    async with (
        connected(make_settings(folder, http=http, **settings)) as client,
        browsing(f"http://{http}") as browser,
    ):
        yield Site(browser.url, browser.session, client)


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


async def ask(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Make a request; a body is sent as JSON, or unchanged if it is bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **(headers or {})} if body is not None else headers
    async with session.request(
        method, url, data=data if body is not None else None, headers=sent
    ) as response:
        return Answer(response.status, response.headers, await response.text())


@dataclass
class Stream:
    """Server-sent events, one by one."""

    response: aiohttp.ClientResponse
    ids: list[str] = field(default_factory=list)

    async def next(self) -> tuple[str, Any]:
        """Return an event's name and data; comments are left out."""
        name, data = "", ""
        async with asyncio.timeout(20):
            async for raw in self.response.content:
                line = raw.decode().rstrip("\n")
                if line.startswith("id: "):
                    self.ids.append(line[4:])
                elif line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    data = line[6:]
                elif not line and name:
                    return name, json.loads(data)
        raise EOFError

    async def until_end(self) -> str:
        """Return the reason of the end."""
        while True:
            name, data = await self.next()
            if name == "end":
                return str(data["reason"])


@asynccontextmanager
async def streaming(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str] | None = None
) -> AsyncIterator[Stream]:
    # A whole list of jobs is one line.
    async with session.get(url, headers=headers, read_bufsize=2**24) as response:
        assert response.status == 200, await response.text()
        yield Stream(response)
