"""Whether this machine is too busy for a demo: how late a process wakes up after a short sleep.

Ranks on emulated GPUs sleep while these compute, and until a neighbour's message comes, so late wake-ups make
iterations longer: two of a quarter of a millisecond are 2 % of a computation of 25 ms, and more than 2 % the
demo's plans may not cost. What is late all the time, as on some virtual machines, is so at stock, too.
"""

import os
import threading
import time
from collections.abc import Callable

MIN_LIMIT_S, MAX_LIMIT_S = 0.00025, 0.0005
"""Wake-ups later than a limit between these, twice the calmest ones, make a machine too busy."""

_SLEEP_S = 0.01
_SPAN_S = 10.0
_STARTING_COUNT = 2
"""Spans in which a demo's own processes start, which keeps a small machine busy."""


class Lateness:
    """Measures in a thread, as a context manager."""

    def __init__(
        self,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._spans_s: list[float] = []
        self._monotonic = monotonic
        self._sleep = sleep
        self._has_ended = False
        self._thread = threading.Thread(target=self._measure, name="lateness")

    def __enter__(self) -> "Lateness":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended = True
        self._thread.join()

    def measure_span(self) -> None:
        """Measure for 10 s, unless the context is left meanwhile."""
        begun_s, count = self._monotonic(), 0
        while (passed_s := self._monotonic() - begun_s) < _SPAN_S:
            if self._has_ended:
                return
            self._sleep(_SLEEP_S)
            count += 1
        self._spans_s.append(passed_s / max(1, count) - _SLEEP_S)

    def explain(self) -> str:
        """Return that the machine was too busy, with figures; empty if it was not."""
        spans_s = self._spans_s[_STARTING_COUNT:] or [0.0]
        late_s, limit_s = max(spans_s), max(MIN_LIMIT_S, min(2 * min(spans_s), MAX_LIMIT_S))
        if late_s <= limit_s:
            return ""
        return (
            f"this machine was too busy: for {_SPAN_S:g} s, processes woke up {1000 * late_s:.2f} ms late on "
            f"average, expected at most {1000 * limit_s:.2f} ms; its load is now "
            f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
        )

    def _measure(self) -> None:
        while not self._has_ended:
            self.measure_span()
