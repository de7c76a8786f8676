"""A new database has the present schema; any other schema, or application, is refused and left unchanged."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine

from perseus.service.domain.errors import DatabaseUnavailableError
from perseus.service.storage import schema
from perseus.service.storage.checking import check_database
from perseus.service.storage.sql_store import SqlStore
from tests.service.storage.stores import execute, fill


def test_a_new_database_has_the_schema_that_migrations_lead_to(database: Path | str) -> None:
    asyncio.run(fill(database))
    url = f"sqlite:///{database}" if isinstance(database, Path) else database.replace("://", "+psycopg://")
    engine = create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
        assert context.get_current_revision() == schema.HEAD
    engine.dispose()


async def test_an_earlier_schema_is_migrated_with_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    await (await SqlStore.open(path)).close()
    connection = sqlite3.connect(path)
    for column in ("frontier", "last_timeline", "baseline_timeline"):  # what v0004 adds
        connection.execute(f"ALTER TABLE runs DROP COLUMN {column}")
    connection.executescript(
        "DROP TABLE members;DROP TABLE slots;"  # what later ones add
        "DROP TABLE slot_powers;DROP TABLE gpu_claims;DROP TABLE counters;"
        "UPDATE alembic_version SET version_num = 'v0003';INSERT INTO boots VALUES (7, 'token of before', 0)"
    )
    connection.close()
    await (await SqlStore.open(path)).close()
    assert check_database(path) == []
    with sqlite3.connect(path) as connection:
        tokens = connection.execute("SELECT token FROM boots WHERE number = 7").fetchall()
    connection.close()
    assert tokens == [("token of before",)]


OURS = "CREATE TABLE coordinator (x); CREATE TABLE events (x); CREATE TABLE offers (x);"
TOO_OLD = "which is older than the first release and can't be migrated: start with an empty database"


def named(schema: str) -> str:
    """Return statements that set a database's revision."""
    return (
        f"CREATE TABLE alembic_version (version_num TEXT); INSERT INTO alembic_version VALUES ('{schema}');"
    )


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        # Revisions as they were numbered during development, and before that.
        (OURS + named("0011"), f"expected schema v0008, found 0011, {TOO_OLD}"),
        (OURS + "PRAGMA user_version = 4", f"expected schema v0008, found one without a name, {TOO_OLD}"),
        (named("v0099"), "expected schema v0008, found v0099, which is newer than this Perseus"),
        (
            "CREATE TABLE receipts (sum); PRAGMA user_version = 8",
            "expected an empty database or one of Perseus, found tables receipts",
        ),
        (
            named("v0003") + "CREATE TABLE jobs (x); CREATE TABLE events (x)",
            "expected an empty database or one of Perseus, found tables events, jobs",
        ),
    ],
)
def test_an_unknown_schema_is_refused_in_one_line_and_left_unchanged(
    path: Path, statement: str, message: str
) -> None:
    execute(path, statement)
    content, before = path.read_bytes(), dump(path)
    with pytest.raises(DatabaseUnavailableError) as caught:
        asyncio.run(SqlStore.open(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    if "one of Perseus" in message:  # another application's file keeps its journal, too
        assert (path.read_bytes(), list(path.parent.iterdir())) == (content, [path])
    assert dump(path) == before


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def test_the_check_reports_a_databases_schema(path: Path) -> None:
    execute(path, OURS + named("0011"))
    assert check_database(path) == [f"expected schema v0008, found 0011, {TOO_OLD}"]
