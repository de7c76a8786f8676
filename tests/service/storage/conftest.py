"""Every test with a `database` runs on each engine."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from perseus.service.storage.sql_store import SqlStore
from tests.service.storage import postgresql
from tests.service.storage.stores import opened


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[postgresql.Server]:
    if postgresql.MISSING:
        pytest.skip(postgresql.MISSING)
    with postgresql.running() as server:
        yield server


@pytest.fixture
def url(postgresql_server: postgresql.Server) -> str:
    """An empty database on a server."""
    return postgresql_server.new_database()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An empty database in a file, for what concerns all engines alike, or SQLite alone."""
    return tmp_path / "jobs.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> Path | str:
    """An empty database, as settings name it."""
    found: Path | str = request.getfixturevalue("path" if request.param == "sqlite" else "url")
    return found


@pytest.fixture
async def store(database: Path | str) -> AsyncIterator[SqlStore]:
    """An open store on it."""
    async with opened(database) as store:
        yield store
