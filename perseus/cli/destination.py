"""Where a command's output goes: a file that is whole or absent, or a device or pipe.

A path means the same as after a shell's `>`: links are followed, the umask is respected, an existing file
keeps its mode and owner, and devices, pipes and open files (`/dev/stdout`, `/dev/fd/3`) are written to.
Beyond that, a file is replaced atomically: the new content goes into a file beside it, which is removed if
writing fails or is interrupted.
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
    """A path that a flag names; `check` it before doing any work for it."""

    flag: str
    path: Path

    @property
    def is_standard_output(self) -> bool:
        """Whether the path is standard output, where a command's other output goes."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(1))
        except OSError:
            return False

    def check(self, *inputs: Path) -> None:
        """Exit unless the path can be written and is not one of the inputs."""
        try:
            place = place_of(self.path)
            if place is None:
                return
            if place.is_dir():
                fail(f"{self.flag}: expected a path for a file, found the folder {self.path}")
            if not place.parent.is_dir():
                fail(f"{self.flag}: expected a path in an existing folder, found {self.path}")
            if place.exists() and any(each.exists() and place.samefile(each) for each in inputs):
                fail(f"{self.flag}: expected a file other than the input, found {self.path}")
        except OSError as error:
            fail(f"{self.flag}: {os_error_text(error)}")
        except ValueError as error:  # such as a null byte in it
            fail(f"{self.flag}: expected a path, found {str(self.path)!r}: {error}")

    def check_other_than(self, other: "Destination") -> None:
        """Exit if both lead to the same file: one would overwrite the other."""
        place = place_of(self.path)
        if place is not None and place == place_of(other.path) and not _is_special(place):
            fail(f"{self.flag}: expected a file other than that of {other.flag}, found {self.path}")

    def write(self, fill: Callable[[BinaryIO], object]) -> None:
        """Write what `fill` writes to the path; exit if that fails."""
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
    """Return the path at the end of a path's links, existing or not; None for a file that is already open.

    Raises:
        OSError: its links lead nowhere, or can't be read.
    """
    end = _end_of_links(path)
    return None if end.is_relative_to("/proc") else end


def _end_of_links(path: Path) -> Path:
    """Follow links, but none in /proc: those lead to open files, under names that may mean nothing."""
    for _ in range(_MAX_LINKS):
        path = Path(os.path.realpath(path.parent)) / path.name
        if path.is_relative_to("/proc") or not path.is_symlink():
            return path
        path = path.parent / os.readlink(path)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _is_special(place: Path) -> bool:
    """Whether the place is a device, a pipe or a socket, which can't be replaced."""
    try:
        return not stat.S_ISREG(place.stat().st_mode)
    except FileNotFoundError:
        return False


def _open_special(path: Path) -> int:
    end = _end_of_links(path)
    if end.parent == Path(f"/proc/{os.getpid()}/fd"):
        # Append: it may be a socket, or a file that others write to as well.
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
