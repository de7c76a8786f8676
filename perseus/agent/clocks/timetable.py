"""Predict begins and ends of an iteration's computations, from the last iterations under a plan. Pure.

Each mark re-bases all predictions: they start at the latest mark, and add the observed durations and gaps of
each position in the order. A duration is the median of the last ones, so that one unusual iteration changes
nothing. A gap is the shortest of the last ones: the GPU waits for others, which may be quicker this time, and
the clock must not be late then.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

_ITERATIONS_KEPT = 8
_MIN_ITERATIONS = 2


@dataclass(frozen=True, slots=True)
class Prediction:
    """A future computation; the end is None while its duration is unknown.

    `position`: in the order, continued into the next iteration: `computation_count` is its first.
    """

    position: int
    begin_s: float
    end_s: float | None


class Timetable:
    """The order's computations under one plan.

    Gaps between iterations don't depend on the plan, so they are taken over from the timetable `before`, as
    is the longest span until it is known.
    """

    def __init__(self, computation_count: int, before: "Timetable | None" = None) -> None:
        self._count = computation_count
        self._durations_s = [deque[float](maxlen=_ITERATIONS_KEPT) for _ in range(computation_count)]
        self._gaps_s = [deque[float](maxlen=_ITERATIONS_KEPT) for _ in range(computation_count)]
        self._longest_before_s: float | None = None
        if before is not None and computation_count:
            self._gaps_s[0] = before._gaps_s[0]
            self._longest_before_s = before.longest_s()
        self._begun: tuple[int, float] | None = None
        self._ended: tuple[int, float] | None = None

    def begin(self, position: int, time_s: float) -> None:
        """Record the begin of the computation at a position."""
        if self._ended is not None and (self._ended[0] + 1) % self._count == position:
            self._gaps_s[position].append(time_s - self._ended[1])
        self._begun, self._ended = (position, time_s), None

    def end(self, position: int, time_s: float) -> None:
        """Record the end of the computation at a position."""
        if self._begun is not None and self._begun[0] == position:
            self._durations_s[position].append(time_s - self._begun[1])
        self._begun, self._ended = None, (position, time_s)

    def interrupt(self) -> None:
        """Break the sequence: the next mark is out of order."""
        self._begun = self._ended = None

    def duration_s(self, position: int) -> float | None:
        """Return the computation's duration; None after too few observations."""
        durations_s = self._durations_s[position]
        if len(durations_s) < _MIN_ITERATIONS:
            return None
        return sorted(durations_s)[(len(durations_s) - 1) // 2]

    def gap_s(self, position: int) -> float:
        """Return the shortest wait of the GPU before the computation; 0 if unknown."""
        gaps_s = self._gaps_s[position]
        return min(gaps_s) if len(gaps_s) >= _MIN_ITERATIONS else 0.0

    def longest_s(self) -> float | None:
        """Return the longest recent computation, or wait before one in the same iteration.

        Until all are known, it is that of the timetable before; None if that has none.
        """
        if not all(self._durations_s):
            return self._longest_before_s
        within = [*self._durations_s, *self._gaps_s[1:]]
        return max((max(spans_s) for spans_s in within if spans_s), default=None)

    def after_begin(self, position: int, time_s: float) -> Iterator[Prediction]:
        """Predict from a computation that has just begun; with unknown duration, it may end at once."""
        return self._ahead(position, time_s + (self.duration_s(position) or 0.0))

    def after_end(self, position: int, time_s: float) -> Iterator[Prediction]:
        """Predict from a computation that has just ended, up to one with unknown duration."""
        return self._ahead(position, time_s)

    def from_start(self, time_s: float) -> Iterator[Prediction]:
        """Predict an iteration that has just begun; its first computation may begin at once."""
        yield (first := self._prediction(0, time_s))
        if first.end_s is not None:
            yield from self._ahead(0, first.end_s)

    def _ahead(self, position: int, end_s: float) -> Iterator[Prediction]:
        last = position + self._count
        while position < last:
            position += 1
            prediction = self._prediction(position, end_s + self.gap_s(position % self._count))
            yield prediction
            if prediction.end_s is None:
                return
            end_s = prediction.end_s

    def _prediction(self, position: int, begin_s: float) -> Prediction:
        duration_s = self.duration_s(position % self._count)
        return Prediction(position, begin_s, None if duration_s is None else begin_s + duration_s)
