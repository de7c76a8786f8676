"""A log that tells the like at most once in a period, however often it happens."""

import re
import time
from collections.abc import Callable, Hashable

import structlog


class RateLimitedLog:
    """Logs each kind of event once in a period; the next time with how often it was `left_out` since.

    Args:
        log: where it is logged.
        period_s: between two times that the like is logged.
        max_kinds: kinds that are remembered; the one that was logged longest ago makes room for another.
        monotonic: the time in seconds, which never goes back.
    """

    def __init__(
        self,
        log: structlog.stdlib.BoundLogger,
        period_s: float = 300.0,
        max_kinds: int = 256,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._period_s = period_s
        self._max_kinds = max_kinds
        self._monotonic = monotonic
        self._logged: dict[Hashable, tuple[float, int]] = {}

    def warning(self, event: str, *kind: Hashable, **details: object) -> None:
        """Warn, unless the like was logged a moment ago.

        `kind` tells the like from others, beside the event; without one the details do. Row numbers in
        brackets do not.
        """
        if (more := self._due(event, kind, details)) is not None:
            self._log.warning(event, **details, **more)

    def error(self, event: str, *kind: Hashable, **details: object) -> None:
        """Log an error, as `warning` does."""
        if (more := self._due(event, kind, details)) is not None:
            self._log.error(event, **details, **more)

    def reset(self) -> None:
        """Let everything be news again."""
        self._logged.clear()

    def _due(
        self, event: str, kind: tuple[Hashable, ...], details: dict[str, object]
    ) -> dict[str, int] | None:
        """Note one more; None if it is not due, else what belongs to it: how many were left out."""
        parts = kind or (repr(details),)
        key = (event, *(re.sub(r"\[\d+\]", "", part) if isinstance(part, str) else part for part in parts))
        now_s = self._monotonic()
        logged_at_s, left_out = self._logged.get(key, (-self._period_s, 0))
        if now_s - logged_at_s < self._period_s:
            self._logged[key] = (logged_at_s, left_out + 1)
            return None
        self._logged.pop(key, None)
        while len(self._logged) >= self._max_kinds:
            self._logged.pop(next(iter(self._logged)))
        self._logged[key] = (now_s, 0)
        return {"left_out": left_out} if left_out else {}
