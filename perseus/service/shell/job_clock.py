"""The time that jobs live by. It stands still while the coordinator itself does.

Leases, and the patience with jobs that report nothing, are about what agents say. Where the event loop
stands still (a long action, a machine that is suspended, a process that is stopped), what they said meanwhile
waits to be read, and nobody is to pay for that. So the coordinator ticks, and the time by which a tick comes
late is taken out of this clock. Whoever asks for the time before that tick has come sees it too: while the
loop runs, somebody asks at least once a period. Where agents say more than the coordinator takes in time,
what they say is kept waiting as well, and as that wait grows, this clock stands still. Pure, but for the
clock that it is given.
"""

from collections.abc import Callable

TOLERANCE_S = 0.25
"""Lateness that is nothing to speak of."""


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
        # What was told while a tick was late can't be taken back: then it stands until it is true.
        self._last_s = max(self._last_s, seen_s - self._stood_s)
        return self._last_s

    def tick(self, kept_s: float = 0.0) -> float:
        """Take note that the loop runs, a period after it did last; return how late that is, seconds.

        `kept_s`: for how long what agents say is kept waiting now. Only growth is credited: who is heard
        after the same wait every time is heard as often as it speaks.
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
