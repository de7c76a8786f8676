"""What any store must do. Each implementation is one parameter of the fixture."""

import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perseus.service.domain.commands import Announce, Store
from perseus.service.domain.errors import DatabaseUnavailableError
from perseus.service.domain.events import Happening, JobEvent
from perseus.service.domain.evidence import Registered
from perseus.service.domain.model import (
    STOCK,
    EventType,
    HoldClocks,
    JobState,
    PipelineOffer,
    Rank,
    RankState,
    StockIteration,
    Straggler,
)
from perseus.service.domain.profiling import ClockGivenUpReason, GivenUpClock, ProfilingCost
from perseus.service.domain.records import ForgetIterations, IterationRows, JobRecord, OfferRecord
from perseus.service.domain.specification import (
    Coordinates,
    ExplicitSchedule,
    JobSpec,
    OperatingPolicy,
    Parallelism,
)
from perseus.service.domain.stall import Stall, StallReason
from perseus.service.domain.telemetry import IterationColumns
from perseus.service.job.machine import JobMachine
from perseus.service.job.rules import Rules
from perseus.service.storage.sqlite_store import SqliteStore
from perseus.service.storage.store import Entry, JobEntry, JobStore, NewJob, TelemetrySequence
from perseus.solver import Computation, Kind
from tests.service.service_fakes import EPOCH, Cluster, make_gpu, make_spec

Open = Callable[[], Awaitable[JobStore]]


