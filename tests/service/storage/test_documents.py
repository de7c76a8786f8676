"""Documents written by another release: they are read as far as they can be understood, and never guessed."""

import asyncio
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from perseus.service.domain.commands import Store
from perseus.service.domain.power import Budget, BudgetRecord, UnreadableBudget
from perseus.service.domain.records import Registrations, StoredJob, UnreadableJob
from perseus.service.domain.snapshot import RunSnapshot
from perseus.service.domain.specification import Registration
from perseus.service.job.machine import JobMachine
from perseus.service.job.rules import Rules
from perseus.service.storage.checking import check_database
from perseus.service.storage.store import BudgetEntry, JobEntry, NewRun
from tests.service.service_fakes import EPOCH, make_spec
from tests.service.storage.stores import entries_of, execute, fill, opened, planned_cluster

COLUMNS = [
    ("runs", "spec"),
    ("runs", "registrations"),
    ("runs", "record"),
    ("counters", "counters"),
    ("ranks", "rank"),
    ("periods", "period"),
    ("offers", "stage_versions"),
    ("plans", "clocks"),
    ("profiles", "measurements"),
]
"""The documents of a job."""

BUDGET = BudgetRecord(Budget("budget", "hall-a", 1000.0, 1.0), "request", "token grid", 1.0)


@pytest.fixture
def path(path: Path) -> Path:
    """A database with a job that has everything, another that is new, and two budgets."""
    registrations = Registrations((Registration("request", "work", labels=(("a", "b"),)),))
    entries = (
        *entries_of(planned_cluster()),
        JobEntry("job", 1, registrations),
        NewRun(make_spec("other"), 1, 1.0),
        BudgetEntry(BUDGET),
        BudgetEntry(BudgetRecord(Budget("other", "hall-b", 2000.0, 1.0), "request", "", 1.0)),
    )
    asyncio.run(fill(path, *entries))
    return path


def change(path: Path, table: str, column: str, changed: Callable[[Any], Any]) -> None:
    """Change a column's documents, of the job or budget not named other."""
    key = "budget_id" if table == "budgets" else "job_id"
    with closing(sqlite3.connect(path)) as connection, connection:
        found = connection.execute(f"SELECT DISTINCT {column} FROM {table} WHERE {key} <> 'other'").fetchall()
        assert found
        for (text,) in found:
            connection.execute(
                f"UPDATE {table} SET {column} = ? WHERE {column} = ?",
                (json.dumps(changed(json.loads(text)), indent=1), text),
            )


async def read(path: Path) -> tuple[StoredJob | RunSnapshot | UnreadableJob, BudgetRecord | UnreadableBudget]:
    """Return the one not named other, after a check that the others can be read."""
    async with opened(path) as store:
        job, other_job = await store.load_jobs()
        budget, other_budget = await store.load_budgets()
    assert isinstance(other_job, StoredJob)
    assert isinstance(other_budget, BudgetRecord)
    return job, budget


def with_more(value: Any) -> Any:
    """Return a document with an additional field in each of its objects."""
    match value:
        case dict():
            return {name: with_more(part) for name, part in value.items()} | {"added_later": [{"x": 1}]}
        case list():
            return [with_more(part) for part in value]
    return value


async def test_a_field_that_was_added_later_is_ignored(path: Path) -> None:
    before = await read(path)
    for table, column in [*COLUMNS, ("budgets", "budget")]:
        change(path, table, column, with_more)
    assert await read(path) == before
    assert check_database(path) == []


async def test_a_field_that_was_not_there_yet_has_its_default(path: Path) -> None:
    added_later = "signal_target", "percent"

    def without(document: Any) -> Any:
        version, value = document
        return [version, {name: part for name, part in value.items() if name not in added_later}]

    before = await read(path)
    change(path, "runs", "record", without)
    change(path, "budgets", "budget", without)
    assert await read(path) == before


async def test_what_iterations_add_to_is_read_from_the_record_of_a_release_before(path: Path) -> None:
    before, _ = await read(path)
    assert isinstance(before, StoredJob)
    assert before.counters.profiling_cost.iteration_count > 0
    cost = asdict(before.counters.profiling_cost)
    change(path, "runs", "record", lambda document: [1, {**document[1], "profiling_cost": cost}])
    execute(path, "DELETE FROM counters")
    after, _ = await read(path)
    assert isinstance(after, StoredJob)
    assert after == before
    _, commands = JobMachine.restore(after, Rules(), EPOCH, now_s=0.0, wall_time_s=14.5)
    assert Store(after.counters) in commands, "it is lost with the record, which is stored without it"


@pytest.mark.parametrize(("table", "column"), COLUMNS)
async def test_a_job_with_a_document_of_a_later_version_is_unreadable_and_hides_no_other(
    path: Path, table: str, column: str
) -> None:
    change(path, table, column, lambda document: [2, *document[1:]])
    job, _ = await read(path)
    assert isinstance(job, UnreadableJob)
    assert (job.job_id, job.run_number) == ("job", 1)
    assert "expected version 1, found 2, which is newer than this Perseus" in job.cause
    assert column in job.cause
    assert any("job 'job', run 1: can't be read: " in finding for finding in check_database(path))


@pytest.mark.parametrize(
    ("table", "column", "old", "new", "cause"),
    [
        ("runs", "record", '"planned"', '"beamed up"', "record.state: Input should be"),
        ("ranks", "rank", '"connected"', '"beamed up"', "rank.state: Input should be"),
        ("runs", "spec", '"1f1b"', '"beamed up"', "spec.schedule.NamedSchedule.name: Input should be"),
        ("plans", "clocks_type", "plan", "beamed up", "offer.clocks: expected one of stock, hold, plan"),
    ],
)
async def test_a_job_with_an_unknown_value_is_unreadable_and_the_cause_names_it(
    path: Path, table: str, column: str, old: str, new: str, cause: str
) -> None:
    execute(path, f"UPDATE {table} SET {column} = replace({column}, '{old}', '{new}') WHERE job_id = 'job'")
    job, _ = await read(path)
    assert isinstance(job, UnreadableJob)
    assert cause in job.cause
    assert job.cause.endswith("found 'beamed up'")


async def test_a_budget_of_a_later_version_is_enforced_conservatively(path: Path) -> None:
    change(path, "budgets", "budget", lambda document: [2, *document[1:]])
    _, budget = await read(path)
    assert isinstance(budget, UnreadableBudget)
    assert (budget.budget_id, budget.feed, budget.limit_w) == ("budget", "hall-a", 1000.0)
    assert budget.problem == "budget: expected version 1, found 2, which is newer than this Perseus"
