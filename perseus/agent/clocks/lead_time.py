"""Lead times: how long before its need a clock must be requested, from observed sets and predictions. Pure.

The lead time is the clock's latency plus a margin. The latency runs from the begin of a set to the change of
the clock (the median of the clock's last sets; the median over all clocks while it has few sets). The margin
is common to all clocks: it covers further delays of sets (wake-ups, a set still in progress), and predictions
of the next computation's begin that were too late. Both vary, and a late raise costs time where an early one
costs a little energy. So the margin covers nine cases in ten, and grows at the next mark when raises are
late.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

from perseus.agent.clocks.sets import ClockSet

_ASSUMED_LATENCY_S = 0.020
_ASSUMED_DELAY_S = 0.001
_LATENCIES_KEPT = 16  # per clock
_MIN_SETS = 3  # sets of a clock, before it gets its own latency
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
        """The median latency over all clocks."""
        self._delay_s = _ASSUMED_DELAY_S
        self._error_s = 0.0

    @property
    def set_count(self) -> int:
        """The number of sets behind the median latency; 0 while it is assumed."""
        return len(self._recent_s)

    @property
    def margin_s(self) -> float:
        """The margin that is added to the latency."""
        return self._delay_s + self._error_s

    @property
    def reach_s(self) -> float:
        """Time until the set after the next one can be in force: until then, the next one must suffice."""
        return 2 * self.latency_s + self.margin_s

    def of(self, clock_mhz: int | None) -> float:
        """Return the lead time of a clock, in seconds."""
        return self._latencies_s.get(clock_mhz, self.latency_s) + self.margin_s

    def clock_set(self, done: ClockSet) -> None:
        """Record a completed set."""
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
        """Record by how much a computation began before its prediction (after it, if negative)."""
        self._errors_s.append(error_s)
        self._error_s = _enough(self._errors_s)


def _enough(values_s: Sequence[float]) -> float:
    return max(0.0, sorted(values_s)[int(_COVERED_SHARE * (len(values_s) - 1) + 0.5)])
