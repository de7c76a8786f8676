"""Judges whether another client of the driver holds a GPU's clock. Pure.

A locked clock can't be read back, nor does the driver report that another client replaced or reset it. So the
clock of a GPU that computes is compared with the one that the agent set last. One reading proves little: a
clock may be one step off (heat), or lower for a power cap. A difference counts once it lasts and no clock
event reason explains it.

At stock the GPU chooses its clock itself. There, only the same clock all the time, far below the highest one
that the GPU has reached, is a lock. Many models never reach the highest clock that they list, and setting a
clock above their reach is like stock.
"""

from collections import Counter, deque
from dataclasses import dataclass

from perseus.gpu import ClockEventReason

WINDOW_S = 5.0
"""How long a difference must last before it counts, and be gone before it no longer does."""

_MIN_READINGS = 8
_INTERVAL_S = 0.1
_BEGIN_SHARE, _END_SHARE = 0.5, 0.25
_TOLERANCE_MHZ = 30  # two steps of NVIDIA's clocks
_STOCK_SHARE = 0.9
_REACHABLE_SHARE = 0.85  # of the highest clock, until a higher one is read
_EXPLAINED = ClockEventReason.THROTTLED | ClockEventReason.SYNC_BOOST | ClockEventReason.DISPLAY_CLOCK_SETTING


@dataclass(frozen=True, slots=True)
class ForeignClock:
    """The clock that a GPU has, and the one that it should have; None for stock."""

    clock_mhz: int
    wanted_mhz: int | None


@dataclass(frozen=True, slots=True)
class _Reading:
    time_s: float
    clock: ForeignClock
    differs: bool
    is_explained: bool


class ForeignClockJudge:
    """Judges one GPU. `highest_mhz`: its highest clock at stock.

    Attributes:
        verdict: the clock at which another client holds the GPU; None if none does.
    """

    def __init__(self, highest_mhz: int) -> None:
        self.verdict: ForeignClock | None = None
        self._highest_mhz = highest_mhz
        self._reachable_mhz = _REACHABLE_SHARE * highest_mhz
        self._readings = deque[_Reading]()

    def read(self, time_s: float, clock_mhz: int, set_mhz: int | None, clock_event_reasons: int) -> bool:
        """Take the clock of a computing GPU; `set_mhz`: the one set last. Return whether it is another's."""
        is_lower = clock_mhz < self._lowest_mhz(set_mhz)
        is_higher = set_mhz is not None and clock_mhz > set_mhz + _TOLERANCE_MHZ
        is_explained = is_lower and bool(clock_event_reasons & _EXPLAINED)
        differs = is_higher or (is_lower and not is_explained)
        if not clock_event_reasons & _EXPLAINED:
            self._reachable_mhz = max(self._reachable_mhz, clock_mhz)
        if not self._readings or time_s >= self._readings[-1].time_s + _INTERVAL_S:
            self._readings.append(_Reading(time_s, ForeignClock(clock_mhz, set_mhz), differs, is_explained))
            while len(self._readings) > _MIN_READINGS and self._readings[1].time_s <= time_s - WINDOW_S:
                self._readings.popleft()
            self._judge()
        return differs and (self.verdict is not None or set_mhz is not None)

    def _lowest_mhz(self, set_mhz: int | None) -> float:
        """Return the lowest clock that a GPU may have by itself."""
        if set_mhz is not None and set_mhz <= self._reachable_mhz + _TOLERANCE_MHZ:
            return set_mhz - _TOLERANCE_MHZ
        return _STOCK_SHARE * min(self._reachable_mhz, set_mhz or self._highest_mhz)

    def _judge(self) -> None:
        readings = self._readings
        differing = [reading.clock for reading in readings if reading.differs]
        at_stock_mhz = [clock.clock_mhz for clock in differing if clock.wanted_mhz is None]
        if at_stock_mhz and max(at_stock_mhz) - min(at_stock_mhz) > _TOLERANCE_MHZ:
            differing = [clock for clock in differing if clock.wanted_mhz is not None]  # the GPU's own choice
        lasts = readings[-1].time_s - readings[0].time_s >= WINDOW_S
        if len(readings) < _MIN_READINGS or not lasts:
            return
        if len(differing) < _END_SHARE * len(readings):
            self.verdict = None
        elif len(differing) >= _BEGIN_SHARE * len(readings) and not any(
            each.is_explained for each in readings
        ):
            ((usual, _),) = Counter(differing).most_common(1)
            if self.verdict is None or _differ(usual, self.verdict):
                self.verdict = usual


def _differ(one: ForeignClock, other: ForeignClock) -> bool:
    """Tell whether verdicts are news to each other: a plan's wanted clock changes all the time."""
    is_at_stock, was_at_stock = one.wanted_mhz is None, other.wanted_mhz is None
    return is_at_stock is not was_at_stock or abs(one.clock_mhz - other.clock_mhz) > _TOLERANCE_MHZ
