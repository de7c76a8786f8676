"""Opening files that belong to this user alone, such as the restore records.

Root reads these files and acts on them. So the folder belongs to the agent's user and is closed to all
others; neither it nor a file in it is reached through a link; and only regular files of this user count
(opening a FIFO would block, a device may do anything). A folder that an earlier version or an operator left
open to others is closed.

Any process that can open a file can lock it (flock). If others could open a file, its lock counts only if a
process of this user holds it; otherwise another user could keep a GPU from being restored.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OTHERS = 0o077


@contextmanager
def own_folder(path: Path) -> Iterator[int]:
    """Open the folder at `path`, closed to others. Raises OSError if it can't be trusted."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid():
            raise PermissionError(
                1,
                f"expected a folder of user {os.geteuid()}, the agent's, found user {found.st_uid}'s",
            )
        if found.st_mode & _OTHERS:
            os.fchmod(folder, stat.S_IMODE(found.st_mode) & ~_OTHERS)
        yield folder
    finally:
        os.close(folder)


def own_file(folder: int, name: str) -> int:
    """Open a file in an `own_folder` for reading. Raises OSError if it is missing or can't be trusted."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    before = os.stat(name, dir_fd=folder, follow_symlinks=False)
    _check(before)  # opening a device may have side effects
    file = os.open(name, flags, dir_fd=folder)
    try:
        _check(os.fstat(file))
    except BaseException:
        os.close(file)
        raise
    return file


def _check(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(22, f"expected a regular file, found {stat.filemode(found.st_mode)}")
    if found.st_uid != os.geteuid():
        raise PermissionError(1, f"expected a file of user {os.geteuid()}, found user {found.st_uid}'s")


def is_held_by_ours(file: int) -> bool:
    """Whether the lock held on an open file counts."""
    found = os.fstat(file)
    if not found.st_mode & _OTHERS:
        return True  # nobody else could have opened it
    return any(_uid(pid) == os.geteuid() for pid in _holders(found, Path("/proc/locks").read_text()))


def _holders(file: os.stat_result, locks: str) -> Iterator[int]:
    """Yield holders of a file's flock; `locks` has lines `1: FLOCK ADVISORY WRITE PID 08:01:INODE …`."""
    wanted = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    for line in locks.splitlines():
        match line.split():
            case [_, "FLOCK", _, _, pid, place, *_] if place == wanted:
                yield int(pid)


def _uid(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
