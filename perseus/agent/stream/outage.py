"""What is said of a coordinator that is not there: every attempt fails for the same reason, most often."""

import time
from collections.abc import Callable

import structlog

AGAIN_S = 300.0
"""An outage that lasts is told of again after so long: a log that is silent would mean that it is over."""
_MOST = 16


class Outage:
    """Logs each reason once, again once in a while with how often it was left out, and anew after `end`."""

    def __init__(
        self, log: structlog.stdlib.BoundLogger, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._monotonic = monotonic
        self._told: dict[tuple[str, str], tuple[float, int]] = {}

    def warn(self, event: str, reason: str, **details: object) -> None:
        """Warn of an attempt that has failed and is followed by another."""
        self._tell(self._log.warning, event, reason, details)

    def error(self, event: str, reason: str, *, exc_info: bool = False, **details: object) -> None:
        """Say what somebody has to see to; with the traceback of the exception at hand, if that is wanted."""
        self._tell(self._log.error, event, reason, details | ({"exc_info": True} if exc_info else {}))

    def end(self) -> None:
        """The coordinator is there: what comes after it is news."""
        self._told.clear()

    def _tell(self, say: Callable[..., object], event: str, reason: str, details: dict[str, object]) -> None:
        now_s = self._monotonic()
        told_at_s, left_out = self._told.get((event, reason), (-AGAIN_S, 0))
        if now_s - told_at_s < AGAIN_S:
            self._told[event, reason] = (told_at_s, left_out + 1)
            return
        self._told.pop((event, reason), None)
        while len(self._told) >= _MOST:
            self._told.pop(next(iter(self._told)))
        self._told[event, reason] = (now_s, 0)
        more = {"left_out": left_out} if left_out else {}
        say(event, reason=reason, **details, **more)
