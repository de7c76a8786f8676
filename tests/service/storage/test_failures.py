"""Databases that fail under a running store: it reports that, in one line, and guarantees nothing more."""

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from perseus.service.domain.errors import (
    DatabaseUnavailableError,
    DatabaseUnreadableError,
    StoreFailedError,
)
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import NewRun, TelemetrySequence
from tests.service.service_fakes import make_spec
from tests.service.storage.postgresql import Server
from tests.service.storage.stores import event, execute, fill, opened


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A separate file system of one megabyte."""
    folder = Path(tempfile.mkdtemp(prefix="perseus-disk-"))
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "perseus-test", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        folder.rmdir()
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


async def write_on(store: SqlStore, problem: str = "") -> int:
    """Write event after event until the store fails; return how many were acknowledged."""
    acknowledged = 0

    async def write() -> None:
        nonlocal acknowledged
        for acknowledged in range(1000):
            await store.write([event(1 + acknowledged, 20_000)])

    await store.write([NewRun(make_spec(), 1, 1.0)])
    with pytest.raises(StoreFailedError, match=rf"jobs\.db failed: {problem}") as caught:
        await write()
    assert "\n" not in str(caught.value)
    return acknowledged


async def test_a_full_disk_ends_the_store_and_acknowledged_writes_stay(
    small_disk: Path, tmp_path: Path
) -> None:
    async with opened(small_disk / "jobs.db") as store:
        count = await write_on(store, "the disk is full")
    assert count > 3
    shutil.copytree(small_disk, tmp_path / "roomy")
    async with opened(tmp_path / "roomy" / "jobs.db") as store:
        assert len(await store.events("job", 1, 0, 1000)) == count


async def test_a_file_that_may_not_grow_ends_the_store_and_acknowledged_writes_stay(path: Path) -> None:
    async with opened(path) as store:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
            count = await write_on(store)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
    async with opened(path) as store:
        assert len(await store.events("job", 1, 0, 1000)) == count


def remove(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-lock"])
@pytest.mark.parametrize("harm", [remove, replace])
async def test_files_that_are_removed_or_replaced_are_noticed_before_anything_more_is_acknowledged(
    tmp_path: Path, suffix: str, harm: Callable[[Path], None]
) -> None:
    async with opened(tmp_path / "jobs.db") as store:
        await store.write([NewRun(make_spec(), 1, 1.0)])
        harm(tmp_path / f"jobs.db{suffix}")
        with pytest.raises(StoreFailedError, match=rf"jobs\.db{suffix} was removed or replaced$"):
            await store.write([event(1)])


def test_a_file_on_a_read_only_file_system_is_refused(small_disk: Path) -> None:
    path = small_disk / "jobs.db"
    asyncio.run(fill(path))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(DatabaseUnavailableError, match=r"jobs\.db: .*(read-?only|can't be opened)"):
        asyncio.run(fill(path))


def corrupt(path: Path) -> None:
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(size // 4)
        file.write(Random(0).randbytes(size // 2))


async def test_a_corrupt_file_ends_the_store(path: Path) -> None:
    await fill(path, NewRun(make_spec(), 1, 1.0), *(event(number, 3000) for number in range(1, 200)))
    corrupt(path)

    async def use() -> None:
        async with opened(path) as store:
            with pytest.raises(DatabaseUnreadableError):
                await store.events("job", 1, 0, 1000)
            await store.write([event(number, 3000) for number in range(200, 400)])

    with pytest.raises((StoreFailedError, DatabaseUnavailableError), match="corrupt") as caught:
        await use()
    assert "\n" not in str(caught.value)


async def test_a_log_without_its_end_opens_without_its_last_commits_and_the_commit_marker_reveals_it(
    tmp_path: Path,
) -> None:
    path, copy = tmp_path / "jobs.db", tmp_path / "copy.db"
    async with opened(path) as store:
        await store.write([TelemetrySequence("agent", 1)])
        early = store.commit_marker
        size = os.path.getsize(f"{path}-wal")  # noqa: ASYNC240
        await store.write([TelemetrySequence("agent", 2)])
        late = store.commit_marker
        shutil.copy(path, copy)
        shutil.copy(f"{path}-wal", f"{copy}-wal")
        os.truncate(f"{copy}-wal", size + 100)  # in the middle of a page
        assert not store.has_lost(late)

    async with opened(copy) as store:
        assert await store.telemetry_sequence("agent") == 1
        assert not store.has_lost(early)
        assert store.has_lost(late)


@pytest.mark.slow("a database's server stops and starts again")
async def test_a_server_that_stops_ends_the_store_and_acknowledged_writes_stay(
    postgresql_server: Server, url: str
) -> None:
    async with opened(url) as store:
        await store.write([TelemetrySequence("agent", 7)])
        postgresql_server.stop()
        try:
            with pytest.raises(StoreFailedError, match="server") as caught:
                await store.write([TelemetrySequence("agent", 8)])
            assert "\n" not in str(caught.value)
            with pytest.raises(DatabaseUnavailableError, match="server"):
                await SqlStore.open(url)
        finally:
            postgresql_server.start_again()
    async with opened(url) as store:
        assert await store.telemetry_sequence("agent") == 7


async def test_a_session_that_the_server_ends_never_writes_again(url: str) -> None:
    async with opened(url) as store:
        await store.write([TelemetrySequence("agent", 7)])
        execute(
            url,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        async with opened(url) as other:
            with pytest.raises(StoreFailedError, match="connection"):
                await store.write([TelemetrySequence("agent", 9)])
            assert await other.telemetry_sequence("agent") == 7


async def test_a_database_that_a_user_may_only_read_is_refused_or_fails_clearly(url: str) -> None:
    await fill(url, TelemetrySequence("agent", 7))
    execute(url, "CREATE ROLE visitor LOGIN", "GRANT SELECT ON ALL TABLES IN SCHEMA public TO visitor")
    with pytest.raises(DatabaseUnavailableError, match="the user lacks a permission") as caught:
        await SqlStore.open(url.replace("tester@", "visitor@"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("database", "message"),
    [
        ("mysql://user:secret@host/name", r"expected a path or postgresql://…, found mysql://…"),
        ("postgresql://user:secret@/name?host=/nowhere", r"server can't be reached"),
        ("postgresql://:::", r"\(not a URL\)"),
        ("/nowhere/jobs.db", r"/nowhere/jobs\.db: its file can't be opened"),
    ],
)
async def test_an_invalid_database_is_refused_in_one_line_without_its_password(
    database: str, message: str
) -> None:
    with pytest.raises(DatabaseUnavailableError, match=message) as caught:
        await SqlStore.open(database)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)
