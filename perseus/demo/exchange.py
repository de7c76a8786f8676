"""How the emulated trainer's ranks talk to each other: real sockets on loopback, and real waiting.

Each rank listens on its own port and publishes it as a file in the run's folder. Neighbouring stages of a
pipeline share one connection: activations go down it, gradients come up. At the end of an iteration all ranks
synchronise at the very first rank, in place of the gradient all-reduce: no rank passes before all have
arrived, and all learn whether training continues.
"""

import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

_MEETING_TIMEOUT_S = 30.0
_POLL_S = 0.02
_TENSOR = bytes(4096)
"""Payload in place of one microbatch's activations or gradients."""
_MICROBATCH = struct.Struct("<i")
_HUB = (0, 0)

Rank = tuple[int, int]
"""(pipeline, stage)."""


class ExchangeError(Exception):
    """A neighbour did not connect, or sent something other than the schedule expects."""


class Exchange:
    """One rank's connections. `connect` blocks until all of its neighbours have connected."""

    def __init__(
        self,
        before: Connection | None,
        after: Connection | None,
        members: list[Connection],
        hub: Connection | None,
    ) -> None:
        self._before = before
        self._after = after
        self._members = members
        self._hub = hub

    @classmethod
    def connect(cls, run_dir: Path, rank: Rank, pipeline_count: int, stage_count: int) -> "Exchange":
        """Connect to the neighbours of `rank`.

        Raises:
            ExchangeError: one of them did not publish its port in time.
        """
        pipeline, stage = rank
        has_after = stage + 1 < stage_count
        with Listener(("127.0.0.1", 0), backlog=pipeline_count * stage_count) as listener:
            _publish(run_dir, rank, listener.address[1])
            before = _call(run_dir, (pipeline, stage - 1), rank, "stage") if stage > 0 else None
            hub = _call(run_dir, _HUB, rank, "hub") if rank != _HUB else None
            expected = int(has_after) + (pipeline_count * stage_count - 1 if rank == _HUB else 0)
            after, members = None, []
            for _ in range(expected):
                connection = listener.accept()
                purpose = connection.recv_bytes()
                if purpose == b"stage":
                    after = connection
                else:
                    members.append(connection)
        return cls(before, after, members, hub)

    def receive_activations(self, microbatch: int) -> None:
        """Wait for the previous stage, unless this is the first."""
        _receive(self._before, microbatch)

    def send_activations(self, microbatch: int) -> None:
        """Send to the next stage, unless this is the last."""
        _send(self._after, microbatch)

    def receive_gradients(self, microbatch: int) -> None:
        """Wait for the next stage, unless this is the last."""
        _receive(self._after, microbatch)

    def send_gradients(self, microbatch: int) -> None:
        """Send back to the previous stage, unless this is the first."""
        _send(self._before, microbatch)

    def synchronise(self, goes_on: Callable[[], bool]) -> bool:
        """Wait for all ranks of the job; return whether training continues, which the first rank decides."""
        if self._hub is not None:
            self._hub.send_bytes(_TENSOR)
            return self._hub.recv_bytes() == b"on"
        for member in self._members:
            member.recv_bytes()
        verdict = goes_on()
        for member in self._members:
            member.send_bytes(b"on" if verdict else b"stop")
        return verdict

    def close(self) -> None:
        """Close all connections."""
        for connection in (self._before, self._after, self._hub, *self._members):
            if connection is not None:
                connection.close()


def _send(connection: Connection | None, microbatch: int) -> None:
    if connection is not None:
        connection.send_bytes(_MICROBATCH.pack(microbatch) + _TENSOR)


def _receive(connection: Connection | None, microbatch: int) -> None:
    if connection is None:
        return
    (found,) = _MICROBATCH.unpack_from(connection.recv_bytes())
    if found != microbatch:
        raise ExchangeError(f"expected microbatch {microbatch} from the neighbouring stage, found {found}")


def _port_file(run_dir: Path, rank: Rank) -> Path:
    return run_dir / f"rank-{rank[0]}-{rank[1]}.port"


def _publish(run_dir: Path, rank: Rank, port: int) -> None:
    path = _port_file(run_dir, rank)
    draft = path.with_suffix(".draft")
    draft.write_text(str(port))
    draft.rename(path)


def _call(run_dir: Path, callee: Rank, caller: Rank, purpose: str) -> Connection:
    path = _port_file(run_dir, callee)
    deadline_s = time.monotonic() + _MEETING_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise ExchangeError(
                f"rank {caller}: expected rank {callee} within {_MEETING_TIMEOUT_S} s, found no {path}"
            )
        time.sleep(_POLL_S)
    connection = Client(("127.0.0.1", int(path.read_text())))
    connection.send_bytes(purpose.encode())
    return connection
