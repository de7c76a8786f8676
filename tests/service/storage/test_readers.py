"""Readers and the writer of one database: neither waits for the other."""

import asyncio
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, delete, func, select

from perseus.service.domain.errors import DatabaseUnreadableError
from perseus.service.storage import engines, schema, sql_store
from perseus.service.storage.checking import check_database
from perseus.service.storage.engines import Opened
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import NewRun
from tests.service.service_fakes import make_spec
from tests.service.storage.stores import event


def event_count(connection: Connection) -> int:
    return connection.scalar(select(func.count()).select_from(schema.events)) or 0


async def test_a_long_read_sees_one_state_and_delays_no_commit(store: SqlStore) -> None:
    await store.write([NewRun(make_spec(), 1, 1.0), event(1)])
    has_begun, may_end = threading.Event(), threading.Event()

    def slow(connection: Connection) -> tuple[int, int]:
        before = event_count(connection)
        has_begun.set()
        assert may_end.wait(10)
        return before, event_count(connection)

    reading = asyncio.ensure_future(store._read(slow))
    await asyncio.to_thread(has_begun.wait, 10)
    for number in range(2, 12):
        await store.write([event(number)])
    assert not reading.done()
    may_end.set()
    assert await reading == (1, 1)
    assert await store._read(event_count) == 11, "the next read sees what was committed"


async def test_a_reader_writes_nothing(store: SqlStore) -> None:
    await store.write([NewRun(make_spec(), 1, 1.0)])
    with pytest.raises(DatabaseUnreadableError) as caught:
        await store._read(lambda connection: connection.execute(delete(schema.runs)))
    assert "only" in str(caught.value.__cause__)
    assert await store.run_numbers("job") == [1]


def read_until(has_begun: threading.Event, is_written: threading.Event, connection: Connection) -> None:
    event_count(connection)
    has_begun.set()
    is_written.wait(0.1)  # times out where commits take turns with readers


async def test_overlapping_readers_do_not_let_the_log_grow_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_bytes = 5 * 2**20  # the log is written back from 4 MB on
    monkeypatch.setattr(engines, "LONG_LOG_BYTES", limit_bytes)
    store = await SqlStore.open(tmp_path / "jobs.db")
    await store.write([NewRun(make_spec(), 1, 1.0)])
    log = tmp_path / "jobs.db-wal"
    sizes: list[int] = []

    for number in range(1, 25):
        has_begun, is_written = threading.Event(), threading.Event()
        reading = asyncio.ensure_future(store._read(partial(read_until, has_begun, is_written)))
        await asyncio.to_thread(has_begun.wait, 10)
        await store.write([event(number, 500_000)])
        is_written.set()
        await reading
        sizes.append(log.stat().st_size)
    await store.close()
    assert max(sizes) < 2 * limit_bytes


async def test_a_database_in_use_can_be_checked(store: SqlStore, database: Path | str) -> None:
    await store.write([NewRun(make_spec(), 1, 1.0)])
    assert await asyncio.to_thread(check_database, database) == []
    await store.write([event(1)])


async def test_the_writing_connection_closes_after_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite writes its log back where nobody else is closing: who copies the file then copies all of it.

    How long that takes has no limit.
    """
    monkeypatch.setattr(sql_store, "CLOSE_LIMIT_S", 0.05)
    store = await SqlStore.open(tmp_path / "jobs.db")
    await store.write([NewRun(make_spec(), 1, 1.0)])
    order: list[str] = []

    def slowly(name: str, connection: Opened) -> Opened:
        def close() -> None:
            threading.Event().wait(0.2)  # the writing connection could close meanwhile
            connection.close()
            order.append(name)

        return replace(connection, close=close)

    store._reader, store._opened = slowly("reader", store._reader), slowly("writer", store._opened)
    await store.close()
    assert order == ["reader", "writer"]
    assert not (tmp_path / "jobs.db-wal").exists()
