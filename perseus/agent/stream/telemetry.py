"""Telemetry for the coordinator: numbered, kept until acknowledged, resent after a reconnect.

A batch that the coordinator refuses is dropped and counted as dropped.

Pure. Memory is bounded: the ring holds `CAPACITY` batches and about `CAPACITY_BYTES`; when it is full, it
drops (and counts) the oldest. At most `WINDOW` batches are in flight at a time, since HTTP/2 itself applies
back-pressure only after megabytes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, takewhile

from perseus.agent.rank.messages import Telemetry

CAPACITY = 4096
"""Batches kept: some minutes of a node's ranks without a coordinator."""

CAPACITY_BYTES = 64 * 1024 * 1024
"""Their largest size, estimated from their rows: an iteration may have thousands."""

# Sizes of a batch, of a row with its numbers as Python objects, and of a number.
_BATCH_BYTES = 500
_ROW_BYTES = 250
_NUMBER_BYTES = 32

WINDOW = 64
"""Batches sent and not yet acknowledged."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Telemetry with its number within the agent instance, from 1."""

    sequence: int
    telemetry: Telemetry
    dropped_batch_count: int


class TelemetryRing:
    """All telemetry of an agent instance that the coordinator has not acknowledged."""

    def __init__(
        self, capacity: int = CAPACITY, window: int = WINDOW, capacity_bytes: int = CAPACITY_BYTES
    ) -> None:
        self._kept: deque[tuple[int, Telemetry]] = deque()
        self._kept_bytes = 0
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._window = window
        self._sequence = 0
        self._sent_sequence = 0
        self._acknowledged_sequence = 0
        self._dropped_batch_count = 0
        self.batch_count = 0
        """How many batches were appended."""

    @property
    def sequence(self) -> int:
        """Number of the latest batch, 0 before the first."""
        return self._sequence

    @property
    def kept_count(self) -> int:
        """The number of batches not acknowledged."""
        return len(self._kept)

    @property
    def jobs(self) -> set[str]:
        """The jobs of the batches not acknowledged."""
        return {telemetry.rank.job_id for _, telemetry in self._kept}

    @property
    def dropped_batch_count(self) -> int:
        """The number of batches dropped for lack of room or refused."""
        return self._dropped_batch_count

    def append(self, telemetry: Telemetry) -> None:
        """Number and keep a batch, dropping the oldest if there is no room."""
        self._sequence += 1
        self.batch_count += 1
        self._kept.append((self._sequence, telemetry))
        self._kept_bytes += size_bytes(telemetry)
        while len(self._kept) > self._capacity or (
            self._kept_bytes > self._capacity_bytes and len(self._kept) > 1
        ):
            self._drop_oldest()
            self._dropped_batch_count += 1

    def sendable(self) -> list[Batch]:
        """Return the batches to send now, oldest first; they then count as sent."""
        in_flight_count = sum(1 for _ in takewhile(lambda kept: kept[0] <= self._sent_sequence, self._kept))
        batches = [
            Batch(sequence, telemetry, self._dropped_batch_count)
            for sequence, telemetry in islice(self._kept, in_flight_count, self._window)
        ]
        if batches:
            self._sent_sequence = batches[-1].sequence
        return batches

    def acknowledge(self, sequence: int) -> None:
        """Drop all batches up to `sequence`, which are stored. Raises ValueError if that was never sent."""
        if sequence > self._sequence:
            raise ValueError(
                f"telemetry: expected an acknowledgement up to {self._sequence}, found {sequence}"
            )
        self._acknowledged_sequence = max(self._acknowledged_sequence, sequence)
        while self._kept and self._kept[0][0] <= self._acknowledged_sequence:
            self._drop_oldest()

    def refuse(self, sequence: int) -> int | None:
        """Drop a refused batch; return the number of dropped batches, None if the batch is not kept."""
        for index, (kept, telemetry) in enumerate(self._kept):
            if kept == sequence:
                del self._kept[index]
                self._kept_bytes -= size_bytes(telemetry)
                self._dropped_batch_count += 1
                return self._dropped_batch_count
            if kept > sequence:
                break
        return None

    def rewind(self) -> None:
        """Start a new stream: resend everything not acknowledged."""
        self._sent_sequence = self._acknowledged_sequence

    def split(self, is_moved: Callable[[Telemetry], bool]) -> "TelemetryRing":
        """Move batches into a ring of their own, whose numbers go on from here."""
        moved = TelemetryRing(self._capacity, self._window, self._capacity_bytes)
        moved._sequence = self._sequence
        kept, self._kept, self._kept_bytes = self._kept, deque(), 0
        for each in kept:
            ring = moved if is_moved(each[1]) else self
            ring._kept.append(each)
            ring._kept_bytes += size_bytes(each[1])
        return moved

    def _drop_oldest(self) -> None:
        _, telemetry = self._kept.popleft()
        self._kept_bytes -= size_bytes(telemetry)


def size_bytes(telemetry: Telemetry) -> int:
    """Estimate the memory of a batch, in bytes."""
    row_count, number_count = len(telemetry.iterations) + len(telemetry.computations), 0
    if (energy := telemetry.energy) is not None:
        row_count += len(energy.samples) + len(energy.undetermined)
        number_count = len(energy.power_information) + len(energy.power_information_vector)
    return _BATCH_BYTES + _ROW_BYTES * row_count + _NUMBER_BYTES * number_count
