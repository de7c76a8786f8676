"""Warnings about what peers do wrong, which must not fill the log: a few for each user, the rest counted."""

import time
from collections.abc import Callable

import structlog

from perseus.seldom import Seldom

_PERIOD_S = 10.0
_MOST = 256


class Complaints:
    """Logs a complaint of each kind about each user at most once in a while, with how many were left out."""

    def __init__(
        self, log: structlog.stdlib.BoundLogger, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._seldom = Seldom(_PERIOD_S, _MOST, monotonic)

    def complain(self, uid: int, event: str, reason: str, **details: object) -> None:
        """Warn about a user; `reason` is a stable one."""
        if (more := self._seldom.due(uid, reason)) is not None:
            self._log.warning(event, uid=uid, reason=reason, **details, **more)
