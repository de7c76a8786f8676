"""Where a command's output goes: a file that is whole or not there, or a device or pipe that takes it.

A path means what it means after a shell's `>`: links are followed, the umask is respected, a file that is
there keeps its mode and owner, and devices, pipes and open files (`/dev/stdout`, `/dev/fd/3`) are written to.
Beyond that, a file is replaced at once: it is filled beside its place, and nothing is left there if that
fails or is interrupted.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from perseus.cli.terminal import FAILURE, fail, os_error_text

_MAX_LINKS = 40


@dataclass(frozen=True, slots=True)
class Destination:
    """A path that a flag names; `check` it before any work is done for it."""

    flag: str
    path: Path

    @property
    def is_standard_output(self) -> bool:
        """Whether it is where a command's other output goes."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(1))
        except OSError:
            return False

    def check(self, *inputs: Path) -> None:
        """Exit unless something could be put there that is none of what is read."""
        try:
            place = place_of(self.path)
            if place is None:
                return
            if place.is_dir():
                fail(f"{self.flag}: expected a path for a file, found the folder {self.path}")
            if not place.parent.is_dir():
                fail(f"{self.flag}: expected a path in an existing folder, found {self.path}")
            if place.exists() and any(each.exists() and place.samefile(each) for each in inputs):
                fail(f"{self.flag}: expected another file than the one that is read, found {self.path}")
        except OSError as error:
            fail(f"{self.flag}: {os_error_text(error)}")
        except ValueError as error:  # a path that no system takes
            fail(f"{self.flag}: expected a path, found {str(self.path)!r}: {error}")

    def check_other_than(self, other: "Destination") -> None:
        """Exit if both go to one file, which only one of them would be left in."""
        place = place_of(self.path)
        if place is not None and place == place_of(other.path) and not _is_special(place):
            fail(f"{self.flag}: expected another file than that of {other.flag}, found {self.path}")

    def write(self, fill: Callable[[BinaryIO], object]) -> None:
        """Put there what `fill` writes; exits where that can't be done."""
        try:
            place = place_of(self.path)
            if place is not None and not _is_special(place):
                _replace(place, fill)
                return
            with os.fdopen(_open_special(self.path), "wb") as stream:
                fill(stream)
        except OSError as error:
            fail(f"{self.flag}: {self.path} can't be written: {error.strerror or error}", FAILURE)


def place_of(path: Path) -> Path | None:
    """Return what a path leads to, whether or not it is there; None if that is a file that is open already.

    Raises:
        OSError: its links lead nowhere, or can't be read.
    """
    end = _end_of_links(path)
    return None if end.is_relative_to("/proc") else end


def _end_of_links(path: Path) -> Path:
    """Follow links, but none in /proc: those lead to what is open, under names that may mean nothing."""
    for _ in range(_MAX_LINKS):
        path = Path(os.path.realpath(path.parent)) / path.name
        if path.is_relative_to("/proc") or not path.is_symlink():
            return path
        path = path.parent / os.readlink(path)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _is_special(place: Path) -> bool:
    """Whether it is a device, a pipe or a socket: nothing to be replaced."""
    try:
        return not stat.S_ISREG(place.stat().st_mode)
    except FileNotFoundError:
        return False


def _open_special(path: Path) -> int:
    end = _end_of_links(path)
    if end.parent == Path(f"/proc/{os.getpid()}/fd"):
        # It goes on where others left off, be it a socket, or a file that they write to as well.
        return os.dup(int(end.name))
    return os.open(end, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)


def _replace(place: Path, fill: Callable[[BinaryIO], object]) -> None:
    before = place.stat() if place.exists() else None
    if before is not None and not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    draft = place.with_name(f".perseus-{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            if before is not None:
                with contextlib.suppress(PermissionError):
                    os.fchown(descriptor, before.st_uid, before.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            fill(stream)
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)
