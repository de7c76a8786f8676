"""Pruning deletes in small steps; reports, adoptable profiles and the numbers of events stay."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event

from perseus.service.domain.measured import StageProfile
from perseus.service.domain.messages import time_to_proto
from perseus.service.domain.model import STOCK, JobState, PipelineOffer, Rank
from perseus.service.domain.records import (
    EndedRun,
    OfferRecord,
    ProfiledWork,
    RecordedInputs,
    Registrations,
    StoredJob,
)
from perseus.service.domain.retention import DAY_S, Retention
from perseus.service.domain.snapshot import RunSnapshot
from perseus.service.domain.specification import Coordinates, Registration
from perseus.service.storage.checking import check_database, recordings
from perseus.service.storage.pruning import STEP_ROWS
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import Entry, EventEntry, JobDeleted, JobEntry, NewRun, TelemetrySequence
from perseus.solver import Kind, Measurement
from perseus.v1 import event_pb2, job_pb2
from tests.service.service_fakes import make_spec
from tests.service.storage.stores import opened, stored_jobs, stored_run
from tests.service.storage.test_store import PERIOD, RECORD, rows

NOW_S = 1_000 * DAY_S


def events(job_id: str, count: int, time_s: float, first: int = 1) -> list[EventEntry]:
    return [
        EventEntry(job_id, 1, event_pb2.JobEvent(sequence=n, create_time=time_to_proto(time_s)))
        for n in range(first, first + count)
    ]


async def prune(store: SqlStore, retention: Retention, now_s: float = NOW_S) -> list[tuple[str, int]]:
    """Do a whole round; none of its steps deletes more than it may."""
    archived: list[tuple[str, int]] = []
    while not (pruned := await store.prune(retention, now_s)).is_done:
        assert pruned.row_count <= STEP_ROWS
        archived += pruned.archived
    return archived


def finished(job_id: str, finish_time_s: float, key: str = "") -> list[Entry]:
    """A job that has ended, with something in every table."""
    place = Coordinates(0, 0, 0)
    measured = {(0, Kind.FORWARD): Measurement(1200, 0.1, 10.0)}
    entries: list[Entry] = [
        NewRun(make_spec(job_id), 1, finish_time_s - 10),
        JobEntry(job_id, 1, replace(RECORD, state=JobState.FINISHED, finish_time_s=finish_time_s)),
        JobEntry(job_id, 1, EndedRun(job_pb2.Job(job_id=job_id))),
        JobEntry(job_id, 1, Registrations((Registration("request"),))),
        JobEntry(job_id, 1, Rank(place)),
        JobEntry(job_id, 1, OfferRecord(0, PipelineOffer((3, 2), 20, STOCK))),
        JobEntry(job_id, 1, StageProfile(0, 1200, measured, 60.0, 0.5)),
        JobEntry(job_id, 1, StageProfile(1, 1200, measured, 60.0, 0.5)),
        JobEntry(job_id, 1, PERIOD),
        JobEntry(job_id, 1, rows(place, [1], -1)),
        *events(job_id, 3, finish_time_s),
    ]
    return [*entries, JobEntry(job_id, 1, ProfiledWork(0, key))] if key else entries


@pytest.fixture
async def store(database: Path | str) -> AsyncIterator[SqlStore]:
    async with opened(database, clock=lambda: NOW_S) as store:
        yield store


async def test_events_are_pruned_by_age_and_count_except_the_last(store: SqlStore) -> None:
    await store.write(
        [
            *(NewRun(make_spec(job_id), 1, 1.0) for job_id in ("many", "new", "old")),
            *events("many", 1200, NOW_S),
            *events("old", 700, NOW_S - 3 * DAY_S),
            *events("new", 5, NOW_S - 3 * DAY_S),
            *events("new", 5, NOW_S - DAY_S, first=6),
        ]
    )
    await prune(store, Retention(keep_events_days=2, keep_event_count=100))

    async def left(job_id: str) -> list[int]:
        return [event.sequence for event in await store.events(job_id, 1, 0, 10_000)]

    assert await left("many") == list(range(1101, 1201))
    assert await left("new") == list(range(6, 11))
    assert await left("old") == [700]  # later numbers continue from it
    assert [job.last_sequence for job in await stored_jobs(store)] == [1200, 10, 700]


async def test_an_archived_run_keeps_its_report_and_adoptable_profiles(
    store: SqlStore, database: Path | str
) -> None:
    long_ago_s = NOW_S - 100 * DAY_S
    await store.write(
        [
            *finished("superseded", long_ago_s - 100, key="work"),
            *finished("old", long_ago_s, key="work"),
            *finished("young", NOW_S - DAY_S),
            NewRun(make_spec("live"), 1, long_ago_s),
            JobEntry("live", 1, replace(RECORD, finish_time_s=None)),
            *events("live", 3, long_ago_s),
        ]
    )
    profile = (await store.known_profiles(["work"]))[0]
    assert sorted(await prune(store, Retention())) == [("old", 1), ("superseded", 1)]
    assert await prune(store, Retention()) == []

    live, young = await store.load_jobs()
    assert isinstance(live, StoredJob)
    assert live.spec.job_id == "live"
    assert isinstance(young, RunSnapshot)
    assert young.job.job_id == "young"
    assert sorted(await store.known_requests()) == ["young"]
    old = await stored_run(store, "old")
    assert (old.periods, old.record and old.record.version) == ((PERIOD,), RECORD.version)
    assert (old.ranks, old.offers, old.open_rows) == ((), (), ())
    assert [profile.stage for profile in old.profiles] == [0]
    assert old.last_sequence == 3
    assert await store.load_periods("old", 1) == [PERIOD]
    ended = await store.load_ended_run("old", 1)
    assert isinstance(ended, RunSnapshot)
    assert ended.job.job_id == "old"
    assert (await stored_run(store, "superseded")).profiles == ()
    assert list(await store.known_profiles(["work"])) == [profile]
    assert await asyncio.to_thread(check_database, database) == []


async def test_a_runs_recorded_inputs_are_kept_until_it_is_archived_or_deleted(
    store: SqlStore, database: Path | str
) -> None:
    entries: list[Entry] = []
    for job_id, finish_time_s in (("deleted", NOW_S), ("kept", NOW_S), ("old", NOW_S - 100 * DAY_S)):
        entries += finished(job_id, finish_time_s)
        entries += [JobEntry(job_id, 1, RecordedInputs(text)) for text in ("first", "latest")]
    await store.write([*entries, JobDeleted("deleted", 0)])
    await prune(store, Retention())
    for job_id, recorded in (("deleted", {}), ("kept", {1: "latest"}), ("old", {})):
        assert await asyncio.to_thread(recordings, database, job_id) == recorded


async def test_the_latest_of_many_ended_runs_are_kept(store: SqlStore) -> None:
    entries: list[Entry] = []
    for number in range(5):
        entries += finished(f"job-{number}", NOW_S - number)
    await store.write(entries)
    assert await prune(store, Retention(keep_finished_count=2)) == [("job-2", 1), ("job-3", 1), ("job-4", 1)]


async def written_by_steps(store: SqlStore, retention: Retention) -> tuple[int, int]:
    """Do a whole round; return how many steps it took, and the most statements of one on the writer."""
    counts = [0]

    def count(*_: object) -> None:
        counts[-1] += 1

    event.listen(engine := store._connection.engine, "before_cursor_execute", count)
    while not (await store.prune(retention, NOW_S)).is_done:
        counts.append(0)
    event.remove(engine, "before_cursor_execute", count)
    return len(counts), max(counts)


@pytest.mark.parametrize("run_count", [10, 60])
async def test_the_writer_does_one_statement_a_step_however_many_runs_are_due_and_none_for_others(
    store: SqlStore, run_count: int
) -> None:
    for number in range(run_count):
        await store.write([*finished(f"new-{number}", NOW_S), TelemetrySequence(f"agent-{number}", 1)])
    assert await written_by_steps(store, Retention()) == (1, 0)
    for number in range(run_count):
        old = finished(f"old-{number}", NOW_S - 100 * DAY_S, key=f"work-{number % 3}")
        kept = NewRun(make_spec(f"kept-{number}"), 1, 1.0)
        await store.write([*old, kept, *events(f"kept-{number}", 3, 1.0)])
    retention = Retention(keep_telemetry_count=1)
    _, statement_count = await written_by_steps(store, retention)
    assert statement_count == 1
    assert await written_by_steps(store, retention) == (1, 0), "nothing is left"


async def test_a_new_job_of_the_name_of_one_that_was_due_is_left_alone(
    store: SqlStore, database: Path | str
) -> None:
    """It may be created between two steps."""
    await store.write([*finished("old", NOW_S - 100 * DAY_S), *finished("job", NOW_S - 200 * DAY_S)])
    while ("old", 1) not in (await store.prune(Retention(), NOW_S)).archived:
        pass
    await store.write([JobDeleted("job", 0), *finished("job", NOW_S)])
    assert await prune(store, Retention()) == []
    assert await prune(store, Retention()) == []
    job = await stored_run(store)
    assert (len(job.ranks), len(job.offers), job.last_sequence) == (1, 1, 3)
    assert len(await store.events("job", 1, 0, 10)) == 3
    assert await asyncio.to_thread(check_database, database) == []


async def test_agents_are_pruned_by_age_and_count(database: Path | str) -> None:
    now_s = 0.0
    async with opened(database, clock=lambda: now_s) as store:
        for now_s in (1.0, 2.0, 3.0, 4.0):
            agent = TelemetrySequence(f"agent-{now_s:.0f}", 7)
            await store.write([agent, TelemetrySequence("busy", int(now_s))])

        async def known() -> list[int]:
            names = ["busy", *(f"agent-{number}" for number in (1, 2, 3, 4))]
            return [await store.telemetry_sequence(name) for name in names]

        await prune(store, Retention(keep_telemetry_days=2.5 / DAY_S), now_s=4.0)
        assert await known() == [4, 0, 7, 7, 7]
        await prune(store, Retention(keep_telemetry_days=100 / DAY_S, keep_telemetry_count=2), now_s=4.0)
        assert (await known()).count(0) == 3
        assert await known() in ([4, 0, 0, 0, 7], [4, 0, 0, 7, 0])


async def test_the_file_stops_growing_when_rows_are_deleted_as_fast_as_written(path: Path) -> None:
    sizes = []
    async with opened(path) as store:
        await store.write([NewRun(make_spec(), 1, 1.0)])
        for number in range(12):
            await store.write(events("job", 1000, NOW_S, first=1 + 1000 * number))
            await prune(store, Retention(keep_event_count=2000))
            sizes.append(os.path.getsize(path))  # noqa: ASYNC240
    assert sizes[-1] <= 1.1 * max(sizes[3:6])


@given(st.lists(st.floats(0, 100), max_size=30), st.integers(0, 10), st.floats(1, 50))
def test_a_run_is_due_if_it_is_old_or_enough_runs_have_ended_after_it(
    times_s: list[float], count: int, age_s: float
) -> None:
    retention = Retention(keep_finished_count=count, keep_finished_days=age_s / DAY_S)
    latest_first = sorted(times_s, reverse=True)
    kept = [t for n, t in enumerate(latest_first) if not retention.is_run_due(t, n, now_s=100.0)]
    assert len(kept) <= count
    assert all(t >= 100.0 - age_s for t in kept)
    assert kept == latest_first[: len(kept)]
