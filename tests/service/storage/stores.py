"""Stores that are closed again, what is in them, and the members of a fleet that hold slots."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg

from perseus.service.domain.commands import Announce, Store
from perseus.service.domain.members import Slot
from perseus.service.domain.model import JobState
from perseus.service.domain.records import StoredJob
from perseus.service.storage.membership import MemberRows
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import Entry, EventEntry, JobEntry, NewRun
from perseus.v1.event_pb2 import JobEvent
from tests.service.service_fakes import Cluster, make_spec

LEASE_S = 30.0


@asynccontextmanager
async def opened(database: Path | str, **options: Any) -> AsyncIterator[SqlStore]:
    store = await SqlStore.open(database, **options)
    try:
        yield store
    finally:
        await store.close()


async def fill(database: Path | str, *entries: Entry) -> str:
    """Write entries at once, and close the store; return the commit marker."""
    async with opened(database) as store:
        await store.write(entries)
        return store.commit_marker


def execute(database: Path | str, *statements: str) -> None:
    """Change a database behind its store."""
    if isinstance(database, Path):
        with closing(sqlite3.connect(database)) as connection:
            connection.executescript("".join(statements))
        return
    with psycopg.connect(database, autocommit=True) as session:
        for statement in statements:
            session.execute(statement.encode())


def event(number: int, length: int = 1) -> EventEntry:
    return EventEntry("job", 1, JobEvent(sequence=number, message="x" * length))


def planned_cluster(microbatches: int = 3) -> Cluster:
    cluster = Cluster(make_spec(microbatches=microbatches))
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(3)
    return cluster


def entries_of(cluster: Cluster, job_id: str = "job") -> list[Entry]:
    """What a cluster's job has written since it began, as if its name were another."""
    entries: list[Entry] = [NewRun(replace(cluster.spec, job_id=job_id), 1, 12.5)]
    for command in cluster.history:
        if isinstance(command, Store):
            entries.append(JobEntry(job_id, 1, command.record))
        elif isinstance(command, Announce):
            entries.append(EventEntry(job_id, 1, command.event))
    return entries


async def stored_jobs(store: SqlStore) -> list[StoredJob]:
    return [job for job in await store.load_jobs() if isinstance(job, StoredJob)]


async def stored_run(store: SqlStore, job_id: str = "job", run_number: int = 1) -> StoredJob:
    run = await store.load_run(job_id, run_number)
    assert isinstance(run, StoredJob)
    return run


@dataclass
class Slots:
    """Members of a fleet, each of which holds a slot, and their stores, by slot."""

    members: list[MemberRows] = field(default_factory=list)
    stores: list[SqlStore] = field(default_factory=list)


@asynccontextmanager
async def held_slots(url: str, count: int = 2) -> AsyncIterator[Slots]:
    """Let as many members join, and take a slot each."""
    async with AsyncExitStack() as stack:
        slots = Slots()
        for number in range(count):
            member = stack.enter_context(closing(await asyncio.to_thread(MemberRows, url, LEASE_S, count)))
            await asyncio.to_thread(member.join, "", "")
            assert member.take(number, 0) == 1
            slots.members.append(member)
            store = opened(url, fence=Slot(number, member.member_id, 1))
            slots.stores.append(await stack.enter_async_context(store))
        yield slots
