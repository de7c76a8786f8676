"""A log that reports similar events at most once in a period."""

import re
import time
from collections.abc import Callable, Hashable

import structlog


class RateLimitedLog:
    """Logs each kind of event once in a period; the next entry counts the omitted ones (`left_out`).

    Args:
        log: the underlying log.
        period_s: the time between two entries of a kind.
        max_kinds: the most kinds remembered; the one logged longest ago is dropped first.
        monotonic: the monotonic time in seconds.
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
        """Warn, unless the same kind was logged within the period.

        The event and `kind` identify the kind, or without one the event and the details. Row numbers in
        brackets are ignored.
        """
        if (more := self._due(event, kind, details)) is not None:
            self._log.warning(event, **details, **more)

    def error(self, event: str, *kind: Hashable, **details: object) -> None:
        """Log an error, as `warning` does."""
        if (more := self._due(event, kind, details)) is not None:
            self._log.error(event, **details, **more)

    def reset(self) -> None:
        """Forget all logged kinds."""
        self._logged.clear()

    def _due(
        self, event: str, kind: tuple[Hashable, ...], details: dict[str, object]
    ) -> dict[str, int] | None:
        """Count an event; return None if it is not due, else its extra details: the omitted count."""
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
