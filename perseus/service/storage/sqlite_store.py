"""The store in one SQLite file: write-ahead log, one writer, one thread of its own.

Values are kept as JSON beside the keys that they are looked up by. The file is locked while it is open, so
a second coordinator can not serve the same jobs.
"""

import asyncio
import json
import sqlite3
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter

from perseus.service.domain.errors import DatabaseUnavailableError
from perseus.service.domain.events import ALL_EVENTS, EventFilter, Happening, JobEvent
from perseus.service.domain.evidence import EVIDENCE, Evidence
from perseus.service.domain.measured import KnownProfile, Period, StageKey, StageProfile
from perseus.service.domain.model import (
    Clocks,
    EventType,
    HoldClocks,
    PipelineOffer,
    PlannedClocks,
    Rank,
    StockClocks,
)
from perseus.service.domain.records import (
    ForgetIterations,
    IterationRows,
    JobRecord,
    OfferRecord,
    ProfiledWork,
    Record,
    Registrations,
    StoredJob,
)
from perseus.service.domain.specification import Coordinates, JobSpec, Registration
from perseus.service.domain.telemetry import IterationColumns
from perseus.service.storage.store import Entry, JobDeleted, JobEntry, JobStore, NewRun, TelemetrySequence
from perseus.solver import Measurement

T = TypeVar("T")

SCHEMA_VERSION = 5

_SCHEMA = """
CREATE TABLE coordinator (epoch TEXT NOT NULL, deleted_version INTEGER NOT NULL);
CREATE TABLE runs (
    job_id TEXT, run_number INTEGER, create_time_s REAL NOT NULL, spec TEXT NOT NULL,
    registrations TEXT NOT NULL, record TEXT, PRIMARY KEY (job_id, run_number)) WITHOUT ROWID;
CREATE TABLE ranks (
    job_id TEXT, run_number INTEGER, pipeline INTEGER, stage INTEGER, tensor INTEGER, rank TEXT NOT NULL,
    PRIMARY KEY (job_id, run_number, pipeline, stage, tensor)) WITHOUT ROWID;
CREATE TABLE offers (
    job_id TEXT, run_number INTEGER, pipeline INTEGER, stage_versions TEXT NOT NULL,
    start_iteration INTEGER NOT NULL, clocks_type TEXT NOT NULL, clocks TEXT NOT NULL,
    PRIMARY KEY (job_id, run_number, pipeline)) WITHOUT ROWID;
CREATE TABLE profiles (
    job_id TEXT, run_number INTEGER, stage INTEGER, clock_mhz INTEGER, measurements TEXT NOT NULL,
    blocking_power_w REAL, blocking_power_se_w REAL NOT NULL,
    PRIMARY KEY (job_id, run_number, stage, clock_mhz)) WITHOUT ROWID;
CREATE TABLE profiled_work (
    job_id TEXT, run_number INTEGER, stage INTEGER, work_key TEXT NOT NULL,
    PRIMARY KEY (job_id, run_number, stage)) WITHOUT ROWID;
CREATE INDEX profiled_work_by_key ON profiled_work (work_key);
CREATE TABLE periods (
    job_id TEXT, run_number INTEGER, number INTEGER, period TEXT NOT NULL,
    PRIMARY KEY (job_id, run_number, number)) WITHOUT ROWID;
CREATE TABLE open_iterations (
    job_id TEXT, run_number INTEGER, pipeline INTEGER, stage INTEGER, tensor INTEGER, iteration INTEGER,
    plan_version INTEGER NOT NULL, duration_s REAL NOT NULL, energy_j REAL NOT NULL,
    is_regular INTEGER NOT NULL,
    PRIMARY KEY (job_id, run_number, iteration, pipeline, stage, tensor)) WITHOUT ROWID;
CREATE TABLE events (
    job_id TEXT, run_number INTEGER, sequence INTEGER, create_time_s REAL NOT NULL, type TEXT NOT NULL,
    message TEXT NOT NULL, evidence TEXT,
    PRIMARY KEY (job_id, run_number, sequence)) WITHOUT ROWID;
CREATE INDEX events_by_type ON events (job_id, run_number, type, sequence);
CREATE INDEX events_by_time ON events (job_id, run_number, create_time_s);
CREATE TABLE telemetry (instance_id TEXT PRIMARY KEY, sequence INTEGER NOT NULL) WITHOUT ROWID;
"""

