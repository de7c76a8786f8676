"""A coordinator with a failing database, with a real agent and many emulated ones.

Each fault strikes a coordinator under load whose database is on its own small disk. The outcome of each: how
the coordinator ended and its last words, when the real agent's GPU was back at stock, and whether any
acknowledged data is lost after the fault is repaired and the coordinator restarted.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from benchmarks.load.control import Agents, GeneratorError
from perseus.demo import nvml_stub
from perseus.demo.processes import Coordinator
from perseus.v1 import job_pb2, job_service_pb2
from perseus.v1.job_service_pb2_grpc import JobServiceStub
from tests.nvml.stack import Stack

LEASE_S = 5.0
"""Long enough that agents on a busy machine don't count as silent."""
FLAGS = (
    *("--lease-s", f"{LEASE_S:g}", "--guard-tolerance-percent", "1000"),
    *("--baseline-iterations", "2", "--profile-iterations", "2", "--profile-clocks", "2"),
)
DISK_BYTES = 16 * 1024 * 1024

_END_LIMIT_S = 45.0
_STOCK_MARGIN_S = 2.0
"""How much later than its lease's end a GPU may be at stock."""
_LIMIT_S = 60.0


@dataclass(slots=True)
class FaultOutcome:
    """The outcome of one fault.

    Attributes:
        name: of the fault.
        status: the coordinator's exit status; None if it did not end.
        lines: the last lines that it wrote.
        ended_after_s: from the fault.
        stock_after_s: from the coordinator's end until the GPU was at stock.
        problems: violated expectations.
    """

    name: str
    status: int | None = None
    lines: list[str] = field(default_factory=list)
    ended_after_s: float = 0.0
    stock_after_s: float = 0.0
    problems: list[str] = field(default_factory=list)


