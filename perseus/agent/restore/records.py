"""Restore records on disk: written before a GPU's clock changes, removed when the GPU is back at stock.

NVML can set and reset locked clocks but not read them back, so after an agent's death nobody can see whether
a GPU was changed. Hence one record per GPU, in a folder that survives the agent:

- It exists before the first change: written beside and linked into place, with file and folder synced.
- It is never overwritten: it describes the GPU's state before Perseus.
- Its owner holds a lock on it (flock), which the kernel releases when the owner dies, however it dies. A
record
  without a lock belongs to a dead agent: any agent restores the GPU and removes it.
- It belongs to this user alone: `restore.folder` rejects other users' files and locks.

`GuardedGpu` keeps the record of a GPU that an agent serves; `restore_found` handles those of dead agents.
"""

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import structlog

from perseus.agent.gpu import Gpu, GpuError, RecordError, RecordHeldError
from perseus.agent.restore.folder import is_held_by_ours, own_file, own_folder

_log = structlog.get_logger(__name__)

TIMEOUT_S = 0.5
"""For callers that need a record that another process may hold for a moment."""

_VERSION = 1
_POLL_INTERVAL_S = 0.02
_SUFFIX = ".json"
_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_MAX_BYTES = 4096
_MAX_CLOCK_MHZ = 100_000
_FOLDER_MODE = 0o700
_FILE_MODE = 0o600