_TABLES_OF_JOBS = (
    "runs",
    "ranks",
    "offers",
    "profiles",
    "profiled_work",
    "periods",
    "open_iterations",
    "events",
)

_SPEC = TypeAdapter(JobSpec)
_REGISTRATIONS = TypeAdapter(tuple[Registration, ...])
_RECORD = TypeAdapter(JobRecord)
_RANK = TypeAdapter(Rank)
_PERIOD = TypeAdapter(Period)
_MEASUREMENTS = TypeAdapter(list[tuple[StageKey, Measurement]])
_EVIDENCE: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in set(EVIDENCE.values())}
_CLOCKS: dict[str, TypeAdapter[Any]] = {
    "stock": TypeAdapter(StockClocks),
    "hold": TypeAdapter(HoldClocks),
    "plan": TypeAdapter(PlannedClocks),
}
_CLOCKS_TYPE: dict[type, str] = {StockClocks: "stock", HoldClocks: "hold", PlannedClocks: "plan"}


class SqliteStore(JobStore):
    """Jobs in a SQLite file."""

    def __init__(self, connection: sqlite3.Connection, thread: ThreadPoolExecutor) -> None:
        self._connection = connection
        self._thread = thread

    @classmethod
    async def open(cls, path: Path) -> "SqliteStore":
        """Open the file, or make it.

        Raises:
            DatabaseUnavailableError: it is no database of ours, in use, or can't be made.
        """
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        loop = asyncio.get_running_loop()
        try:
            connection = await loop.run_in_executor(thread, _connect, path)
        except sqlite3.Error as error:
            thread.shutdown(wait=False)
            raise DatabaseUnavailableError(path=path, cause=error) from None
        except DatabaseUnavailableError:
            thread.shutdown(wait=False)
            raise
        return cls(connection, thread)

    async def epoch(self) -> str:
        """See JobStore."""
        return str((await self._read("SELECT epoch FROM coordinator"))[0][0])

    async def deleted_version(self) -> int:
        """See JobStore."""
        return int((await self._read("SELECT deleted_version FROM coordinator"))[0][0])

    async def write(self, entries: Sequence[Entry]) -> None:
        """See JobStore."""
        await self._run(partial(_write_all, self._connection, entries))

    async def load_jobs(self) -> list[StoredJob]:
        """See JobStore."""
        return await self._run(partial(_load_jobs, self._connection))

    async def load_run(self, job_id: str, run_number: int) -> StoredJob | None:
        """See JobStore."""
        return await self._run(partial(_load_run, self._connection, job_id, run_number))

    async def run_numbers(self, job_id: str) -> list[int]:
        """See JobStore."""
        statement = "SELECT run_number FROM runs WHERE job_id = ? ORDER BY run_number DESC"
        return [number for (number,) in await self._read(statement, (job_id,))]

    async def known_requests(self) -> Mapping[str, Mapping[str, int]]:
        """See JobStore."""
        known: dict[str, dict[str, int]] = {}
        rows = await self._read("SELECT job_id, run_number, registrations FROM runs ORDER BY run_number")
        for job_id, run_number, registrations in rows:
            for registration in _REGISTRATIONS.validate_json(registrations):
                known.setdefault(job_id, {})[registration.request_id] = run_number
        return known

    async def known_profiles(self, keys: Sequence[str]) -> Collection[KnownProfile]:
        """See JobStore."""
        return await self._run(partial(_known_profiles, self._connection, keys))

    async def events(
        self,
        job_id: str,
        run_number: int,
        after_sequence: int,
        limit: int,
        wanted: EventFilter = ALL_EVENTS,
    ) -> list[JobEvent]:
        """See JobStore."""
        statement, values = events_query(job_id, run_number, after_sequence, limit, wanted)
        return [
            JobEvent(
                job_id, run_number, time_s, _load_happening(sequence, EventType(kind), message, evidence)
            )
            for sequence, time_s, kind, message, evidence in await self._read(statement, values)
        ]

    async def telemetry_sequence(self, instance_id: str) -> int:
        """See JobStore."""
        rows = await self._read("SELECT sequence FROM telemetry WHERE instance_id = ?", (instance_id,))
        return int(rows[0][0]) if rows else 0

    async def close(self) -> None:
        """See JobStore."""
        await self._run(self._connection.close)
        self._thread.shutdown()

    async def _read(
        self, statement: str, values: Sequence[object] | Mapping[str, object] = ()
    ) -> list[tuple[Any, ...]]:
        return await self._run(lambda: self._connection.execute(statement, values).fetchall())

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _connect(path: Path) -> sqlite3.Connection:
    """Open the file, lock it, and make the schema if it is new."""
    connection = sqlite3.connect(path, timeout=1.0, isolation_level=None)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        # The log is flushed at every commit: what was acknowledged must survive a power cut.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found == 0:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute("INSERT INTO coordinator VALUES (?, 0)", (uuid.uuid4().hex,))
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif found != SCHEMA_VERSION:
            raise DatabaseUnavailableError(
                path=path, cause=f"expected schema version {SCHEMA_VERSION}, found {found}"
            )
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _write_all(connection: sqlite3.Connection, entries: Iterable[Entry]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        for entry in entries:
            match entry:
                case NewRun(spec, run_number, create_time_s):
                    connection.execute(
                        "INSERT INTO runs VALUES (?, ?, ?, ?, '[]', NULL)",
                        (spec.job_id, run_number, create_time_s, _SPEC.dump_json(spec).decode()),
                    )
                case JobDeleted(job_id, version):
                    for table in _TABLES_OF_JOBS:
                        connection.execute(f"DELETE FROM {table} WHERE job_id = ?", (job_id,))
                    statement = "UPDATE coordinator SET deleted_version = max(deleted_version, ?)"
                    connection.execute(statement, (version,))
                case JobEntry(job_id, run_number, record):
                    _write_record(connection, (job_id, run_number), record)
                case JobEvent(job_id, run_number, create_time_s, event):
                    connection.execute(
                        "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)",
                        (
                            job_id,
                            run_number,
                            event.sequence,
                            create_time_s,
                            event.type.value,
                            event.message,
                            _dump_evidence(event.evidence),
                        ),
                    )
                case TelemetrySequence(instance_id, sequence):
                    connection.execute("REPLACE INTO telemetry VALUES (?, ?)", (instance_id, sequence))
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


_RunKey = tuple[str, int]
"""(job_id, run_number)."""


def _write_record(connection: sqlite3.Connection, run: _RunKey, record: Record) -> None:
    match record:
        case JobRecord():
            connection.execute(
                "UPDATE runs SET record = ? WHERE job_id = ? AND run_number = ?",
                (_RECORD.dump_json(record).decode(), *run),
            )
        case Registrations(registrations):
            connection.execute(
                "UPDATE runs SET registrations = ? WHERE job_id = ? AND run_number = ?",
                (_REGISTRATIONS.dump_json(registrations).decode(), *run),
            )
        case Rank(Coordinates(pipeline, stage, tensor)):
            connection.execute(
                "REPLACE INTO ranks VALUES (?, ?, ?, ?, ?, ?)",
                (*run, pipeline, stage, tensor, _RANK.dump_json(record).decode()),
            )
        case OfferRecord(pipeline, PipelineOffer(stage_versions, start_iteration, clocks)):
            kind = _CLOCKS_TYPE[type(clocks)]
            connection.execute(
                "REPLACE INTO offers VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    *run,
                    pipeline,
                    json.dumps(stage_versions),
                    start_iteration,
                    kind,
                    _CLOCKS[kind].dump_json(clocks).decode(),
                ),
            )
        case StageProfile(stage, clock_mhz, measurements, power_w, power_se_w):
            text = _MEASUREMENTS.dump_json(list(measurements.items())).decode()
            connection.execute(
                "REPLACE INTO profiles VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*run, stage, clock_mhz, text, power_w, power_se_w),
            )
        case ProfiledWork(stage, key):
            connection.execute("REPLACE INTO profiled_work VALUES (?, ?, ?, ?)", (*run, stage, key))
        case Period():
            connection.execute(
                "REPLACE INTO periods VALUES (?, ?, ?, ?)",
                (*run, record.number, _PERIOD.dump_json(record).decode()),
            )
        case IterationRows():
            _write_iterations(connection, run, record)
        case ForgetIterations():
            connection.execute("DELETE FROM open_iterations WHERE job_id = ? AND run_number = ?", run)


