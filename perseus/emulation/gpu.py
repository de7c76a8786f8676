"""An emulated GPU, shared between processes through one mmap'd file.

The trainer's process executes work on it, the agent's sets its clock and reads its counter, and any other
process may degrade it. Every access locks the file, advances the state to now (`GpuState.advance`) and reads
or changes it; nothing runs in between. Times are CLOCK_MONOTONIC, which all processes of a node share.

Like a real GPU in persistence mode it keeps its locked clock when the agent dies.

The file: a header (magic, version, sizes), the model and UUID as JSON, then the state as a flat record.
Beside it, `.NAME.processes` has the numbers of the processes that have executed work, as a driver reports
them.
"""

import contextlib
import fcntl
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perseus.emulation.dynamics import NO_CLOCK, GpuState
from perseus.emulation.physics import GpuModel, Work
from perseus.gpu import (
    ClockEventReason,
    ClockNotSupportedError,
    EmulatedGpuError,
    GpuNotFoundError,
)

_MAGIC = b"PRSUSGPU"
_VERSION = 2
_HEADER = struct.Struct("<8sII")  # magic, version, bytes of JSON
_FORMATS = MappingProxyType({float: "d", int: "q"})
_STATE = struct.Struct("<" + "".join(_FORMATS[field.type] for field in fields(GpuState)))  # type: ignore[index]
_state_values = attrgetter(*(field.name for field in fields(GpuState)))

# A clock set is visible for a whole set latency before it takes effect. Polling after this share of it,
# `execute` sees every change in time, with room for a late wake-up.
_POLL_SHARE = 0.75

# A sleep overshoots by 0.1–0.2 ms, so `execute` is awake for the last moments of its work.
_AWAKE_S = 0.0002


