"""Detects ramps on a feed, down and up, with their beginning and end. Pure."""

import enum
import math

from perseus.grid.dsx_flex.values import FeedEvent, FeedReading

_DIGITS = 1e-6
"""Relative change of a limit below which it counts as unchanged."""


class _Phase(enum.Enum):
    STEADY = enum.auto()
    DOWN = enum.auto()
    UP = enum.auto()


_START = {_Phase.DOWN: FeedEvent.START_RAMP_DOWN, _Phase.UP: FeedEvent.START_RAMP_UP}
_END = {_Phase.DOWN: FeedEvent.END_RAMP_DOWN, _Phase.UP: FeedEvent.END_RAMP_UP}


class Transitions:
    """Follows the allowed power of one feed: the lower of its limit and its power cap.

    A ramp that was in progress before the first reading causes no event.

    Attributes:
        since_s: when the present ramp or target began; None without either.
    """

    def __init__(self) -> None:
        self.since_s: float | None = None
        self._phase = _Phase.STEADY
        self._allowed_w: float | None = None

    @property
    def in_flight(self) -> bool:
        """Whether power is on its way to or from a limit."""
        return self._phase is not _Phase.STEADY

    def take(self, reading: FeedReading, *, has_target: bool, now_s: float) -> list[FeedEvent]:
        """Handle a reading; return the events since the previous one, in order."""
        allowed_w = min(reading.limit_w, reading.power_cap_w)
        before_w, self._allowed_w = self._allowed_w, allowed_w
        wanted = _moved(before_w, allowed_w)
        events: list[FeedEvent] = []
        if wanted is not _Phase.STEADY and wanted is not self._phase:
            self._phase = wanted
            events.append(_START[wanted])
        elif wanted is _Phase.STEADY and self.in_flight and not reading.in_transition:
            events.append(_END[self._phase])
            self._phase = _Phase.STEADY
        goes_on = has_target or self.in_flight
        if not goes_on:
            self.since_s = None
        elif self.since_s is None:
            self.since_s = now_s
        return events


def _moved(before_w: float | None, allowed_w: float) -> _Phase:
    if before_w is None or before_w == allowed_w:
        return _Phase.STEADY
    if math.isfinite(before_w) and math.isclose(before_w, allowed_w, rel_tol=_DIGITS):
        return _Phase.STEADY
    return _Phase.DOWN if allowed_w < before_w else _Phase.UP
