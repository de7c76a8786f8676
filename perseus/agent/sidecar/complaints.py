"""Warnings about what peers do wrong, which must not fill the log: a few for each user, the rest counted."""

import time
from collections.abc import Callable

import structlog

_PERIOD_S = 10.0
_MOST = 256


class Complaints:
    """Logs a complaint of each kind about each user at most once in a while, with how many were left out."""

    def __init__(
        self, log: structlog.stdlib.BoundLogger, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._monotonic = monotonic
        self._told: dict[tuple[int, str], tuple[float, int]] = {}

    def complain(self, uid: int, event: str, reason: str, **details: object) -> None:
        """Warn about a user; `reason` is a stable one."""
        now_s = self._monotonic()
        key = (uid, reason)
        told_at_s, left_out = self._told.get(key, (-_PERIOD_S, 0))
        if now_s - told_at_s < _PERIOD_S:
            self._told[key] = (told_at_s, left_out + 1)
            return
        self._told.pop(key, None)
        while len(self._told) >= _MOST:
            self._told.pop(next(iter(self._told)))
        self._told[key] = (now_s, 0)
        more = {"left_out": left_out} if left_out else {}
        self._log.warning(event, uid=uid, reason=reason, **details, **more)
