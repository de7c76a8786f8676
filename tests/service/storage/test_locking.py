"""Only one coordinator at a time on a SQLite file, however the one before it ended."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perseus.service.domain.errors import DatabaseUnavailableError
from perseus.service.storage.engines import connect

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
