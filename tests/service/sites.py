"""Coordinators that ask everybody who they are, and clients with tokens of theirs."""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from perseus.service.domain.members import Fleet
from perseus.service.domain.principals import Grant
from perseus.service.shell import coordinator as shell
from perseus.service.shell.tokens import Tokens
from perseus.service.shell.writer import Writer
from perseus.service.storage.sql_store import SqlStore
from perseus.tls.tokens import TokenSource
from tests.service.grpc_fakes import Client, connected_to, make_settings, running_here


class Clock:
    """The wall clock, which a test puts forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@dataclass(frozen=True)
class Site:
    """A coordinator that runs, its tokens, and the operator's file."""

    address: str
    tokens: Tokens
    operator_file: Path
    clock: Clock = field(default_factory=Clock)

    @asynccontextmanager
    async def as_(self, secret: str | None) -> AsyncIterator[Client]:
        """Call as the owner of a token; None: without one."""
        token = TokenSource(token=secret) if secret is not None else None
        async with connected_to(self.address, token=token) as client:
            yield client

    @property
    def operator(self) -> str:
        return self.operator_file.read_text().strip()

    async def new(self, name: str, grant: str, lasting_s: float | None = None) -> str:
        ends_s = None if lasting_s is None else time.time() + lasting_s
        return (await self.tokens.create(name, Grant.parse(grant), ends_s))[1]


@contextmanager
def tokens_of_coordinators(
    monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float] = time.time
) -> Iterator[list[Tokens]]:
    made: list[Tokens] = []

    class Seen(Tokens):
        def __init__(self, store: SqlStore, writer: Writer, fleet: Fleet) -> None:
            super().__init__(store, writer, fleet, clock)
            made.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(shell, "Tokens", Seen)
        yield made


@asynccontextmanager
async def open_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[Site]:
    """Run a coordinator that asks everybody."""
    made = make_settings(
        tmp_path, insecure=False, operator_token_file=tmp_path / "own" / "operator.token", **settings
    )
    clock = Clock()
    with tokens_of_coordinators(monkeypatch, clock) as tokens:
        async with running_here(made) as (address, _):
            yield Site(address, tokens[0], made.operator_token_file, clock)


@pytest.fixture
async def site(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Site]:
    """A coordinator that asks everybody; its settings may be the fixture's parameter."""
    async with open_site(tmp_path, monkeypatch, **getattr(request, "param", {})) as opened:
        yield opened
