"""The cost of a group commit: through SQLAlchemy, as in the store, against statements written by hand.

Both write the same entries into SQLite files beside each other, with the same durability, group by group in
turn, so that other load on the machine slows both. The reference writes one statement for each entry, into
tables of the same columns; it writes plans for each pipeline, as it has no way to share them.

CPU seconds are those of the writing thread; wall-clock seconds include the disk's flushes.
"""

import json
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from google.protobuf.timestamp_pb2 import Timestamp
from pydantic import TypeAdapter

from benchmarks.harness import Cell, Column, Table, main
from perseus.service.domain.measured import Period
from perseus.service.domain.model import (
    Clocks,
    JobState,
    PipelineOffer,
    PlannedClocks,
    Rank,
    RankState,
)
from perseus.service.domain.records import IterationRows, OfferRecord
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import IterationColumns
from perseus.service.storage.engines import connect
from perseus.service.storage.migrating import migrate
from perseus.service.storage.store import Entry, EventEntry, JobEntry, NewRun, TelemetrySequence
from perseus.service.storage.writing import GroupWriter
from perseus.solver import Computation, Kind, Plan, PlannedComputation
from perseus.v1 import event_pb2
from tests.service.service_fakes import make_gpu, make_spec

PIPELINES, STAGES, MICROBATCHES = 128, 8, 10
BATCHES = 100
"""Batches of telemetry in a group: those of 1,000 ranks in a tenth of a second."""
FEW = 4

_GROUPS = 60
_PLAN_GROUPS = 8


