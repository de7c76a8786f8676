"""Telemetry on its way to the coordinator: numbered, kept until acknowledged, sent again after a reconnect.

A batch that the coordinator refuses is dropped, and counted as such.

Pure. Memory is bounded twice: the ring holds `CAPACITY` batches, of which the oldest is dropped (and counted)
when it is full; and at most `WINDOW` batches are under way at a time, since HTTP/2 itself pushes back only
after megabytes.
"""

from collections import deque
from dataclasses import dataclass
from itertools import islice, takewhile

from perseus.agent.rank.messages import Telemetry

CAPACITY = 4096
"""Batches kept: some minutes of a node's ranks without a coordinator."""

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

    def __init__(self, capacity: int = CAPACITY, window: int = WINDOW) -> None:
        self._kept: deque[tuple[int, Telemetry]] = deque()
        self._capacity = capacity
        self._window = window
        self._sequence = 0
        self._sent_sequence = 0
        self._acknowledged_sequence = 0
        self._dropped_batch_count = 0

    @property
    def sequence(self) -> int:
        """Number of the latest batch, 0 before the first."""
        return self._sequence

    def append(self, telemetry: Telemetry) -> None:
        """Number and keep it, at the cost of the oldest where there is no room."""
        self._sequence += 1
        if len(self._kept) == self._capacity:
            self._kept.popleft()
            self._dropped_batch_count += 1
        self._kept.append((self._sequence, telemetry))

    def sendable(self) -> list[Batch]:
        """What is to be sent now, oldest first; it then counts as sent."""
        in_flight_count = sum(1 for _ in takewhile(lambda kept: kept[0] <= self._sent_sequence, self._kept))
        batches = [
            Batch(sequence, telemetry, self._dropped_batch_count)
            for sequence, telemetry in islice(self._kept, in_flight_count, self._window)
        ]
        if batches:
            self._sent_sequence = batches[-1].sequence
        return batches

    def acknowledge(self, sequence: int) -> None:
        """Everything up to `sequence` is stored. ValueError if that was never sent."""
        if sequence > self._sequence:
            raise ValueError(
                f"telemetry: expected an acknowledgement up to {self._sequence}, found {sequence}"
            )
        self._acknowledged_sequence = max(self._acknowledged_sequence, sequence)
        while self._kept and self._kept[0][0] <= self._acknowledged_sequence:
            self._kept.popleft()

    def refuse(self, sequence: int) -> int | None:
        """Drop a batch that the coordinator refuses; return how many were by now, None if it is not kept."""
        for index, (kept, _) in enumerate(self._kept):
            if kept == sequence:
                del self._kept[index]
                self._dropped_batch_count += 1
                return self._dropped_batch_count
            if kept > sequence:
                break
        return None

    def rewind(self) -> None:
        """A new stream: everything not acknowledged is to be sent again."""
        self._sent_sequence = self._acknowledged_sequence
