"""Stored events: they come back as they were, and pages are found along indexes. Of any store."""

import asyncio
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.messages import time_from_proto, time_to_proto
from perseus.service.domain.model import ALL_EVENTS, EventFilter
from perseus.service.storage.reading import events_query
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import Entry, EventEntry, NewRun
from perseus.v1 import event_pb2
from perseus.v1.event_pb2 import JobEvent
from tests.service.service_fakes import make_spec
from tests.service.storage.stores import execute, fill, opened

ALL = 10_000
JOB_NUMBERS = count()


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqlStore]:
    """One store for all examples, each of which has its own jobs."""
    database: Path | str = tmp_path_factory.mktemp("events") / "jobs.db"
    if request.param == "postgresql":
        database = request.getfixturevalue("postgresql_server").new_database()

    async def open_it() -> SqlStore:
        store = await SqlStore.open(database)
        await store.write([])
        await store.run_numbers("job")  # starts its threads here, and not in a test
        return store

    opened = asyncio.run(open_it())
    yield opened
    asyncio.run(opened.close())


def entries(job_id: str, run_number: int, found: Sequence[JobEvent]) -> list[Entry]:
    run = NewRun(make_spec(job_id), run_number, 1.0)
    return [run, *(EventEntry(job_id, run_number, event) for event in found)]


TIME = time_to_proto(1.7e9 + 1 / 3)

KNOWN = [
    JobEvent(sequence=1, create_time=TIME, type=event_pb2.JOB_EVENT_TYPE_RESUMED, message="a \0 sign"),
    JobEvent(
        sequence=2,
        create_time=TIME,
        type=event_pb2.JOB_EVENT_TYPE_SOLVED,
        solved=event_pb2.Solved(t_min_s=1 / 3, t_slow_s=float("inf")),
    ),
    JobEvent(
        sequence=3,
        create_time=TIME,
        type=event_pb2.JOB_EVENT_TYPE_PLAN_OFFERED,
        pipeline_clocks=event_pb2.PipelineClocks(stock=event_pb2.StockStages()),
    ),
]
LATER_TYPE: Any = 1_000
LATER_DETAILS = b"\x82\x3f\x03abc"
"""A field of number 1008, which this version does not know."""


async def test_events_are_read_back_unchanged_even_of_a_later_version(store: SqlStore) -> None:
    job_id = f"job-{next(JOB_NUMBERS)}"
    later = JobEvent(sequence=4, create_time=TIME, message="new", type=LATER_TYPE)
    written = [*KNOWN, JobEvent.FromString(later.SerializeToString() + LATER_DETAILS)]

    async def read(wanted: EventFilter) -> list[bytes]:
        found = await store.events(job_id, 1, 0, ALL, wanted)
        return [event.SerializeToString() for event in found]

    await store.write(entries(job_id, 1, written))
    assert await read(ALL_EVENTS) == [event.SerializeToString() for event in written]
    assert (await read(ALL_EVENTS))[-1].endswith(LATER_DETAILS)
    of_later_type = EventFilter([LATER_TYPE], start_time_s=1.7e9)
    assert await read(of_later_type) == [written[-1].SerializeToString()]


async def test_an_unreadable_event_is_listed_with_its_known_parts(path: Path) -> None:
    await fill(path, *entries("job", 1, KNOWN))
    execute(path, "UPDATE events SET event = x'ff' WHERE sequence = 2")
    solved = JobEvent(sequence=2, create_time=TIME, type=event_pb2.JOB_EVENT_TYPE_SOLVED)
    async with opened(path) as store:
        assert await store.events("job", 1, 0, ALL) == [KNOWN[0], solved, KNOWN[2]]


TYPES = (
    event_pb2.JOB_EVENT_TYPE_SOLVE_FAILED,
    event_pb2.JOB_EVENT_TYPE_STATE_CHANGED,
    event_pb2.JOB_EVENT_TYPE_RANK_CHANGED,
)
EVENTS = st.lists(st.tuples(st.sampled_from([*TYPES, None]), st.integers(0, 5)), max_size=30).map(
    lambda drawn: [
        JobEvent(sequence=n, type=kind, create_time=time_to_proto(time_s))
        for n, (kind, time_s) in enumerate(drawn, 1)
        if kind is not None  # it was deleted
    ]
)
FILTERS = st.builds(
    EventFilter,
    st.frozensets(st.sampled_from(TYPES)),
    st.none() | st.integers(0, 6).map(float),
    st.none() | st.integers(0, 6).map(float),
    st.booleans(),
)


@given(EVENTS, FILTERS, st.integers(1, 7), st.integers(0, 30))
def test_pages_contain_the_wanted_events_in_order_even_if_the_clock_was_set_back(
    store: SqlStore, drawn: list[JobEvent], wanted: EventFilter, limit: int, after_sequence: int
) -> None:
    def is_wanted(event: JobEvent) -> bool:
        time_s = time_from_proto("create_time", event.create_time)
        is_beyond = event.sequence > after_sequence
        if wanted.is_latest_first and after_sequence:
            is_beyond = event.sequence < after_sequence
        return (
            is_beyond
            and (not wanted.types or event.type in wanted.types)
            and (wanted.start_time_s is None or time_s >= wanted.start_time_s)
            and (wanted.end_time_s is None or time_s < wanted.end_time_s)
        )

    job_id, other_id = (f"job-{next(JOB_NUMBERS)}" for _ in range(2))

    async def read_pages() -> list[JobEvent]:
        for name, number in ((job_id, 1), (other_id, 1), (job_id, 2)):
            await store.write(entries(name, number, drawn))
        found: list[JobEvent] = []
        after = after_sequence
        while page := await store.events(job_id, 1, after, limit, wanted):
            assert len(page) <= limit
            found += page
            after = page[-1].sequence
        return found

    expected = [event for event in drawn if is_wanted(event)]
    assert asyncio.run(read_pages()) == (expected[::-1] if wanted.is_latest_first else expected)


@pytest.mark.parametrize("is_latest_first", [False, True])
@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        (EventFilter(), "PRIMARY KEY"),
        (EventFilter(frozenset(TYPES)), "INDEX events_by_type"),
        (EventFilter(frozenset(TYPES), start_time_s=3.0, end_time_s=4.0), "COVERING INDEX events_by_time"),
        (EventFilter(start_time_s=3.0), "COVERING INDEX events_by_time"),
    ],
)
def test_no_page_is_found_by_a_scan_of_all_events(
    path: Path, wanted: EventFilter, index: str, is_latest_first: bool
) -> None:
    asyncio.run(fill(path))
    wanted = replace(wanted, is_latest_first=is_latest_first)
    statement, values = events_query("job", 1, 0, 10, wanted, has_index_hints=True)
    with closing(sqlite3.connect(path)) as connection:
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", values)]
    assert any(index in step for step in plan), plan
    assert not any("SCAN" in step or "TEMP B-TREE" in step for step in plan), plan
