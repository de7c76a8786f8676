"""How long before it is needed a clock must be asked for: what sets and predictions have shown. Pure.

The lead is the latency of the clock, from the begin of a set to the change of the clock (the median of its
last sets; of those of all clocks, as long as it was hardly ever set), and a margin for all: how late sets
came on top of that (wake-ups, a set still under way), and how much too late the next computation's begin was
predicted. Both vary, and a raise that comes late costs time where one that comes early costs a little energy.
So the margin is enough for nine of ten, and grows with the next mark when raises turn out late.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

from perseus.agent.clocks.sets import ClockSet

_ASSUMED_LATENCY_S = 0.020
_ASSUMED_DELAY_S = 0.001
_LATENCIES_KEPT = 16  # per clock
_MIN_SETS = 3  # of a clock, for a latency of its own
_RECENT = 64  # sets, and predictions
_COVERED_SHARE = 0.9


class LeadTime:
    """One GPU's latencies, and the margin."""

    def __init__(self) -> None:
        self._recent_s = deque[float](maxlen=_RECENT)
        self._recent_by_clock_s: dict[int | None, deque[float]] = {}
        self._latencies_s: dict[int | None, float] = {}
        self._delays_s = deque([_ASSUMED_DELAY_S], maxlen=_RECENT)
        self._errors_s = deque([0.0], maxlen=_RECENT)
        self.latency_s = _ASSUMED_LATENCY_S
        """The median over all clocks."""
        self._delay_s = _ASSUMED_DELAY_S
        self._error_s = 0.0

    @property
    def set_count(self) -> int:
        """Of how many sets the latency is the median; 0 while it is assumed."""
        return len(self._recent_s)

    @property
    def margin_s(self) -> float:
        """What a lead has on top of the latency."""
        return self._delay_s + self._error_s

    @property
    def reach_s(self) -> float:
        """When the set after the one that is asked for now can be in force: until then, this one must do."""
        return 2 * self.latency_s + self.margin_s

    def of(self, clock_mhz: int | None) -> float:
        """The lead of a clock, seconds."""
        return self._latencies_s.get(clock_mhz, self.latency_s) + self.margin_s

    def clock_set(self, done: ClockSet) -> None:
        """A set was carried out."""
        self._recent_s.append(done.time_s - done.begun_at_s)
        self.latency_s = median(self._recent_s)
        own_s = self._recent_by_clock_s.setdefault(done.clock_mhz, deque(maxlen=_LATENCIES_KEPT))
        own_s.append(done.time_s - done.begun_at_s)
        if len(own_s) >= _MIN_SETS:
            self._latencies_s[done.clock_mhz] = median(own_s)
        latency_s = self._latencies_s.get(done.clock_mhz, self.latency_s)
        self._delays_s.append(done.time_s - done.due_s - latency_s)
        self._delay_s = _enough(self._delays_s)

    def mispredicted(self, error_s: float) -> None:
        """A computation began so much before the predicted moment (after it, if negative)."""
        self._errors_s.append(error_s)
        self._error_s = _enough(self._errors_s)


def _enough(values_s: Sequence[float]) -> float:
    return max(0.0, sorted(values_s)[int(_COVERED_SHARE * (len(values_s) - 1) + 0.5)])