def _write_iterations(connection: sqlite3.Connection, run: _RunKey, record: IterationRows) -> None:
    rank, rows = record.rank, record.rows
    columns = (rows.iteration, rows.plan_version, rows.duration_s, rows.energy_j, rows.is_regular)
    connection.executemany(
        "INSERT OR IGNORE INTO open_iterations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            (*run, rank.pipeline, rank.stage, rank.tensor, *row)
            for row in zip(*(column.tolist() for column in columns), strict=True)
            if row[0] > record.closed_through
        ),
    )
    connection.execute(
        "DELETE FROM open_iterations WHERE job_id = ? AND run_number = ? AND iteration <= ?",
        (*run, record.closed_through),
    )


def events_query(
    job_id: str, run_number: int, after_sequence: int, limit: int, wanted: EventFilter
) -> tuple[str, dict[str, object]]:
    """Return the query for a page of a run's events, and its values.

    However many events there are, it reads little more than the page: along the primary key, or along the
    index of each type, these merged. The wall clock may be set back, so times need not follow the sequence:
    bounds on time become bounds on the sequence, along an index of their own, and are tested for each event.
    """
    run = "job_id = :job_id AND run_number = :run_number"
    values: dict[str, object] = {
        "job_id": job_id,
        "run_number": run_number,
        "after": after_sequence,
        "limit": limit,
    }
    conditions = f"{run} AND sequence > :after"
    if wanted.start_time_s is not None:
        values["start_s"] = wanted.start_time_s
        conditions += (
            " AND create_time_s >= :start_s AND sequence >= (SELECT min(sequence) "
            f"FROM events INDEXED BY events_by_time WHERE {run} AND create_time_s >= :start_s)"
        )
    if wanted.end_time_s is not None:
        values["end_s"] = wanted.end_time_s
        conditions += (
            " AND create_time_s < :end_s AND sequence <= (SELECT max(sequence) "
            f"FROM events INDEXED BY events_by_time WHERE {run} AND create_time_s < :end_s)"
        )
    columns = "sequence, create_time_s, type, message, evidence"
    if not wanted.types:
        select = f"SELECT {columns} FROM events WHERE {conditions}"
    else:
        kinds = {f"type_{number}": kind.value for number, kind in enumerate(wanted.types)}
        values |= kinds
        of_type = f"SELECT {columns} FROM events INDEXED BY events_by_type WHERE {conditions} AND type ="
        select = " UNION ALL ".join(f"{of_type} :{name}" for name in kinds)
    return f"{select} ORDER BY sequence LIMIT :limit", values


