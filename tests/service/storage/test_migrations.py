"""Databases of earlier releases, as these wrote them, become the present schema with all that is in them."""

import asyncio
import json
import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine

from perseus.service.domain.errors import DatabaseUnavailableError
from perseus.service.domain.evidence import Registered, StateChanged
from perseus.service.domain.model import EventType, JobState, PlannedClocks, RankState
from perseus.service.domain.records import StoredJob
from perseus.service.domain.specification import Parallelism
from perseus.service.job.machine import JobMachine
from perseus.service.job.rules import Rules
from perseus.service.storage import schema
from perseus.service.storage.checking import check_database
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import JobStore

DATABASES = Path(__file__).parent / "databases"
EPOCHS = {4: "bbe5c201fee74e41a14ff46fc193b4fc", 5: "314921d860d7403e845e2654ffa59779"}


@pytest.fixture(params=EPOCHS)
def version(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture
def old(tmp_path: Path, version: int) -> Path:
    path = tmp_path / "jobs.db"
    with sqlite3.connect(path) as connection:
        connection.executescript((DATABASES / f"schema{version}.sql").read_text())
    connection.close()
    return path


async def jobs_of(store: JobStore) -> dict[str, StoredJob]:
    jobs = await store.load_jobs()
    assert all(isinstance(job, StoredJob) for job in jobs), jobs
    return {job.spec.job_id: job for job in jobs if isinstance(job, StoredJob)}


async def test_everything_that_a_job_needs_to_go_on_is_there(old: Path, version: int) -> None:
    store = await SqlStore.open(old)
    assert await store.epoch() == EPOCHS[version]
    assert await store.telemetry_sequence("agent") == 17
    jobs = await jobs_of(store)
    assert sorted(jobs) == ["finished", "planned"]
    planned, finished = jobs["planned"], jobs["finished"]
    assert planned.record is not None
    assert finished.record is not None
    assert (planned.record.state, finished.record.state) == (JobState.PLANNED, JobState.FINISHED)
    assert planned.record.baseline is not None
    assert planned.record.baseline.time_s > 0
    assert finished.record.finish_time_s is not None
    assert planned.record.state_reason == "the frontier is solved"
    assert len(planned.profiles) == 12
    assert [period.number for period in planned.periods] == list(range(len(planned.periods))) != []
    assert len(planned.open_rows) == 1
    assert {rank.state for rank in planned.ranks} == {RankState.CONNECTED}
    first, second = (record.offer for record in planned.offers)
    assert isinstance(first.clocks, PlannedClocks)
    assert first.version == planned.record.version
    assert first.clocks is second.clocks  # stored once
    for job in jobs.values():
        machine, _ = JobMachine.restore(job, Rules(), await store.epoch(), now_s=0.0, wall_time_s=99.0)
        machine.validate()
    await store.close()


async def test_events_keep_their_messages_and_what_evidence_can_be_read(old: Path, version: int) -> None:
    with sqlite3.connect(old) as connection:
        messages = connection.execute(
            "SELECT message FROM events WHERE job_id = 'finished' ORDER BY sequence"
        ).fetchall()
    connection.close()
    store = await SqlStore.open(old)
    events = await store.events("finished", 1, 0, 1000)
    assert [(event.happening.message,) for event in events] == messages
    assert events[0].happening.evidence == Registered(Parallelism(2, 2, 1))
    (end,) = (event.happening for event in events if event.happening.is_end)
    assert isinstance(end.evidence, StateChanged)
    without = {event.happening.type for event in events if event.happening.evidence is None}
    # Which stages held which clocks, and how long transfers took, was not told.
    assert without == (
        {EventType.PLAN_OFFERED, EventType.PLAN_IN_FORCE, EventType.SOLVED} if version == 4 else set()
    )
    await store.close()


async def test_what_is_migrated_is_whole_and_of_the_present_schema(old: Path) -> None:
    await (await SqlStore.open(old)).close()
    await (await SqlStore.open(old)).close()
    assert check_database(old) == []
    engine = create_engine(f"sqlite:///{old}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
        assert context.get_current_revision() == schema.HEAD
        # So that releases from before refuse it.
        assert connection.exec_driver_sql("PRAGMA user_version").scalar() == int(schema.HEAD)
    engine.dispose()


async def test_a_record_that_can_not_be_read_stays_and_is_told_of(old: Path, version: int) -> None:
    table = "jobs" if version == 4 else "runs"
    with sqlite3.connect(old) as connection:
        connection.execute(f"UPDATE {table} SET record = '{{\"state\": 7' WHERE job_id = 'planned'")
    connection.close()
    store = await SqlStore.open(old)
    finished, planned = await store.load_jobs()
    assert isinstance(finished, StoredJob)
    assert not isinstance(planned, StoredJob)
    assert (planned.job_id, planned.run_number) == ("planned", 1)
    assert "\n" not in planned.cause
    await store.close()


def test_a_new_database_is_of_the_schema_that_migrations_lead_to(database: Path | str) -> None:
    async def make() -> None:
        await (await SqlStore.open(database)).close()

    asyncio.run(make())
    url = f"sqlite:///{database}" if isinstance(database, Path) else database.replace("://", "+psycopg://")
    engine = create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
        assert context.get_current_revision() == schema.HEAD
    engine.dispose()


def test_another_applications_file_keeps_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "photos.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE photos (x)")
    connection.close()
    content = path.read_bytes()
    with pytest.raises(DatabaseUnavailableError, match="found tables photos"):
        asyncio.run(SqlStore.open(path))
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("PRAGMA user_version = 3", "expected schema 0004 to 0011, found 0003, which is too old"),
        ("PRAGMA user_version = 12", "found 0012, which is newer than this Perseus"),
        (
            "CREATE TABLE receipts (sum)",
            "expected an empty database or one of Perseus, found tables receipts",
        ),
        (
            "CREATE TABLE alembic_version (version_num TEXT); INSERT INTO alembic_version VALUES ('0099')",
            "found 0099, which is newer than this Perseus",
        ),
        (
            "CREATE TABLE photos (x); PRAGMA user_version = 8",
            "expected an empty database or one of Perseus, found tables photos",
        ),
        (
            "CREATE TABLE alembic_version (version_num TEXT); INSERT INTO alembic_version VALUES ('0008'); "
            "CREATE TABLE jobs (x); CREATE TABLE events (x)",
            "found tables events, jobs",
        ),
    ],
)
async def test_what_can_not_be_migrated_is_refused_in_one_line_and_left_alone(
    tmp_path: Path, statement: str, message: str
) -> None:
    path = tmp_path / "jobs.db"
    connection = sqlite3.connect(path)
    connection.executescript(statement)
    before = list(connection.iterdump())
    connection.close()
    with pytest.raises(DatabaseUnavailableError) as caught:
        await SqlStore.open(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    connection = sqlite3.connect(path)
    assert list(connection.iterdump()) == before
    connection.close()


def test_the_old_databases_are_of_the_schemas_that_they_are_named_for() -> None:
    for number, epoch in EPOCHS.items():
        text = (DATABASES / f"schema{number}.sql").read_text()
        assert f"PRAGMA user_version = {number};" in text
        assert json.dumps(epoch).strip('"') in text
