"""Stored events: the evidence comes back as it was, and pages are found along indexes. Of any store."""

import asyncio
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.events import EventFilter, Happening, JobEvent
from perseus.service.domain.evidence import SolveFailed
from perseus.service.domain.model import EventType
from perseus.service.storage.reading import events_query
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import NewRun
from tests.service.evidence_strategies import events
from tests.service.service_fakes import make_spec

ALL = 10_000


JOB_NUMBERS = count()


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqlStore]:
    """One for all examples, each of which has jobs of its own."""
    database: Path | str = tmp_path_factory.mktemp("events") / "jobs.db"
    if request.param == "postgresql":
        database = request.getfixturevalue("postgresql_server").new_database()
    opened = asyncio.run(SqlStore.open(database))
    yield opened
    asyncio.run(opened.close())


def of_job(job_id: str, found: Sequence[JobEvent]) -> list[JobEvent]:
    return [replace(event, job_id=job_id, run_number=1) for event in found]


def numbered(found: Sequence[JobEvent]) -> list[JobEvent]:
    return [
        replace(event, happening=replace(event.happening, sequence=n))
        for n, event in zip(count(1), found, strict=False)
    ]


@given(st.tuples(*map(events, EventType)))
def test_evidence_of_every_type_comes_back_as_it_was(store: SqlStore, drawn: tuple[JobEvent, ...]) -> None:
    job_id = f"job-{next(JOB_NUMBERS)}"
    written = of_job(job_id, numbered(drawn))

    async def write_and_read() -> list[JobEvent]:
        await store.write([NewRun(make_spec(job_id), 1, 1.0), *written])
        return await store.events(job_id, 1, 0, ALL)

    assert asyncio.run(write_and_read()) == written


TYPES = (EventType.SOLVE_FAILED, EventType.STATE_CHANGED, EventType.RANK_CHANGED)
EVENTS = st.lists(
    st.builds(
        lambda kind, time_s: JobEvent("job", 1, time_s, Happening(1, kind, "", None)),
        st.sampled_from(TYPES),
        st.integers(0, 5).map(float),
    ),
    max_size=30,
).map(numbered)
FILTERS = st.builds(
    EventFilter,
    st.frozensets(st.sampled_from(TYPES)),
    st.none() | st.integers(0, 6).map(float),
    st.none() | st.integers(0, 6).map(float),
)


@given(EVENTS, FILTERS, st.integers(1, 7), st.integers(0, 30))
def test_pages_hold_what_is_wanted_in_order_wherever_the_clock_was(
    store: SqlStore, drawn: list[JobEvent], wanted: EventFilter, limit: int, after_sequence: int
) -> None:
    def is_wanted(event: JobEvent) -> bool:
        return (
            event.happening.sequence > after_sequence
            and (not wanted.types or event.happening.type in wanted.types)
            and (wanted.start_time_s is None or event.create_time_s >= wanted.start_time_s)
            and (wanted.end_time_s is None or event.create_time_s < wanted.end_time_s)
        )

    job_id, other_id = (f"job-{next(JOB_NUMBERS)}" for _ in range(2))
    written = of_job(job_id, drawn)

    async def read_pages() -> list[JobEvent]:
        other = [replace(event, job_id=other_id) for event in written]
        next_run = [replace(event, run_number=2) for event in written]
        runs = [NewRun(make_spec(name), n, 1.0) for name, n in ((job_id, 1), (other_id, 1), (job_id, 2))]
        await store.write([*runs, *written, *other, *next_run])
        found: list[JobEvent] = []
        after = after_sequence
        while page := await store.events(job_id, 1, after, limit, wanted):
            assert len(page) <= limit
            found += page
            after = page[-1].happening.sequence
        return found

    assert asyncio.run(read_pages()) == [event for event in written if is_wanted(event)]


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        (EventFilter(), "PRIMARY KEY"),
        (EventFilter(frozenset(TYPES)), "INDEX events_by_type"),
        (EventFilter(frozenset(TYPES), start_time_s=3.0, end_time_s=4.0), "COVERING INDEX events_by_time"),
        (EventFilter(start_time_s=3.0), "COVERING INDEX events_by_time"),
    ],
)
async def test_no_page_is_looked_for_among_all_events(
    tmp_path: Path, wanted: EventFilter, index: str
) -> None:
    await (await SqlStore.open(tmp_path / "jobs.db")).close()
    connection = sqlite3.connect(tmp_path / "jobs.db")
    statement, values = events_query("job", 1, 0, 10, wanted, has_index_hints=True)
    plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", values)]
    connection.close()
    assert any(index in step for step in plan), plan
    assert not any("SCAN" in step or "TEMP B-TREE" in step for step in plan), plan


async def test_deleted_events_leave_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    failed = SolveFailed("no")
    written = [JobEvent("job", 1, 1.0, Happening(n, EventType.SOLVE_FAILED, "", failed)) for n in range(1, 7)]
    store = await SqlStore.open(path)
    await store.write([NewRun(make_spec(), 1, 1.0), *written])
    await store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM events WHERE sequence IN (1, 4, 5)")
    connection.close()
    store = await SqlStore.open(path)
    assert [event.happening.sequence for event in await store.events("job", 1, 0, ALL)] == [2, 3, 6]
    await store.close()
