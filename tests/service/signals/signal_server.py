"""A server on loopback that returns a provider's answers in their documented form."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Answer = Callable[[web.Request], web.StreamResponse]


@dataclass
class SignalServer:
    """Answers by path, and records requests."""

    answers: Mapping[str, Any]
    url: str = ""
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, dict(request.query)))
        self.headers.append(request.headers)
        found = self.answers.get(request.path)
        if found is None:
            raise web.HTTPNotFound
        if callable(found):
            response: web.StreamResponse = found(request)
            return response
        return web.json_response(found)


@asynccontextmanager
async def serving(answers: Mapping[str, Any]) -> AsyncIterator[SignalServer]:
    server = SignalServer(answers)
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    async with TestServer(app) as running:
        server.url = str(running.make_url(""))
        yield server
