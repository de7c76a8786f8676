"""Every test with a `database` runs on each engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.storage import postgresql


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[postgresql.Server]:
    if postgresql.MISSING:
        pytest.skip(postgresql.MISSING)
    with postgresql.running() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """An empty database, as settings name it."""
    if request.param == "sqlite":
        return tmp_path / "jobs.db"
    server: postgresql.Server = request.getfixturevalue("postgresql_server")
    return server.new_database()
