"""What is known of a PostgreSQL server's standbys; pg_receivewal is one."""

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.service.storage import postgresql
from tests.service.storage.stores import opened


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
    postgresql_server: postgresql.Server, url: str, tmp_path: Path
) -> None:
    def configure(statement: str) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(statement.encode())
            connection.execute(b"SELECT pg_reload_conf()")

    async with opened(url) as store:
        assert await store.standbys() == {"synchronous": 0, "asynchronous": 0}
        with standby(postgresql_server, tmp_path):
            for names, kind in (("", "asynchronous"), ("*", "synchronous")):
                configure(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
                async with asyncio.timeout(20):
                    while not (await store.standbys())[kind]:  # noqa: ASYNC110 - the server is asked
                        await asyncio.sleep(0.02)
            configure("ALTER SYSTEM RESET synchronous_standby_names")


async def test_there_are_none_without_permission_to_see_them(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE ROLE plain LOGIN")
        connection.execute("GRANT ALL ON SCHEMA public TO plain")
    async with opened(url.replace("tester@", "plain@")) as store:
        assert await store.standbys() == {}


async def test_there_are_none_on_sqlite(path: Path) -> None:
    async with opened(path) as store:
        assert await store.standbys() == {}