def _dump_evidence(evidence: Evidence | None) -> str | None:
    # pydantic's own dump_json has no word for infinity and NaN.
    return (
        None if evidence is None else json.dumps(_EVIDENCE[type(evidence)].dump_python(evidence, mode="json"))
    )


def _load_happening(sequence: int, kind: EventType, message: str, evidence: str | None) -> Happening:
    values: Evidence | None = None if evidence is None else _EVIDENCE[EVIDENCE[kind]].validate_json(evidence)
    return Happening(sequence, kind, message, values)


def _load_jobs(connection: sqlite3.Connection) -> list[StoredJob]:
    latest = connection.execute(
        "SELECT job_id, max(run_number) FROM runs GROUP BY job_id ORDER BY job_id"
    ).fetchall()
    return [job for run in latest if (job := _load_run(connection, *run)) is not None]


def _load_run(connection: sqlite3.Connection, job_id: str, run_number: int) -> StoredJob | None:
    def rows(statement: str) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = connection.execute(statement, (job_id, run_number)).fetchall()
        return found

    runs = rows(
        "SELECT create_time_s, spec, registrations, record FROM runs WHERE job_id = ? AND run_number = ?"
    )
    if not runs:
        return None
    ((create_time_s, spec, registrations, record),) = runs
    return StoredJob(
        spec=_SPEC.validate_json(spec),
        run_number=run_number,
        create_time_s=create_time_s,
        registrations=Registrations(_REGISTRATIONS.validate_json(registrations)),
        record=_RECORD.validate_json(record) if record else None,
        ranks=tuple(
            _RANK.validate_json(rank)
            for (rank,) in rows(
                "SELECT rank FROM ranks WHERE job_id = ? AND run_number = ? ORDER BY pipeline, stage, tensor"
            )
        ),
        offers=tuple(
            OfferRecord(
                pipeline, PipelineOffer(tuple(json.loads(versions)), start, _load_clocks(kind, clocks))
            )
            for pipeline, versions, start, kind, clocks in rows(
                "SELECT pipeline, stage_versions, start_iteration, clocks_type, clocks FROM offers "
                "WHERE job_id = ? AND run_number = ? ORDER BY pipeline"
            )
        ),
        profiles=tuple(
            _load_profile(*row)
            for row in rows(
                "SELECT stage, clock_mhz, measurements, blocking_power_w, blocking_power_se_w FROM profiles "
                "WHERE job_id = ? AND run_number = ? ORDER BY stage, clock_mhz"
            )
        ),
        periods=tuple(
            _PERIOD.validate_json(period)
            for (period,) in rows(
                "SELECT period FROM periods WHERE job_id = ? AND run_number = ? ORDER BY number"
            )
        ),
        open_rows=tuple(
            _load_iteration(*row)
            for row in rows(
                "SELECT pipeline, stage, tensor, iteration, plan_version, duration_s, energy_j, is_regular "
                "FROM open_iterations WHERE job_id = ? AND run_number = ? ORDER BY iteration"
            )
        ),
        last_sequence=rows(
            "SELECT coalesce(max(sequence), 0) FROM events WHERE job_id = ? AND run_number = ?"
        )[0][0],
    )