def telemetry(number: int, batch_count: int = BATCHES) -> list[Entry]:
    """Return one iteration's batch of each of some ranks, and the report period that they extend."""
    entries: list[Entry] = []
    for batch in range(batch_count):
        rank = Coordinates(batch // STAGES, batch % STAGES, 0)
        rows = IterationColumns(
            [number], [7], [1 / 3 + number], [2 / 3 + batch],
            [True], [0],
        )  # fmt: skip
        entries += [
            JobEntry("job", 1, IterationRows(rank, rows, number - 3)),
            TelemetrySequence(f"agent-{batch}", number + 1),
        ]
    period = Period(
        3, JobState.PLANNED, False, (7,) * PIPELINES, 0, number, 1.5, 2.5, number + 1, 0.8, 1 / 3, 80.0, 0.1,
        (40.0,) * PIPELINES,
    )  # fmt: skip
    return [*entries, JobEntry("job", 1, period)]


def _plan_change(number: int) -> list[Entry]:
    """Return another plan for all pipelines, the ranks that get it, and its events."""
    plan = Plan(
        1.0 + number, 2.0, 3.0,
        tuple(
            tuple(
                PlannedComputation(Computation(stage, kind, at), 1200, number + at / 3, 0.1 / 3)
                for at in range(MICROBATCHES)
                for kind in (Kind.FORWARD, Kind.BACKWARD)
            )
            for stage in range(STAGES)
        ),
    )  # fmt: skip
    offer = PipelineOffer((number,) * STAGES, 20 + number, PlannedClocks(plan))
    entries: list[Entry] = []
    for pipeline in range(PIPELINES):
        entries.append(JobEntry("job", 1, OfferRecord(pipeline, replace(offer))))
        entries.append(_offered(number * PIPELINES + pipeline, pipeline, number))
        for stage in range(STAGES):
            place = Coordinates(pipeline, stage, 0)
            rank = Rank(place, RankState.CONNECTED, "agent", "host", make_gpu(place), number, number, 20)
            entries.append(JobEntry("job", 1, rank))
    return entries


def _events(number: int) -> list[Entry]:
    """Return as many events as batches."""
    return [_offered(10**6 + number * BATCHES + n, 1, 7) for n in range(BATCHES)]


def _offered(sequence: int, pipeline: int, version: int) -> EventEntry:
    event = event_pb2.JobEvent(
        sequence=sequence,
        create_time=Timestamp(seconds=1_700_000_000),
        type=event_pb2.JOB_EVENT_TYPE_PLAN_OFFERED,
        message=f"pipeline {pipeline} is offered",
        pipeline_clocks=event_pb2.PipelineClocks(
            pipeline=pipeline,
            version=version,
            changed_stages=(0, 1),
            start_iteration=20,
            plan=event_pb2.PlannedIteration(iteration_time_s=1.0, energy_j=2.0),
        ),
    )
    return EventEntry("job", 1, event)


class ByHand:
    """The reference: sqlite3, one statement for each entry."""

    SCHEMA = """
    CREATE TABLE ranks (
        job_id TEXT, run_number INTEGER, pipeline INTEGER, stage INTEGER, tensor INTEGER, rank TEXT NOT NULL,
        PRIMARY KEY (job_id, run_number, pipeline, stage, tensor)) WITHOUT ROWID;
    CREATE TABLE offers (
        job_id TEXT, run_number INTEGER, pipeline INTEGER, stage_versions TEXT NOT NULL,
        start_iteration INTEGER NOT NULL, clocks_type TEXT NOT NULL, clocks TEXT NOT NULL,
        PRIMARY KEY (job_id, run_number, pipeline)) WITHOUT ROWID;
    CREATE TABLE periods (
        job_id TEXT, run_number INTEGER, number INTEGER, period TEXT NOT NULL,
        PRIMARY KEY (job_id, run_number, number)) WITHOUT ROWID;
    CREATE TABLE open_iterations (
        job_id TEXT, run_number INTEGER, pipeline INTEGER, stage INTEGER, tensor INTEGER, iteration INTEGER,
        plan_version INTEGER NOT NULL, duration_s REAL NOT NULL, energy_j REAL NOT NULL,
        is_regular INTEGER NOT NULL,
        PRIMARY KEY (job_id, run_number, iteration, pipeline, stage, tensor)) WITHOUT ROWID;
    CREATE TABLE events (
        job_id TEXT, run_number INTEGER, sequence INTEGER, create_time_s REAL NOT NULL,
        type INTEGER NOT NULL, event BLOB NOT NULL,
        PRIMARY KEY (job_id, run_number, sequence)) WITHOUT ROWID;
    CREATE INDEX events_by_type ON events (job_id, run_number, type, sequence);
    CREATE INDEX events_by_time ON events (job_id, run_number, create_time_s);
    CREATE TABLE telemetry (instance_id TEXT PRIMARY KEY, sequence INTEGER NOT NULL) WITHOUT ROWID;
    """

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.executescript(self.SCHEMA)
        self._rank, self._period = TypeAdapter(Rank), TypeAdapter(Period)
        self._clocks: TypeAdapter[Clocks] = TypeAdapter(PlannedClocks)

    def write(self, entries: Sequence[Entry]) -> None:
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        for entry in entries:
            match entry:
                case JobEntry(job_id, run_number, record):
                    run = (job_id, run_number)
                    match record:
                        case IterationRows():
                            self._write_iterations(run, record)
                        case Rank(Coordinates(pipeline, stage, tensor)):
                            values = (*run, pipeline, stage, tensor, self._rank.dump_json(record).decode())
                            execute("REPLACE INTO ranks VALUES (?, ?, ?, ?, ?, ?)", values)
                        case OfferRecord(pipeline, offer):
                            clocks = self._clocks.dump_json(offer.clocks).decode()
                            versions = json.dumps(offer.stage_versions)
                            execute(
                                "REPLACE INTO offers VALUES (?, ?, ?, ?, ?, ?, ?)",
                                (*run, pipeline, versions, offer.start_iteration, "plan", clocks),
                            )
                        case Period():
                            execute(
                                "REPLACE INTO periods VALUES (?, ?, ?, ?)",
                                (*run, record.number, self._period.dump_json(record).decode()),
                            )
                case EventEntry(job_id, run_number, event):
                    create_time_s = event.create_time.seconds + event.create_time.nanos / 1e9
                    execute(
                        "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)",
                        (
                            job_id, run_number, event.sequence, create_time_s, event.type,
                            event.SerializeToString(),
                        ),
                    )  # fmt: skip
                case TelemetrySequence(instance_id, sequence):
                    execute("REPLACE INTO telemetry VALUES (?, ?)", (instance_id, sequence))
        execute("COMMIT")

    def _write_iterations(self, run: tuple[str, int], record: IterationRows) -> None:
        rank, rows = record.rank, record.rows
        columns = (rows.iteration, rows.plan_version, rows.duration_s, rows.energy_j, rows.is_regular)
        self._connection.executemany(
            "INSERT OR IGNORE INTO open_iterations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                (*run, rank.pipeline, rank.stage, rank.tensor, *row)
                for row in zip(*(column for column in columns), strict=True)
                if row[0] > record.closed_through
            ),
        )
        self._connection.execute(
            "DELETE FROM open_iterations WHERE job_id = ? AND run_number = ? AND iteration <= ?",
            (*run, record.closed_through),
        )