class Disk:
    """A small disk with a coordinator's database."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = folder / "jobs.db"
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Fill the disk."""
        with self._filler.open("wb", buffering=0) as filler, suppress(OSError):
            while filler.write(bytes(4096)):
                pass

    def make_room(self) -> None:
        self._filler.unlink()

    def remove_database(self) -> None:
        for file in self.folder.glob("jobs.db*"):
            file.unlink()

    def log(self) -> Path:
        """SQLite's write-ahead log."""
        return self.folder / "jobs.db-wal"

    def remount(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", str(self.folder)], check=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[Disk]:
    """Mount a disk in memory; only root may."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)], check=True)
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _disk_full(disk: Disk, _: Coordinator) -> None:
    disk.fill()


def _database_removed(disk: Disk, _: Coordinator) -> None:
    disk.remove_database()


def _read_only(disk: Disk, coordinator: Coordinator) -> None:
    """A file can't become read-only under a writer: the coordinator notices it at its next start."""
    coordinator.kill()
    disk.remount("ro")
    coordinator.launch()


def _log_truncated(disk: Disk, coordinator: Coordinator) -> None:
    """Truncate the log, like a disk that lied about completed writes."""
    coordinator.kill()
    os.truncate(disk.log(), disk.log().stat().st_size // 2)


def _log_lost(disk: Disk, coordinator: Coordinator) -> None:
    coordinator.kill()
    disk.log().unlink()


@dataclass(frozen=True, slots=True)
class Fault:
    """How it strikes and is repaired; whether the coordinator has to end by itself, and may lose state."""

    strike: Callable[[Disk, Coordinator], None]
    mend: Callable[[Disk], None] = lambda _: None
    has_to_end: bool = True
    is_state_gone: bool = False


FAULTS = {
    "disk full": Fault(_disk_full, Disk.make_room),
    "read-only": Fault(_read_only, lambda disk: disk.remount("rw")),
    "database removed": Fault(_database_removed, is_state_gone=True),
    "log truncated": Fault(_log_truncated, has_to_end=False, is_state_gone=True),
    "log lost": Fault(_log_lost, has_to_end=False, is_state_gone=True),
}


def strike(folder: Path, library: Path, *names: str) -> list[FaultOutcome]:
    """Let faults strike a coordinator under load, one after another.

    Raises:
        ClusterError: after a fault the GPU did not go back to stock.
    """
    outcomes = [FaultOutcome(name) for name in names]
    with (
        small_disk(folder / "disk") as disk,
        Coordinator(folder, disk.database, *FLAGS) as coordinator,
    ):
        coordinator.start()
        with (
            Stack(folder / "node", library, coordinator=coordinator) as node,
            Agents(coordinator.address) as agents,
        ):
            agents.ask(
                "add", job_id="faults", pipeline_count=2, period_s=0.25, reconnect_within_s=0.5,
                microbatch_count=4,
            )  # fmt: skip
            node.start()
            node.until(
                lambda: _has_slowdown(coordinator.address, node.job_id), "a job whose policy can be set"
            )
            for outcome in outcomes:
                fault = FAULTS[outcome.name]
                node.until(node.is_locked, "a locked clock")
                agents.ask("planned", job_id="faults", limit_s=_LIMIT_S)
                struck_s = time.monotonic()
                fault.strike(disk, coordinator)
                _watch_end(coordinator, fault, struck_s, outcome)
                outcome.stock_after_s = node.until(
                    lambda: not node.is_locked(), f"stock after {outcome.name}"
                )
                fault.mend(disk)
                ended_s = time.monotonic()
                coordinator.start()
                _hold_against(agents, ended_s, fault, outcome)
    return outcomes


def _has_slowdown(address: str, job_id: str) -> bool:
    """Let a job run at the lowest energy; return false while it is not registered.

    A stage on its own has no slack: without a slowdown its GPU is locked only while clocks are profiled.
    """
    policy = job_pb2.OperatingPolicy(max_slowdown_percent=100)
    with grpc.insecure_channel(address) as channel:
        try:
            JobServiceStub(channel).SetPolicy(job_service_pb2.SetPolicyRequest(job_id=job_id, policy=policy))
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return False
    return True


def _watch_end(coordinator: Coordinator, fault: Fault, struck_s: float, outcome: FaultOutcome) -> None:
    if fault.has_to_end:
        with suppress(subprocess.TimeoutExpired):
            coordinator.wait(_END_LIMIT_S)
    outcome.ended_after_s = time.monotonic() - struck_s
    outcome.status = coordinator.poll()
    if outcome.status is None:
        coordinator.kill()
    text = coordinator.log.read_text()
    outcome.lines = text.splitlines()[-3:]
    if "Traceback" in text:
        outcome.problems.append("a traceback instead of a clear line")
    if fault.has_to_end and outcome.status is None:
        outcome.problems.append(f"it did not notice within {_END_LIMIT_S:g} s")
    if fault.has_to_end and outcome.status == 0:
        outcome.problems.append("it ended as if nothing had been wrong")


def _hold_against(agents: Agents, ended_s: float, fault: Fault, outcome: FaultOutcome) -> None:
    """Check that acknowledged data is there, or that every agent learned of the loss by another epoch."""
    try:
        agents.ask("back", since_s=ended_s, limit_s=_LIMIT_S)
    except GeneratorError as error:
        if not fault.is_state_gone:
            outcome.problems.append(str(error))
    found = agents.ask("findings")
    lost_count = found["counts"].get("acknowledged and lost", 0)
    if not fault.is_state_gone:
        outcome.problems += found["messages"]
    elif lost_count > found["counts"].get("epoch changed", 0):
        outcome.problems.append(f"lost without another epoch: {found}")


def strike_all(folder: Path) -> list[FaultOutcome]:
    """Run every fault once; none if this user may not mount a disk."""
    if os.geteuid() != 0:
        print("faults of the disk: skipped, only root may mount one")
        return []
    library = nvml_stub.build(folder)
    outcomes = []
    for number, name in enumerate(FAULTS):
        (own := folder / f"fault-{number}").mkdir()
        outcomes += strike(own, library, name)
    for outcome in outcomes:
        if outcome.stock_after_s > LEASE_S + _STOCK_MARGIN_S:
            outcome.problems.append(f"expected stock within {LEASE_S + _STOCK_MARGIN_S:g} s")
    return outcomes
