"""`perseus store`, and the coordinator's `--check-store`."""

import asyncio
import csv
import json
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perseus.cli.main import app
from perseus.service.storage.schema import HEAD
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import NewRun
from tests.service.service_fakes import make_spec

RUNNER = CliRunner()


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.db"

    async def fill() -> None:
        store = await SqlStore.open(path)
        await store.write([NewRun(make_spec(), 1, 1.0)])
        await store.close()

    asyncio.run(fill())
    return path


@pytest.mark.parametrize("command", [["store", "check"], ["coordinator", "--check-store"]])
def test_the_check_reports_problems_by_its_exit_code(database: Path, command: list[str]) -> None:
    call = [*command, "--database", str(database)]
    done = RUNNER.invoke(app, call)
    assert (done.exit_code, done.stdout) == (0, "the store is consistent\n")
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE runs SET spec = ''")
    connection.close()
    done = RUNNER.invoke(app, call)
    assert done.exit_code == 1
    assert "job 'job', run 1: can't be read" in done.stdout


def test_the_check_has_findings_for_scripts(database: Path) -> None:
    call = ["store", "check", "--database", str(database), "--format"]
    whole = RUNNER.invoke(app, [*call, "json"])
    assert (whole.exit_code, json.loads(whole.stdout)) == (0, [])
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE runs SET spec = ''")
    connection.close()
    broken = RUNNER.invoke(app, [*call, "json"])
    ((finding),) = json.loads(broken.stdout)
    assert broken.exit_code == 1
    assert finding["finding"].startswith("job 'job', run 1: can't be read")
    as_csv = RUNNER.invoke(app, [*call, "csv"])
    assert (as_csv.exit_code, list(csv.DictReader(as_csv.stdout.splitlines()))) == (1, [finding])


def test_a_store_is_exported_and_imported(database: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "jobs.jsonl", tmp_path / "other.db"
    done = RUNNER.invoke(app, ["store", "export", str(file), "--database", str(database)])
    assert (done.exit_code, done.stdout) == (0, f"exported 3 rows to {file}\n")
    done = RUNNER.invoke(app, ["store", "import", str(file), "--database", str(other)])
    assert (done.exit_code, done.stdout) == (0, f"imported 3 rows from {file}\n")
    done = RUNNER.invoke(app, ["store", "import", str(file), "--database", str(other)])
    assert done.exit_code == 2
    assert "expected an empty database" in done.stderr


@pytest.mark.parametrize(
    ("command", "exit_code", "message"),
    [
        (["check"], 0, "the store is consistent"),
        (["export", "{folder}/jobs.jsonl"], 1, "it is locked: is another coordinator running on it?"),
        (["import", "{folder}/empty.jsonl"], 1, "it is locked: is another coordinator running on it?"),
    ],
)
def test_a_store_in_use_is_only_read(
    database: Path, command: list[str], exit_code: int, message: str
) -> None:
    folder = database.parent
    first = {"format": "perseus-store", "schema": HEAD, "slot_count": 1}
    (folder / "empty.jsonl").write_text(json.dumps(first))
    call = ["store", *(part.format(folder=folder) for part in command), "--database", str(database)]

    async def call_while_open() -> tuple[int, str]:
        store = await SqlStore.open(database)
        try:
            done = await asyncio.to_thread(RUNNER.invoke, app, call)
            await store.write([NewRun(make_spec("other"), 1, 2.0)])
            return done.exit_code, done.output
        finally:
            await store.close()

    found_code, output = asyncio.run(call_while_open())
    assert (found_code, message in output) == (exit_code, True), output
    assert not (folder / "jobs.jsonl").exists()
