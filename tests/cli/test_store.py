"""`perseus store`, and the coordinator's `--check-store`."""

import asyncio
import csv
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import NewRun
from tests.cli.commands import perseus
from tests.service.service_fakes import make_spec

UNREADABLE = "job 'job', run 1: can't be read"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.db"

    async def fill() -> None:
        store = await SqlStore.open(path)
        await store.write([NewRun(make_spec(), 1, 1.0)])
        await store.close()

    asyncio.run(fill())
    return path


def damage(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE runs SET spec = ''")


@pytest.mark.parametrize("command", ["store check", "coordinator --check-store"])
def test_the_check_reports_problems_by_its_exit_code(database: Path, command: str) -> None:
    done = perseus(f"{command} --database", database)
    assert (done.exit_code, done.stdout) == (0, "the store is consistent\n")
    damage(database)
    done = perseus(f"{command} --database", database)
    assert (done.exit_code, done.stdout.startswith(UNREADABLE)) == (1, True)


def test_the_check_has_findings_for_scripts(database: Path) -> None:
    assert perseus("store check --format json --database", database).stdout == "[]\n"
    damage(database)
    as_json = perseus("store check --format json --database", database)
    as_csv = perseus("store check --format csv --database", database)
    ((finding),) = json.loads(as_json.stdout)
    assert finding["finding"].startswith(UNREADABLE)
    assert list(csv.DictReader(as_csv.stdout.splitlines())) == [finding]
    assert (as_json.exit_code, as_csv.exit_code) == (1, 1)


def test_a_store_is_exported_and_imported(database: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "jobs.jsonl", tmp_path / "other.db"
    done = perseus("store export", file, "--database", database)
    assert (done.exit_code, done.stdout) == (0, f"exported 3 rows to {file}\n")
    done = perseus("store import", file, "--database", other)
    assert (done.exit_code, done.stdout) == (0, f"imported 3 rows from {file}\n")
    done = perseus("store import", file, "--database", other)
    assert done.exit_code == 2
    assert "expected an empty database" in done.stderr


LOCKED = "it is locked: is another coordinator running on it?"


@pytest.mark.parametrize(
    ("command", "exit_code", "message"),
    [
        ("check", 0, "the store is consistent"),
        ("export {folder}/jobs.jsonl", 1, LOCKED),
    ],
)
async def test_a_store_in_use_is_only_read(
    tmp_path: Path, command: str, exit_code: int, message: str
) -> None:
    database = tmp_path / "jobs.db"
    store = await SqlStore.open(database)
    call = f"store {command.format(folder=tmp_path)} --database"
    done = await asyncio.to_thread(perseus, call, database)
    await store.write([NewRun(make_spec("other"), 1, 2.0)])
    await store.close()
    assert (done.exit_code, message in done.output) == (exit_code, True), done.output
    assert not (tmp_path / "jobs.jsonl").exists()