class EmulatedGpu:
    """One process's handle of an emulated GPU (implements `Gpu`); safe to use from several threads.

    Open it after a fork, not before: the file's lock belongs to the open file, which a forked child shares.
    `monotonic` and `sleep` are injected by tests; processes that share a GPU share CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        path: Path,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Open the GPU that `create` made at `path`.

        Raises `GpuNotFoundError` if there is no such file, `EmulatedGpuError` if it is foreign or truncated.
        """
        self._monotonic = monotonic
        self._sleep = sleep
        self._thread_lock = threading.Lock()
        self._processes_path = path.with_name(f".{path.name}.processes")
        self._is_process_noted = False
        try:
            self._file = path.open("r+b")
        except FileNotFoundError:
            raise GpuNotFoundError(f"{path}: expected an emulated GPU, found no such file") from None
        try:
            identity = _read_identity(path, self._file.read())
            self._map = mmap.mmap(self._file.fileno(), 0)
        except BaseException:
            self._file.close()
            raise
        self._state_offset = len(self._map) - _STATE.size
        model = identity["model"]
        self.model = GpuModel(**{**model, "clocks_mhz": tuple(model["clocks_mhz"])})
        self._uuid: str = identity["uuid"]

    @classmethod
    def create(
        cls,
        path: Path,
        model: GpuModel,
        uuid: str,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> "EmulatedGpu":
        """Create and open a GPU at stock with zero energy. Raises FileExistsError if `path` exists."""
        identity = json.dumps({"uuid": uuid, "model": asdict(model)}).encode()
        now_s = monotonic()
        state = GpuState(at_s=now_s, counter_origin_s=now_s, clock_mhz=model.highest_clock_mhz)
        header = _HEADER.pack(_MAGIC, _VERSION, len(identity))
        # Written beside and linked into place: nobody can open a partial file.
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_bytes(header + identity + _STATE.pack(*_state_values(state)))
        try:
            os.link(unfinished, path)
        finally:
            unfinished.unlink()
        return cls(path, monotonic=monotonic, sleep=sleep)

    @property
    def uuid(self) -> str:
        """The identity given at creation."""
        return self._uuid

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.name

    @property
    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """All clocks that can be locked, descending."""
        return self.model.clocks_mhz

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the clock; returns when it is in force, one set latency later, the old one holding until then.

        A newer set replaces one in progress.
        """
        if clock_mhz not in self.model.clocks_mhz:
            raise ClockNotSupportedError(self.uuid, clock_mhz, self.model.clocks_mhz)
        with self._state() as state:
            state.set_clock(self.model, clock_mhz)
        self._sleep(self.model.set_latency_s)

    def reset_clock(self) -> None:
        """Go back to stock: the highest clock."""
        self.set_clock_mhz(self.model.highest_clock_mhz)

    def lock_range(self, lowest_mhz: int, highest_mhz: int) -> None:
        """Lock the highest clock within the limits: the model runs at its highest allowed clock."""
        within_mhz = [clock for clock in self.model.clocks_mhz if lowest_mhz <= clock <= highest_mhz]
        if not within_mhz:
            raise ClockNotSupportedError(self.uuid, highest_mhz, self.model.clocks_mhz)
        self.set_clock_mhz(within_mhz[0])

    def total_energy_j(self) -> float:
        """The energy since creation as of the latest counter update."""
        with self._state() as state:
            return state.counter_j

    def sm_clock_mhz(self) -> int:
        """The clock at which it runs now."""
        with self._state() as state:
            return state.effective_mhz

    def power_w(self) -> float:
        """The power drawn now."""
        with self._state() as state:
            return state.power_w(self.model)

    def power_limit_w(self) -> float:
        """The limit from `limit_power`; by default the model's TDP, which is never reached."""
        with self._state() as state:
            return state.power_limit_w or self.model.board_power_w

    def power_profiles(self) -> tuple[int, ...]:
        """The profiles from `enforce_power_profiles`; none by default."""
        with self._state() as state:
            return tuple(bit for bit in range(63) if state.power_profiles_mask >> bit & 1)

    def clock_event_reasons(self) -> int:
        """The reasons of `degrade`, and of `cap` and `limit_power` while they lower the clock; else 0."""
        with self._state() as state:
            return state.reasons

    def close(self) -> None:
        """Close the file, in which the GPU lives on."""
        self._map.close()
        self._file.close()

    def execute(self, work: Work) -> None:
        """Execute `work` and return when it is done; the GPU waits, at blocking power, before and after.

        Sleeps meanwhile. Raises `EmulatedGpuError` if other work is in progress.
        """
        self.begin(work)
        self.wait()

    def begin(self, work: Work) -> None:
        """Begin `work`, which ends on its own. Raises `EmulatedGpuError` if other work is in progress."""
        with self._state() as state:
            state.begin(work)
            self._note_process()

    def process_ids(self) -> tuple[int, ...]:
        """Return the running processes that have executed work."""
        with self._state():
            return self._running_processes()

    def _running_processes(self) -> tuple[int, ...]:
        try:
            parts = self._processes_path.read_text().split()
        except FileNotFoundError:
            return ()
        return tuple(int(pid) for pid in parts if os.path.exists(f"/proc/{pid}"))

    def _note_process(self) -> None:
        if not self._is_process_noted:
            self._is_process_noted = True
            with contextlib.suppress(PermissionError):  # of another user's folder
                running = {*self._running_processes(), os.getpid()}
                self._processes_path.write_text("".join(f"{pid}\n" for pid in sorted(running)))

    def wait(self) -> None:
        """Sleep until the GPU has no work."""
        while True:
            with self._state() as state:
                left_s = state.finish_s(self.model) - state.at_s
            if left_s <= 0:
                return
            self._sleep(max(0.0, min(left_s - _AWAKE_S, self.model.set_latency_s * _POLL_SHARE)))

    def degrade(self, slowdown: float, clock_event_reasons: int = 0) -> None:
        """Make work take `slowdown` times as long at the same clock and power, from now on; 1 ends this.

        Work in progress slows, too. The GPU reports `clock_event_reasons` meanwhile.
        """
        if not 0 < slowdown < float("inf"):
            raise EmulatedGpuError(f"GPU {self.uuid}: slowdown: expected a positive number, found {slowdown}")
        with self._state() as state:
            state.slowdown = slowdown
            state.clock_event_reasons = clock_event_reasons

    def cap(self, clock_mhz: int | None, clock_event_reasons: int = 0) -> None:
        """Limit the effective clock, as heat does, and report the reasons; None lifts the limit."""
        with self._state() as state:
            state.cap_mhz, state.cap_reasons = clock_mhz or NO_CLOCK, clock_event_reasons

    def limit_power(self, limit_w: float) -> None:
        """Set another power limit, as operators do: clocks at which full activity draws more are not reached.

        Raises `EmulatedGpuError` if even the lowest clock draws more.
        """
        within_mhz = [mhz for mhz in self.model.clocks_mhz if self.model.power_w(1.0, mhz) <= limit_w]
        if not within_mhz:
            min_w = self.model.power_w(1.0, self.model.clocks_mhz[-1])
            raise EmulatedGpuError(
                f"GPU {self.uuid}: power limit: expected at least {min_w:.0f} W, found {limit_w:g} W"
            )
        with self._state() as state:
            state.power_limit_w = limit_w
            state.cap_mhz, state.cap_reasons = within_mhz[0], ClockEventReason.SW_POWER_CAP

    def enforce_power_profiles(self, profiles: Iterable[int]) -> None:
        """Report these workload power profiles, numbers below 63; they have no other effect."""
        with self._state() as state:
            state.power_profiles_mask = sum(1 << profile for profile in set(profiles))

    @contextmanager
    def _state(self) -> Iterator[GpuState]:
        # flock keeps out other processes (and other openings of the file), the thread lock our own threads.
        with self._thread_lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                state = GpuState(*_STATE.unpack_from(self._map, self._state_offset))
                state.advance(self.model, self._monotonic())
                yield state
                self._map[self._state_offset :] = _STATE.pack(*_state_values(state))
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


def _read_identity(path: Path, content: bytes) -> dict[str, Any]:
    if len(content) < _HEADER.size or not content.startswith(_MAGIC):
        raise EmulatedGpuError(
            f"{path}: expected an emulated GPU (a file that begins with {_MAGIC!r}), "
            f"found one that begins with {content[: len(_MAGIC)]!r}"
        )
    _, version, identity_size = _HEADER.unpack_from(content)
    if version != _VERSION:
        raise EmulatedGpuError(f"{path}: expected an emulated GPU of version {_VERSION}, found {version}")
    size = _HEADER.size + identity_size + _STATE.size
    if len(content) != size:
        raise EmulatedGpuError(f"{path}: expected an emulated GPU of {size} bytes, found {len(content)}")
    identity: dict[str, Any] = json.loads(content[_HEADER.size : _HEADER.size + identity_size])
    return identity
