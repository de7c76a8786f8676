"""What is said of a coordinator that is not there: every attempt fails for the same reason, most often."""

import time
from collections.abc import Callable

import structlog

from perseus.seldom import Seldom

AGAIN_S = 300.0
"""An outage that lasts is told of again after so long: a log that is silent would mean that it is over."""
_MOST = 16


class Outage:
    """Logs each reason once, again once in a while with how often it was left out, and anew after `end`."""

    def __init__(
        self, log: structlog.stdlib.BoundLogger, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._seldom = Seldom(AGAIN_S, _MOST, monotonic)

    def warn(self, event: str, reason: str, **details: object) -> None:
        """Warn of an attempt that has failed and is followed by another."""
        self._tell(self._log.warning, event, reason, details)

    def error(self, event: str, reason: str, *, exc_info: bool = False, **details: object) -> None:
        """Say what somebody has to see to; with the traceback of the exception at hand, if that is wanted."""
        self._tell(self._log.error, event, reason, details | ({"exc_info": True} if exc_info else {}))

    def end(self) -> None:
        """The coordinator is there: what comes after it is news."""
        self._seldom.forget()

    def _tell(self, say: Callable[..., object], event: str, reason: str, details: dict[str, object]) -> None:
        if (more := self._seldom.due(event, reason)) is not None:
            say(event, reason=reason, **details, **more)
