"""Every event's time at the corners of the frontier, stored compactly.

From one corner to the next, most events move along with the last one or not at all, and few move by less. So
each step is a bit per event and a list of exceptions, and every 32nd corner stores all times to start from.
Where even that takes too much memory, only evenly spaced corners are kept, and times between two of them are
interpolated linearly. The result is also a relaxed plan, which costs a little more than the best.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]

_SPACING = 32
"""Steps between the corners that store all times."""

_FIRST_THINNED_SPACING = 4
"""Steps between the corners that are kept once all take too much memory; doubled as often as needed."""

_LINE_BITS = 9
"""Bits of an interpolation's fraction: few enough to multiply moves of 2^53 ps exactly."""


class EventTimes(Protocol):
    """The events' times from the slowest corner to the fastest."""

    def until(self, iteration_time_ps: int) -> Int64Array:
        """Return every event's time in ps, in a relaxed plan of at most that iteration time.

        The iteration time must lie between those of the fastest and the slowest corner. The array is a copy.
        """

    @property
    def byte_count(self) -> int:
        """Memory use in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The events' moves from one corner to the next.

    Attributes:
        whole_ps: the move of events whose bit is set.
        bits: one per event, eight to the byte.
        others, others_ps: indices and moves of the events that move by less.
        event_count: number of events.
    """

    whole_ps: int
    bits: NDArray[np.uint8]
    others: NDArray[np.int32]
    others_ps: Int64Array
    event_count: int

    @property
    def moves_ps(self) -> Int64Array:
        """Each event's move toward earlier times."""
        moves_ps = np.unpackbits(self.bits, count=self.event_count).astype(np.int64) * self.whole_ps
        moves_ps[self.others] = self.others_ps
        return moves_ps

    @property
    def byte_count(self) -> int:
        """Memory use in bytes."""
        return self.bits.nbytes + self.others.nbytes + self.others_ps.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class AllCorners:
    """The events' times at every corner.

    Attributes:
        written_out_ps: all times at corners 0, 32, 64 …
        steps: from each corner to the next.
        iteration_times_ps: of each corner.
    """

    written_out_ps: Sequence[Int64Array]
    steps: Sequence[Step]
    iteration_times_ps: Sequence[int]

    def at(self, corner: int) -> Int64Array:
        """Return a copy of every event's time in ps."""
        times_ps = self.written_out_ps[corner // _SPACING].copy()
        for step in self.steps[corner // _SPACING * _SPACING : corner]:
            times_ps -= step.moves_ps
        return times_ps

    def until(self, iteration_time_ps: int) -> Int64Array:
        """Return every event's time in ps in the best plan, which takes exactly that time."""
        after = _first_within(self.iteration_times_ps, iteration_time_ps)
        if after == 0:
            return self.at(0)
        left_ps = self.iteration_times_ps[after - 1] - iteration_time_ps
        times_ps = self.at(after - 1)
        times_ps -= np.minimum(self.steps[after - 1].moves_ps, left_ps)
        return times_ps

    @property
    def byte_count(self) -> int:
        """Memory use in bytes."""
        return sum(some.nbytes for some in self.written_out_ps) + sum(step.byte_count for step in self.steps)


@dataclass(frozen=True, slots=True, eq=False)
class SomeCorners:
    """The events' times at some corners, the slowest and the fastest among them.

    Attributes:
        times_ps: the events' times at each of them.
    """

    times_ps: Sequence[Int64Array]

    def until(self, iteration_time_ps: int) -> Int64Array:
        """Return every event's time in ps in an interpolated plan of at most that time."""
        after = _first_within([int(times_ps[-1]) for times_ps in self.times_ps], iteration_time_ps)
        if after == 0:
            return self.times_ps[0].copy()
        slower, faster = self.times_ps[after - 1], self.times_ps[after]
        part = int(slower[-1]) - iteration_time_ps << _LINE_BITS
        part = -(-part // int(slower[-1] - faster[-1]))
        # Rounding all down keeps every minimum distance of whole picoseconds between two events.
        return slower + ((faster - slower) * part >> _LINE_BITS)

    @property
    def byte_count(self) -> int:
        """Memory use in bytes."""
        return sum(some.nbytes for some in self.times_ps)


def _first_within(falling_ps: Sequence[int], iteration_time_ps: int) -> int:
    """Return the first corner that is no slower than that."""
    return bisect_left(falling_ps, -iteration_time_ps, key=lambda time_ps: -time_ps)


class EventTimesRecorder:
    """Records steps in about ``max_bytes``, or in two corners if these take more."""

    def __init__(self, first_ps: Int64Array, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._byte_count = first_ps.nbytes
        self._iteration_times_ps = [int(first_ps[-1])]
        self._written_out_ps = [first_ps]
        self._last_ps = first_ps
        self._steps: list[Step] = []
        self._thinned_spacing = 0
        """Steps between the kept corners once single steps are dropped; 0 before."""

    def record(self, moves_ps: Int64Array, times_ps: Int64Array) -> None:
        """Add a step: each event's move and its time afterwards. The last event moves farthest."""
        self._iteration_times_ps.append(int(times_ps[-1]))
        self._last_ps = times_ps
        if not self._thinned_spacing:
            whole = moves_ps == moves_ps[-1]
            others = np.flatnonzero((moves_ps > 0) & ~whole).astype(np.int32)
            step = Step(int(moves_ps[-1]), np.packbits(whole), others, moves_ps[others], len(moves_ps))
            self._steps.append(step)
            self._byte_count += step.byte_count
        if (len(self._iteration_times_ps) - 1) % (self._thinned_spacing or _SPACING) == 0:
            self._written_out_ps.append(times_ps)
            self._byte_count += times_ps.nbytes
        while self._byte_count > self._max_bytes and (self._steps or len(self._written_out_ps) > 1):
            self._thin_out()

    def finish(self) -> EventTimes:
        """Return the recorded times, or those that were kept."""
        if not self._thinned_spacing:
            return AllCorners(
                tuple(self._written_out_ps), tuple(self._steps), tuple(self._iteration_times_ps)
            )
        kept = self._written_out_ps
        if kept[-1][-1] > self._last_ps[-1]:
            kept.append(self._last_ps)
        return SomeCorners(tuple(kept))

    def _thin_out(self) -> None:
        if self._thinned_spacing:
            self._thinned_spacing *= 2
            self._written_out_ps = self._written_out_ps[::2]
        else:
            self._thinned_spacing = _FIRST_THINNED_SPACING
            all_corners = AllCorners(self._written_out_ps, self._steps, self._iteration_times_ps)
            corners = range(0, len(self._iteration_times_ps), _FIRST_THINNED_SPACING)
            self._written_out_ps = [all_corners.at(corner) for corner in corners]
            self._steps = []
        self._byte_count = sum(some.nbytes for some in self._written_out_ps)