def _known_profiles(connection: sqlite3.Connection, keys: Sequence[str]) -> list[KnownProfile]:
    found = []
    for stage, key in enumerate(keys):
        source = connection.execute(
            "SELECT job_id, run_number, stage FROM profiled_work JOIN runs USING (job_id, run_number) "
            "WHERE work_key = ? ORDER BY create_time_s DESC, run_number DESC LIMIT 1",
            (key,),
        ).fetchone()
        if source is not None:
            job_id, run_number, _ = source
            rows = connection.execute(
                "SELECT clock_mhz, measurements, blocking_power_w, blocking_power_se_w FROM profiles "
                "WHERE job_id = ? AND run_number = ? AND stage = ? ORDER BY clock_mhz",
                source,
            )
            profiles = tuple(_load_profile(stage, *row) for row in rows)
            found.append(KnownProfile(stage, profiles, job_id, run_number))
    return found


def _load_profile(
    stage: int, clock_mhz: int, measurements: str, power_w: float, power_se_w: float
) -> StageProfile:
    by_key = dict(_MEASUREMENTS.validate_json(measurements))
    return StageProfile(stage, clock_mhz, by_key, power_w, power_se_w)


def _load_clocks(kind: str, text: str) -> Clocks:
    clocks: Clocks = _CLOCKS[kind].validate_json(text)
    return clocks


def _load_iteration(
    pipeline: int,
    stage: int,
    tensor: int,
    iteration: int,
    plan_version: int,
    duration_s: float,
    energy_j: float,
    is_regular: int,
) -> IterationRows:
    rows = IterationColumns(
        np.array([iteration]),
        np.array([plan_version]),
        np.array([duration_s]),
        np.array([energy_j]),
        np.array([bool(is_regular)]),
        np.array([0]),  # they matter when they come, and are not stored
    )
    return IterationRows(Coordinates(pipeline, stage, tensor), rows, closed_through=-1)
