"""The clock of jobs. It stands still while the coordinator does.

Leases and timeouts of silent jobs depend on agents' messages. Where the event loop stands still (a long
action, a suspended machine, a stopped process), those messages wait to be read, and no job must suffer for
that. So the coordinator ticks, and this clock leaves out the time by which a tick is late. A reader of the
clock sees that before the tick has come: while the loop runs, the clock is read at least once a period. Where
agents send more than the coordinator takes in time, their messages wait as well, and while that wait grows,
this clock stands still. Pure, but for the clock that it is given.
"""

from collections.abc import Callable

TOLERANCE_S = 0.25
"""Lateness that is ignored."""


class JobClock:
    """A clock that never goes back; only differences count.

    Args:
        period_s: how long from one tick to the next.
        source: a clock that never goes back.
    """

    def __init__(self, period_s: float, source: Callable[[], float]) -> None:
        self._period_s = period_s
        self._source = source
        self._seen_s = self._last_s = source()
        self._stood_s = self._stood_since_tick_s = 0.0
        self._kept_s = 0.0
        self._due_s: float | None = None

    def now_s(self) -> float:
        """Return the time, seconds."""
        seen_s = self._source()
        if self._due_s is not None and (gap_s := seen_s - self._seen_s - self._period_s) > TOLERANCE_S:
            self._stand(gap_s)
        self._seen_s = seen_s
        # A time that was returned while a tick was late can't be taken back: the clock stands until it is
        # true.
        self._last_s = max(self._last_s, seen_s - self._stood_s)
        return self._last_s

    def tick(self, kept_s: float = 0.0) -> float:
        """Note that the loop runs, one period after the last tick; return how late this tick is, seconds.

        `kept_s` is how long agents' messages are kept waiting now. Only its growth is credited: an agent
        whose messages always wait equally long is heard as often as it sends.
        """
        seen_s = self._source()
        late_s = 0.0 if self._due_s is None else max(0.0, seen_s - self._due_s)
        if (unknown_s := late_s - self._stood_since_tick_s) > TOLERANCE_S:
            self._stand(unknown_s)
        if (grown_s := kept_s - self._kept_s) > TOLERANCE_S:
            self._stand(max(0.0, grown_s - self._stood_since_tick_s))
        if abs(grown_s) > TOLERANCE_S:
            self._kept_s = kept_s
        self._seen_s, self._due_s, self._stood_since_tick_s = seen_s, seen_s + self._period_s, 0.0
        return late_s

    def _stand(self, time_s: float) -> None:
        self._stood_s += time_s
        self._stood_since_tick_s += time_s
