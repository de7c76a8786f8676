"""Databases that fail under a running store, or can't be opened: it says that in one line, and ends."""

import asyncio
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from perseus.service.domain.errors import (
    DatabaseUnavailableError,
    DatabaseUnreadableError,
    StoreFailedError,
)
from perseus.service.storage.engines import connect
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import NewRun, TelemetrySequence
from tests.service.service_fakes import make_spec
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


async def test_a_failing_disk_does_not_hide_the_cause(path: Path) -> None:
    """A limit of SQLite itself replaces a full disk where none can be mounted."""
    async with opened(path) as store:
        connection = store._opened.connection.connection.dbapi_connection
        assert isinstance(connection, sqlite3.Connection)
        await store._run(lambda: connection.execute("PRAGMA max_page_count = 40"))
        await write_on(store, "the disk is full")


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


# ---------------------------------------------------------------------- locks


HOLD = """
import sys
from perseus.service.storage.engines import connect
opened = connect(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_elsewhere(database: Path | str) -> Iterator["subprocess.Popen[bytes]"]:
    """Lock a database in another process, which is killed at the end of the block, if not before."""
    command = [sys.executable, "-c", HOLD, str(database)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.kill()


def test_a_killed_coordinator_holds_nothing(path: Path) -> None:
    with held_elsewhere(path) as process:
        with pytest.raises(DatabaseUnavailableError, match="it is locked: is another coordinator running"):
            connect(path)
        process.kill()
        process.wait()
        connect(path).close()
        # Neither the refused one nor the one after it has released the lock.
        with held_elsewhere(path), pytest.raises(DatabaseUnavailableError, match="locked"):
            connect(path)


def test_a_link_leads_to_the_same_lock(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    path, link, folder = tmp_path / "folder" / "jobs.db", tmp_path / "link.db", tmp_path / "link"
    link.symlink_to(path)
    folder.symlink_to("folder")
    names = [path, link, folder / "jobs.db"]
    for held in names:
        opened = connect(held)
        for name in names:
            with pytest.raises(DatabaseUnavailableError, match=f"{name}: it is locked"):
                connect(name)
        connect(link, is_read_only=True).close()
        opened.close()


def test_an_error_in_making_the_lock_file_is_one_line(path: Path) -> None:
    path.with_name("jobs.db-lock").mkdir()
    with pytest.raises(DatabaseUnavailableError) as caught:
        connect(path)
    assert str(caught.value).endswith(f"its lock file {path}-lock can't be opened: Is a directory")


@pytest.fixture
def read_only_folder() -> Iterator[Path]:
    """A folder with a database in which this process may create no file."""
    folder = Path(tempfile.mkdtemp(prefix="perseus-read-only-"))  # pytest's own are closed to other users
    (folder / "empty.db").touch()
    connect(folder / "used.db").close()
    (folder / "used.db-lock").unlink()
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path == folder else 0o666)
    is_root = os.geteuid() == 0
    try:
        if is_root:  # root may write everywhere
            os.seteuid(65534)
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty.db", "its lock file .*/empty.db-lock can't be opened: Permission denied"),
        ("used.db", "it can't be written: the file or its file system is read-only"),
        ("new.db", "its file can't be opened: does the folder exist, and is it writable?"),
    ],
)
def test_an_error_about_a_read_only_folder_is_one_line(
    read_only_folder: Path, name: str, message: str
) -> None:
    with pytest.raises(DatabaseUnavailableError, match=message) as caught:
        connect(read_only_folder / name)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in read_only_folder.iterdir()) == ["empty.db", "used.db"]
