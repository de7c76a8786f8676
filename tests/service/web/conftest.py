"""Fixtures for all tests of the page's server."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perseus.service.shell.tokens import Tokens
from perseus.service.shell.writer import Writer
from perseus.service.storage.sql_store import SqlStore
from perseus.service.web import json_text


@pytest.fixture(scope="session", autouse=True)
def _json_thread() -> None:
    """The one thread that makes large answers belongs to the process, and starts with the first of them."""
    json_text._maker.submit(int).result()


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