class ByTheStore:
    """The work of the store's thread."""

    def __init__(self, database: Path | str) -> None:
        opened = connect(database)
        self._connection = opened.connection
        with self._connection.begin():
            migrate(self._connection, opened.name)
        self._writer = GroupWriter(self._connection, time.time)
        self._commit_number = 0
        self.write([NewRun(make_spec(), 1, 1.0)])

    def write(self, entries: Sequence[Entry]) -> None:
        self._commit_number += 1
        with self._connection.begin():
            self._writer.write(entries, self._commit_number)


def _compare(
    make: Callable[[int], list[Entry]], group_count: int, writers: Sequence[ByHand | ByTheStore]
) -> tuple[list[float], list[float]]:
    """Return the median CPU and wall seconds of a group, by writer."""
    cpu_s: list[list[float]] = [[] for _ in writers]
    wall_s: list[list[float]] = [[] for _ in writers]
    for number in range(1, group_count + 1):
        entries = make(number)
        for index, writer in enumerate(writers):
            started_s, started_cpu_s = time.perf_counter(), time.thread_time()
            writer.write(entries)
            cpu_s[index].append(time.thread_time() - started_cpu_s)
            wall_s[index].append(time.perf_counter() - started_s)
    return [median(some) for some in cpu_s], [median(some) for some in wall_s]


def run() -> list[Table]:
    """Measure each kind of group."""
    rows: list[tuple[Cell, ...]] = []
    with tempfile.TemporaryDirectory() as directory:
        writers = ByHand(Path(directory) / "hand.db"), ByTheStore(Path(directory) / "store.db")
        for name, make, count in (
            (f"telemetry: {BATCHES} batches, and a period", telemetry, _GROUPS),
            (f"telemetry: {FEW} batches, and a period", lambda n: telemetry(1000 + n, FEW), _GROUPS),
            (f"{BATCHES} events", _events, _GROUPS),
            (f"a plan change: {PIPELINES} pipelines × {STAGES} ranks", _plan_change, _PLAN_GROUPS),
        ):
            (hand_s, store_s), (hand_wall_s, store_wall_s) = _compare(make, count, writers)
            rows.append((name, 1e3 * hand_s, 1e3 * store_s, store_s / hand_s, store_wall_s / hand_wall_s))
    return [
        Table(
            "One group commit into SQLite: through SQLAlchemy, against statements by hand",
            (
                Column("group"),
                Column("by hand [CPU ms]", ".2f"),
                Column("store [CPU ms]", ".2f"),
                Column("ratio of CPU", ".2f"),
                Column("ratio of time", ".2f"),
            ),
            tuple(rows),
            "Medians; the time includes the flush to the disk.",
        )
    ]


if __name__ == "__main__":
    main("storage_cost", run)
