"""When the computations of an iteration begin and end: predicted from the last iterations under a plan. Pure.

Marks re-phase every prediction: what lies ahead is counted from the mark that came last, by the durations and
the gaps that were seen at each position of the order. A duration is the median of the last ones, so that one
iteration in which something happened moves nothing. A gap is the shortest of the last ones: it is spent
waiting for others, who may be quicker this time, and a clock must not be late for that.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

_ITERATIONS_KEPT = 8
_MIN_ITERATIONS = 2


@dataclass(frozen=True, slots=True)
class Prediction:
    """A computation that lies ahead; the end is None as long as its duration is not known.

    `position`: in the order, which goes on with the next iteration's: `computation_count` is its first.
    """

    position: int
    begin_s: float
    end_s: float | None


class Timetable:
    """The order's computations under one plan.

    What lies between two iterations is no matter of the plan's: it is taken over from the timetable `before`,
    and so is what is long, as long as nothing else is known.
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
        """The computation at a position has begun."""
        if self._ended is not None and (self._ended[0] + 1) % self._count == position:
            self._gaps_s[position].append(time_s - self._ended[1])
        self._begun, self._ended = (position, time_s), None

    def end(self, position: int, time_s: float) -> None:
        """The computation at a position has ended."""
        if self._begun is not None and self._begun[0] == position:
            self._durations_s[position].append(time_s - self._begun[1])
        self._begun, self._ended = None, (position, time_s)

    def interrupt(self) -> None:
        """What comes now is not to order: nothing follows from it."""
        self._begun = self._ended = None

    def duration_s(self, position: int) -> float | None:
        """How long the computation takes; None if it was not seen often enough."""
        durations_s = self._durations_s[position]
        if len(durations_s) < _MIN_ITERATIONS:
            return None
        return sorted(durations_s)[(len(durations_s) - 1) // 2]

    def gap_s(self, position: int) -> float:
        """How long the GPU waits at least before the computation; 0 if that is not known."""
        gaps_s = self._gaps_s[position]
        return min(gaps_s) if len(gaps_s) >= _MIN_ITERATIONS else 0.0

    def longest_s(self) -> float | None:
        """The longest that a computation, or the wait before one of the same iteration, took of late.

        Of the timetable before as long as that is not known of all, None if that has none.
        """
        if not all(self._durations_s):
            return self._longest_before_s
        within = [*self._durations_s, *self._gaps_s[1:]]
        return max((max(spans_s) for spans_s in within if spans_s), default=None)

    def after_begin(self, position: int, time_s: float) -> Iterator[Prediction]:
        """What comes after a computation that has just begun; unknown, it may end at once."""
        return self._ahead(position, time_s + (self.duration_s(position) or 0.0))

    def after_end(self, position: int, time_s: float) -> Iterator[Prediction]:
        """What comes after a computation that has just ended. Ends with one whose duration is not known."""
        return self._ahead(position, time_s)

    def from_start(self, time_s: float) -> Iterator[Prediction]:
        """What comes in an iteration that has just begun; its first computation may begin at once."""
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
