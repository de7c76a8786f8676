"""What is known of a PostgreSQL server's standbys; pg_receivewal is one."""

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from perseus.service.storage.sql_store import SqlStore
from tests.service.storage import postgresql


@contextmanager
def standby(server: postgresql.Server, folder: Path) -> Iterator[None]:
    program = next(Path("/usr/lib/postgresql").glob("*/bin/pg_receivewal"))
    command = [str(program), "--synchronous", "--no-loop", "-D", str(folder), "-d", server.url("postgres")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow("another process connects to the server")
async def test_standbys_are_counted_by_whether_commits_wait_for_them(
    postgresql_server: postgresql.Server, tmp_path: Path
) -> None:
    server, database = postgresql_server, postgresql_server.new_database()

    def configure(statement: str) -> None:
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute(statement.encode())
            connection.execute(b"SELECT pg_reload_conf()")

    store = await SqlStore.open(database)
    assert await store.standbys() == {"synchronous": 0, "asynchronous": 0}
    try:
        with standby(server, tmp_path):
            for names, kind in (("", "asynchronous"), ("*", "synchronous")):
                configure(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
                async with asyncio.timeout(20):
                    while not (await store.standbys())[kind]:  # noqa: ASYNC110 - the server is asked
                        await asyncio.sleep(0.02)
            configure("ALTER SYSTEM RESET synchronous_standby_names")
    finally:
        await store.close()


async def test_there_are_none_without_permission_to_see_them(postgresql_server: postgresql.Server) -> None:
    database = postgresql_server.new_database()
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CREATE ROLE plain LOGIN")
        connection.execute("GRANT ALL ON SCHEMA public TO plain")
    store = await SqlStore.open(database.replace("tester@", "plain@"))
    assert await store.standbys() == {}
    await store.close()


async def test_there_are_none_on_sqlite(tmp_path: Path) -> None:
    store = await SqlStore.open(tmp_path / "jobs.db")
    assert await store.standbys() == {}
    await store.close()
