"""Every event's time at every corner of the frontier, in little room.

From one corner to the next most events move along with the last one or not at all, and few by less. So each
step is a bit per event and a list of the exceptions, with all times written out at every few corners to start
from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]

_SPACING = 32
"""Steps between the corners that are written out."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """From one corner to the next: how far the events move down.

    Attributes:
        whole_ps: by how much those move whose bit is set.
        bits: one per event, eight to the byte.
        others, others_ps: the indices of the events that move by less, and by how much.
        event_count: number of events.
    """

    whole_ps: int
    bits: NDArray[np.uint8]
    others: NDArray[np.int32]
    others_ps: Int64Array
    event_count: int

    @property
    def moves_ps(self) -> Int64Array:
        """How far each event moves down."""
        moves_ps = np.unpackbits(self.bits, count=self.event_count) * np.int64(self.whole_ps)
        moves_ps[self.others] = self.others_ps
        return moves_ps

    @property
    def byte_count(self) -> int:
        """What it takes in memory."""
        return self.bits.nbytes + self.others.nbytes + self.others_ps.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class EventTimes:
    """The events' times, corner by corner.

    Attributes:
        written_out_ps: the times at corners 0, 32, 64 …
        steps: from each corner to the next.
    """

    written_out_ps: Sequence[Int64Array]
    steps: Sequence[Step]

    def at(self, corner: int) -> Int64Array:
        """Return every event's time in ps, in an array of the caller's own."""
        times_ps = self.written_out_ps[corner // _SPACING].copy()
        for step in self.steps[corner // _SPACING * _SPACING : corner]:
            times_ps -= step.moves_ps
        return times_ps

    @property
    def byte_count(self) -> int:
        """What it all takes in memory."""
        return sum(some.nbytes for some in self.written_out_ps) + sum(step.byte_count for step in self.steps)


class EventTimesRecorder:
    """Takes the steps down as they are made."""

    def __init__(self, first_ps: Int64Array) -> None:
        self._written_out_ps = [first_ps]
        self._steps: list[Step] = []

    def record(self, moves_ps: Int64Array, times_ps: Int64Array) -> None:
        """Add a step: how far each event moved down, and where that brought it. The last moves farthest."""
        whole = moves_ps == moves_ps[-1]
        others = np.flatnonzero((moves_ps > 0) & ~whole).astype(np.int32)
        step = Step(int(moves_ps[-1]), np.packbits(whole), others, moves_ps[others], len(moves_ps))
        self._steps.append(step)
        if len(self._steps) % _SPACING == 0:
            self._written_out_ps.append(times_ps)

    def finish(self) -> EventTimes:
        """Return all that was recorded."""
        return EventTimes(tuple(self._written_out_ps), tuple(self._steps))
