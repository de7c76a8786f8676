"""Consistency checks of a database: the engine's own check, every value read back, and all invariants."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from google.protobuf.message import DecodeError
from sqlalchemy import Connection, exists, func, select

from perseus.job_id import slot_of
from perseus.service.domain.errors import (
    CoordinatorError,
    DatabaseUnavailableError,
    JobUnreadableError,
    StoreFailedError,
)
from perseus.service.domain.measured import Period
from perseus.service.domain.records import StoredJob, UnreadableJob
from perseus.service.storage import reading, schema
from perseus.service.storage.engines import connect, database_name, enter, explain
from perseus.service.storage.migrating import slot_count, version_of
from perseus.solver import SolverError
from perseus.v1 import event_pb2

_MAX_EVENTS = 20
"""How many unreadable events are named one by one."""


def check_database(database: Path | str) -> list[str]:
    """Return the faults of a database, one line each; the check changes nothing and blocks nobody.

    Raises:
        DatabaseUnavailableError: it can't be opened.
        StoreFailedError: reading it failed.
    """
    with _opened(database) as connection:
        return list(_findings(connection))


def recordings(database: Path | str, job_id: str) -> dict[int, str]:
    """Return, by run, the recorded inputs of a job's quarantined runs (`job/recording.py`) as documents.

    Raises:
        DatabaseUnavailableError: it can't be opened, or has another schema.
        StoreFailedError: it can't be read.
    """
    with _opened(database) as connection:
        try:
            if (found := version_of(connection)) != schema.HEAD:
                raise ValueError(f"expected schema {schema.HEAD}, found {found or 'an empty database'}")
        except ValueError as error:
            raise DatabaseUnavailableError(database=database_name(database), cause=error) from None
        if (slot := slot_of(job_id, slot_count(connection))) != 0:
            enter(connection, slot)
        table = schema.recordings.c
        rows = connection.execute(
            select(table.run_number, table.document).where(table.job_id == job_id).order_by(table.run_number)
        )
        return {row.run_number: row.document for row in rows}


@contextmanager
def _opened(database: Path | str) -> Iterator[Connection]:
    opened = connect(database, is_read_only=True, statement_limit_s=0)
    try:
        with opened.connection.begin():
            yield opened.connection
    except opened.errors as error:
        raise StoreFailedError(database=opened.name, cause=explain(error)) from None
    finally:
        opened.close()


def _findings(connection: Connection, slot: int = 0) -> Iterator[str]:
    try:
        found = version_of(connection, slot)
    except ValueError as error:
        yield str(error)
        return
    if found != schema.HEAD:
        what = found or "an empty database"
        yield f"schema: expected {schema.HEAD}, found {what}; a coordinator migrates it"
        return
    yield from _engine_findings(connection)
    yield from _state_findings(connection)
    if slot == 0:
        yield from _fleet_findings(connection)
    yield from _orphans(connection)
    runs = schema.runs.c
    keys = connection.execute(
        select(runs.job_id, runs.run_number).order_by(runs.job_id, runs.run_number)
    ).all()
    versions: dict[str, int] = {}
    for job_id, run_number in keys:
        name = f"job {job_id!r}, run {run_number}"
        job = reading.load_run(connection, job_id, run_number)
        if isinstance(job, UnreadableJob):
            yield f"{name}: can't be read: {job.cause}"
        elif job is not None:
            try:
                periods = reading.load_periods(connection, job_id, run_number)
            except JobUnreadableError as error:
                yield str(error)
                continue
            yield from (f"{name}: {finding}" for finding in _run_findings(job, periods))
            version = job.record.version if job.record else 0
            minimum = versions.get(job_id, 0)
            if version < minimum:
                yield f"{name}: expected version {minimum} or more, as of the run before, found {version}"
            versions[job_id] = max(version, minimum)
    yield from _event_findings(connection)
    if slot == 0:
        for other in range(1, slot_count(connection)):
            enter(connection, other)
            yield from (f"slot {other}: {finding}" for finding in _findings(connection, other))


def _engine_findings(connection: Connection) -> Iterator[str]:
    if connection.dialect.name != "sqlite":
        return  # PostgreSQL checks its pages as they are read, and this check reads them all.
    for (line,) in connection.exec_driver_sql("PRAGMA integrity_check"):
        if line != "ok":
            yield f"SQLite: {line}"


def _state_findings(connection: Connection) -> Iterator[str]:
    rows = connection.execute(select(schema.coordinator)).all()
    if len(rows) != 1:
        yield f"coordinator: expected one row, found {len(rows)}"
        return
    table = schema.boots.c
    before = 0
    for number, first_commit in connection.execute(
        select(table.number, table.first_commit).order_by(table.number)
    ):
        if not before <= first_commit <= rows[0].commit_number:
            yield (
                f"boot {number}: expected its first commit from {before} to {rows[0].commit_number}, "
                f"found {first_commit}"
            )
        before = first_commit
    sequences = schema.telemetry.c
    for instance_id, sequence in connection.execute(
        select(sequences.instance_id, sequences.sequence).where(sequences.sequence < 1)
    ):
        yield f"agent {instance_id!r}: expected a telemetry sequence of 1 or more, found {sequence}"


def _fleet_findings(connection: Connection) -> Iterator[str]:
    for row in connection.execute(select(schema.tokens).order_by(schema.tokens.c.name)):
        try:
            reading.token_of(row)
        except (ValueError, LookupError, TypeError) as error:
            cause = " ".join(str(error).split())
            yield f"token {row.name!r}: can't be read, and is not accepted: {cause}"
    for row in connection.execute(select(schema.budgets).order_by(schema.budgets.c.budget_id)):
        try:
            reading.budget_of(row)
        except (ValueError, LookupError, TypeError) as error:
            cause = " ".join(str(error).split())
            yield f"power budget {row.budget_id!r}: can't be read, and is enforced conservatively: {cause}"


def _orphans(connection: Connection) -> Iterator[str]:
    runs = schema.runs.c
    for table in (*schema.OF_RUNS, schema.ledger):
        if table is schema.runs:
            continue
        has_run = exists().where(runs.job_id == table.c.job_id, runs.run_number == table.c.run_number)
        orphans = select(func.count()).select_from(table).where(~has_run)
        if table is schema.ledger:
            orphans = orphans.where(table.c.deletion == 0)
        if count := connection.scalar(orphans):
            yield f"{table.name}: {count} rows belong to no run"


def _run_findings(job: StoredJob, periods: Sequence[Period]) -> Iterator[str]:
    counts = job.spec.parallelism
    try:
        job.spec.check()
    except (CoordinatorError, SolverError) as error:
        yield f"specification: {error}"
    version = job.record.version if job.record else 0
    for rank in job.ranks:
        try:
            job.spec.check_rank(rank.coordinates)
        except CoordinatorError as error:
            yield str(error)
        highest = max(rank.offered_version, rank.in_force_version)
        if highest > version:
            yield f"{rank.coordinates}: expected versions up to {version}, found {highest}"
    for record in job.offers:
        if not 0 <= record.pipeline < counts.pipeline_count:
            yield f"offers: expected pipelines below {counts.pipeline_count}, found {record.pipeline}"
        if len(record.offer.stage_versions) != counts.stage_count:
            yield (
                f"pipeline {record.pipeline}: expected versions of {counts.stage_count} stages, "
                f"found {len(record.offer.stage_versions)}"
            )
        elif record.offer.version > version:
            found = record.offer.version
            yield f"pipeline {record.pipeline}: expected versions up to {version}, found {found}"
    numbers = [period.number for period in periods]
    if numbers != list(range(len(numbers))):
        yield f"report: expected periods 0 to {len(numbers) - 1}, found {numbers}"


def _event_findings(connection: Connection) -> Iterator[str]:
    events = schema.events.c
    count = 0
    for row in connection.execute(select(events.job_id, events.run_number, events.sequence, events.event)):
        try:
            event_pb2.JobEvent.FromString(row.event)
        except DecodeError as error:
            count += 1
            if count <= _MAX_EVENTS:
                cause = " ".join(str(error).split())
                yield f"job {row.job_id!r}, run {row.run_number}: event {row.sequence} can't be read: {cause}"
    if count > _MAX_EVENTS:
        yield f"{count - _MAX_EVENTS} more events can't be read"