@pytest.fixture(params=["sqlite"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same store every time."""

    async def open_sqlite() -> JobStore:
        return await SqliteStore.open(tmp_path / "jobs.db")

    return {"sqlite": open_sqlite}[request.param]


RECORD = JobRecord(
    OperatingPolicy(3.5),
    JobState.PLANNED,
    "the frontier is solved",
    9,
    StockIteration(0.1 + 0.2, 1 / 3),
    True,
    (Straggler(0, None, 1.3),),
    0.7e-3,
    ProfilingCost(17, 13.5, 1 / 3, 1e6, -0.5),
    (
        GivenUpClock(1, 1200, ClockGivenUpReason.NO_ENERGY, Coordinates(0, 1, 0)),
        GivenUpClock(0, 1300, ClockGivenUpReason.DISTURBED, None),
    ),
    Stall(StallReason.RANK_MISSING, Coordinates(1, 0, 0), 2, 1.7e9, 12),
    1e9 / 7,
)


def rows(rank: Coordinates, iterations: list[int], closed_through: int) -> IterationRows:
    count = len(iterations)
    columns = IterationColumns(
        np.array(iterations),
        np.full(count, 4),
        np.full(count, 1 / 3),
        np.full(count, 2 / 3),
        np.full(count, True),
        np.zeros(count, np.int64),
    )
    return IterationRows(rank, columns, closed_through)


async def test_the_epoch_stays_when_the_store_is_opened_again(open_store: Open) -> None:
    store = await open_store()
    epoch = await store.epoch()
    await store.close()
    again = await open_store()
    assert await again.epoch() == epoch
    assert epoch
    await again.close()


async def test_a_whole_job_comes_back_as_it_was_written(open_store: Open) -> None:
    cluster = Cluster(make_spec())
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(3)
    entries: list[Entry] = [NewJob(cluster.spec, 12.5)]
    for command in cluster.history:
        if isinstance(command, Store):
            entries.append(JobEntry("job", command.record))
        elif isinstance(command, Announce):
            entries.append(JobEvent("job", 13.5, command.happening))
    store = await open_store()
    await store.write(entries)
    await store.close()

    store = await open_store()
    (stored,) = await store.load_jobs()
    expected = replace(cluster.stored(), create_time_s=12.5)
    assert replace(stored, open_rows=()) == replace(expected, open_rows=())
    assert stored.open_rows == ()
    assert await store.events("job", 0, 10_000) == [entry for entry in entries if isinstance(entry, JobEvent)]
    machine, commands = JobMachine.restore(stored, Rules(), EPOCH, now_s=0.0, wall_time_s=14.5)
    machine.validate()
    assert len(commands) == 2  # The record as it is, and the problem to solve.
    await store.close()


async def test_an_explicit_schedule_and_all_kinds_come_back(open_store: Open) -> None:
    order = (
        Computation(0, Kind.FIXED, 0),
        Computation(0, Kind.FORWARD, 0),
        Computation(0, Kind.BACKWARD_INPUT, 0),
        Computation(0, Kind.BACKWARD_WEIGHT, 0),
    )
    spec = JobSpec("job", Parallelism(1, 1, 1), ExplicitSchedule((order,)), OperatingPolicy(2.5))
    store = await open_store()
    await store.write([NewJob(spec, 1.0)])
    (stored,) = await store.load_jobs()
    assert stored.spec == spec
    assert stored.record is None
    await store.close()


async def test_a_later_entry_replaces_one_of_the_same_key(open_store: Open) -> None:
    store = await open_store()
    rank = Rank(
        Coordinates(0, 1, 0), RankState.CONNECTED, "a", "host", make_gpu(Coordinates(0, 1, 0)), 3, 2, 17
    )
    await store.write(
        [
            NewJob(make_spec(), 1.0),
            JobEntry("job", RECORD),
            JobEntry("job", rank),
            JobEntry("job", OfferRecord(1, PipelineOffer((3, 2), 20, HoldClocks((1200, 0))))),
        ]
    )
    newer = replace(
        rank, state=RankState.LOST, in_force_version=-1, refused_clocks_mhz=(1200,), is_stock_only=True
    )
    await store.write(
        [
            JobEntry("job", replace(RECORD, version=10)),
            JobEntry("job", newer),
            JobEntry("job", OfferRecord(1, PipelineOffer((4, 3), 22, STOCK))),
        ]
    )
    (stored,) = await store.load_jobs()
    assert stored.record == replace(RECORD, version=10)
    assert stored.ranks == (newer,)
    assert stored.offers == (OfferRecord(1, PipelineOffer((4, 3), 22, STOCK)),)
    await store.close()


async def test_jobs_do_not_see_each_others_entries(open_store: Open) -> None:
    store = await open_store()
    event = Happening(1, EventType.REGISTERED, "registered", Registered(Parallelism(1, 1, 1)))
    await store.write(
        [
            NewJob(make_spec("b"), 1.0),
            NewJob(make_spec("a"), 2.0),
            JobEntry("b", RECORD),
            JobEntry("b", rows(Coordinates(0, 0, 0), [1], -1)),
            JobEvent("b", 1.0, event),
        ]
    )
    first, second = await store.load_jobs()
    assert (first.spec.job_id, first.record, first.open_rows, first.last_sequence) == ("a", None, (), 0)
    assert (second.spec.job_id, second.record, second.last_sequence) == ("b", RECORD, 1)
    await store.close()


async def test_rows_of_open_iterations_stay_until_they_are_closed_or_forgotten(open_store: Open) -> None:
    store = await open_store()
    first, second = Coordinates(0, 0, 0), Coordinates(0, 1, 0)

    async def open_iterations() -> list[tuple[Coordinates, int]]:
        (stored,) = await store.load_jobs()
        return [(row.rank, int(row.rows.iteration[0])) for row in stored.open_rows]

    await store.write([NewJob(make_spec(), 1.0), JobEntry("job", rows(first, [5, 6], -1))])
    assert await open_iterations() == [(first, 5), (first, 6)]
    await store.write([JobEntry("job", rows(second, [5], 5))])
    assert await open_iterations() == [(first, 6)]
    (stored,) = await store.load_jobs()
    (row,) = stored.open_rows
    assert (row.rows.duration_s[0], row.rows.energy_j[0], row.rows.plan_version[0]) == (1 / 3, 2 / 3, 4)
    await store.write([JobEntry("job", ForgetIterations())])
    assert await open_iterations() == []
    await store.close()


async def test_the_telemetry_sequence_is_kept_per_instance(open_store: Open) -> None:
    store = await open_store()
    assert await store.telemetry_sequence("a") == 0
    await store.write([TelemetrySequence("a", 7), TelemetrySequence("b", 2)])
    await store.write([TelemetrySequence("a", 8)])
    assert (await store.telemetry_sequence("a"), await store.telemetry_sequence("b")) == (8, 2)
    await store.close()


async def test_a_write_that_fails_leaves_nothing_behind(open_store: Open) -> None:
    store = await open_store()
    await store.write([NewJob(make_spec(), 1.0)])
    with pytest.raises(Exception, match=r"(?i)unique"):
        await store.write([TelemetrySequence("a", 7), NewJob(make_spec(), 2.0)])
    assert await store.telemetry_sequence("a") == 0
    await store.write([TelemetrySequence("a", 1)])
    assert await store.telemetry_sequence("a") == 1
    await store.close()


async def test_a_database_in_use_is_refused(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "jobs.db")
    with pytest.raises(DatabaseUnavailableError, match="locked"):
        await SqliteStore.open(tmp_path / "jobs.db")
    await store.close()


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    path.write_text("something else " * 100)
    with pytest.raises(DatabaseUnavailableError, match=str(path)):
        await SqliteStore.open(path)
    assert path.read_text().startswith("something else")


async def test_a_database_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(DatabaseUnavailableError, match="found 99"):
        await SqliteStore.open(path)
