"""Logs that the event loop is stuck, and where: the loop itself can't while it is.

The loop serves health, so while it is stuck, every health check runs into its deadline, as it should. The
watchdog's thread adds the reason.
"""

import sys
import threading
import time
import traceback
from types import TracebackType

import structlog

log = structlog.get_logger(__name__)

_CHECKS = 4
"""Number of checks within the limit."""


class Watchdog:
    """Watches the thread that makes it, for the length of a `with` block; that thread must call `reset`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._watched = threading.get_ident()
        self._reset_s = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def reset(self) -> None:
        """Note that the loop runs."""
        self._reset_s = time.monotonic()

    def __enter__(self) -> "Watchdog":
        self.reset()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        is_stuck = False
        pause_s = self._limit_s / _CHECKS
        checked_s = time.monotonic()
        while not self._over.wait(pause_s):
            before_s, checked_s = checked_s, time.monotonic()
            silent_s = checked_s - self._reset_s
            if checked_s - before_s > 2 * pause_s:
                continue  # this thread stood still as well: the process was stopped, not the loop
            if silent_s <= self._limit_s:
                if is_stuck:
                    log.warning("event loop runs again")
                is_stuck = False
            elif not is_stuck:
                is_stuck = True
                frame = sys._current_frames().get(self._watched)
                log.error(
                    "event loop stuck",
                    silent_s=round(silent_s, 3),
                    stack="".join(traceback.format_stack(frame)) if frame is not None else "",
                )