@dataclass(frozen=True, slots=True)
class ClockRange:
    """An operator's own clock lock, to which a GPU returns instead of none."""

    lowest_mhz: int
    highest_mhz: int

    def __post_init__(self) -> None:
        if not 0 < self.lowest_mhz <= self.highest_mhz <= _MAX_CLOCK_MHZ:
            raise ValueError(
                f"clock range: expected 0 < MIN <= MAX <= {_MAX_CLOCK_MHZ} in MHz, "
                f"found {self.lowest_mhz},{self.highest_mhz}"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``MIN,MAX``. Raises ValueError, naming the form, for anything else."""
        match text.split(","):
            case [lowest, highest] if lowest.strip().isdecimal() and highest.strip().isdecimal():
                return cls(int(lowest), int(highest))
        raise ValueError(f"clock range: expected MIN,MAX in MHz, found {text!r}")


@dataclass(frozen=True, slots=True)
class Record:
    """One GPU and its stock: the range that it was locked to, or its own clocks (None)."""

    gpu_uuid: str
    stock: ClockRange | None

    def encode(self) -> bytes:
        """Return the file's content."""
        return json.dumps({"version": _VERSION, **asdict(self)}).encode()

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Parse the file's content. Raises ValueError if it is not a record."""
        if len(content) > _MAX_BYTES:
            raise ValueError(f"expected at most {_MAX_BYTES} bytes, found more")
        try:
            found: Any = json.loads(content)
        except RecursionError:
            raise ValueError("expected an object, found too many levels") from None
        match found:
            case {"version": int(version), "gpu_uuid": str(uuid), "stock": None} if version == _VERSION:
                return cls(uuid, None)
            case {
                "version": int(version),
                "gpu_uuid": str(uuid),
                "stock": {"lowest_mhz": int(lowest_mhz), "highest_mhz": int(highest_mhz)},
            } if version == _VERSION and not isinstance(lowest_mhz, bool):
                return cls(uuid, ClockRange(lowest_mhz, highest_mhz))
        raise ValueError(f"expected version {_VERSION}, gpu_uuid and stock, found {ascii(found)[:200]}")


class HeldRecord:
    """A record that this process holds until it releases it or dies."""

    def __init__(self, path: Path, file: int, record: Record) -> None:
        self.record = record
        self._path = path
        self._file = file

    def restore(self, gpu: Gpu) -> None:
        """Restore the GPU, then remove the record. Raises `GpuError`, and then keeps the record."""
        stock = self.record.stock
        if stock is None:
            gpu.reset_clock()
        else:
            gpu.lock_range(stock.lowest_mhz, stock.highest_mhz)
        self.remove()

    def remove(self) -> None:
        """Remove the record of a GPU that needs no restoring. Raises `RecordError` if that fails."""
        try:
            with own_folder(self._path.parent) as folder:
                os.unlink(self._path.name, dir_fd=folder)
                os.fsync(folder)
        except OSError as error:
            raise RecordError(f"{self._path}: can't be removed: {error.strerror}") from error
        self.release()

    def release(self) -> None:
        """Release the record; it stays for other agents."""
        os.close(self._file)


class RecordFolder:
    """The records of one node."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def gpu_uuids(self) -> list[str]:
        """Return the GPUs with a record, sorted. Raises `RecordError` if the folder can't be read."""
        try:
            with own_folder(self.path) as folder:
                names = os.listdir(folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RecordError(f"{self.path}: can't be read: {error.strerror}") from error
        return sorted(
            name.removesuffix(_SUFFIX)
            for name in names
            if name.endswith(_SUFFIX) and _UUID.fullmatch(name.removesuffix(_SUFFIX))
        )

    def find(self, gpu_uuid: str, *, timeout_s: float = 0.0) -> HeldRecord | None:
        """Hold the record of a GPU, if it has one.

        Raises `RecordHeldError` if another process holds it for longer than `timeout_s` (a process that only
        checks it holds it for a moment), `RecordError` if it can't be read or is malformed.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return self._find(gpu_uuid)
            except RecordHeldError:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(_POLL_INTERVAL_S)

    def _find(self, gpu_uuid: str) -> HeldRecord | None:
        path = self._path(gpu_uuid)
        try:
            with own_folder(self.path) as folder:
                file = own_file(folder, path.name)
                try:
                    return self._hold(folder, file, path, gpu_uuid)
                except BaseException:
                    os.close(file)
                    raise
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RecordError(f"{path}: can't be read: {error.strerror}") from error

    def _hold(self, folder: int, file: int, path: Path, gpu_uuid: str) -> HeldRecord | None:
        """Hold the record in an open file, which the caller closes if this fails."""
        held = HeldRecord(path, file, self._read(file, path, gpu_uuid))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if is_held_by_ours(file):
                raise RecordHeldError(
                    f"GPU {gpu_uuid}: another running agent holds {path}: it has changed this GPU's clocks"
                ) from None
            _log.warning("record held by another user: taken over", record=str(path))
            taken = self._publish(folder, held.record, os.replace)
            os.close(file)
            return HeldRecord(path, taken, held.record)
        if os.fstat(file).st_nlink == 0:  # its holder has restored the GPU meanwhile
            os.close(file)
            return None
        return held

    def _read(self, file: int, path: Path, gpu_uuid: str) -> Record:
        try:
            record = Record.decode(os.pread(file, _MAX_BYTES + 1, 0))
            if record.gpu_uuid != gpu_uuid:
                raise ValueError(f"expected one of GPU {gpu_uuid}, as in its name, found another GPU's")
        except ValueError as error:
            raise RecordError(f"{path}: expected a restore record: {error}") from error
        return record

    def write(self, record: Record) -> HeldRecord:
        """Write a record and hold it. Raises `RecordError` if one exists or it can't be written."""
        path = self._path(record.gpu_uuid)
        try:
            _make_folder(self.path)
            with own_folder(self.path) as folder:
                # Unlike a rename, a link never replaces.
                return HeldRecord(path, self._publish(folder, record, os.link), record)
        except OSError as error:
            raise RecordError(
                f"{path}: the restore record can't be written, so no clock is set: {error.strerror}"
            ) from error

    def _publish(self, folder: int, record: Record, put: Callable[..., None]) -> int:
        """Write a record beside its place, `put` it there, and return the locked file."""
        name = f"{record.gpu_uuid}{_SUFFIX}"
        draft = f".{name}.{os.getpid()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(draft, flags, _FILE_MODE, dir_fd=folder)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # locked before it becomes visible
            os.write(file, record.encode())
            os.fsync(file)
            put(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
        except BaseException:
            os.close(file)
            raise
        finally:
            with contextlib.suppress(FileNotFoundError):  # it was moved
                os.unlink(draft, dir_fd=folder)
        return file

    def _path(self, gpu_uuid: str) -> Path:
        if not _UUID.fullmatch(gpu_uuid):
            raise RecordError(f"GPU {gpu_uuid!r}: expected a UUID that can name a file")
        return self.path / f"{gpu_uuid}{_SUFFIX}"


def restore_found(
    folder: RecordFolder, gpu_uuid: str, open_gpu: Callable[[str], Gpu], *, timeout_s: float = 0.0
) -> bool:
    """Restore a GPU if it has a record that nobody holds; return whether it did.

    `timeout_s` is as for `RecordFolder.find`. The record stays if anything fails. Raises `GpuError`, and any
    error of `open_gpu` and its GPU.
    """
    try:
        held = folder.find(gpu_uuid, timeout_s=timeout_s)
    except RecordHeldError:
        return False  # its agent is alive
    if held is None:
        return False
    try:
        gpu = open_gpu(held.record.gpu_uuid)
        try:
            held.restore(gpu)
        finally:
            with contextlib.suppress(GpuError):
                gpu.close()
    except BaseException:
        held.release()
        raise
    return True


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents; each new one is synced before the next."""
    for each in [*reversed(folder.parents), folder]:
        if not each.is_dir():
            each.mkdir(mode=_FOLDER_MODE if each == folder else 0o755, exist_ok=True)
            parent = os.open(each.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(parent)
            finally:
                os.close(parent)
