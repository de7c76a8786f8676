"""A coordinator with a page, and a client that behaves like a browser."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp

from perseus.service import server
from perseus.service.domain.principals import Grant, Scope
from perseus.service.shell.coordinator import Coordinator
from tests.ports import free_port
from tests.service.grpc_fakes import ALL_PLACES, Client, FakeAgent, connected, make_settings


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
class Site(Browser):
    """A whole coordinator: in this process, by gRPC and in a browser."""

    client: Client
    coordinator: Coordinator

    @property
    def metrics(self) -> str:
        return f"{self.url}/metrics"

    async def token(self, scope: Scope, name: str = "me") -> str:
        patterns = ("*",) if scope is Scope.AGENT else ()
        _, secret = await self.coordinator.tokens.create(name, Grant(scope, patterns), None)
        return secret

    async def train(self, state: int, count: int = 0) -> FakeAgent:
        """Train the job until it has a state, and for some iterations more."""
        agent = FakeAgent(self.client, "agent", ALL_PLACES)
        await agent.join()
        await agent.iterate_until(self.client, state)
        await agent.iterate(count)
        return agent


@asynccontextmanager
async def site(folder: Path, kind: type[Coordinator] = Coordinator, **settings: Any) -> AsyncIterator[Site]:
    """Run a coordinator of some kind with a page, by default without authentication."""
    http = f"127.0.0.1:{free_port()}"
    made: list[Coordinator] = []

    def make(*parts: Any, **options: Any) -> Coordinator:
        made.append(kind(*parts, **options))
        return made[0]

    with patch.object(server, "Coordinator", make):
        async with (
            connected(make_settings(folder, http=http, **settings)) as client,
            browsing(f"http://{http}") as browser,
        ):
            yield Site(browser.url, browser.session, client, made[0])


@asynccontextmanager
async def guarded(folder: Path) -> AsyncIterator[Site]:
    """Run a coordinator whose page asks for a login."""
    async with site(folder, insecure=False, operator_token_file=folder / "operator.token") as made:
        yield made


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
