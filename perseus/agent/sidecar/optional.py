"""Optional parts of the agent: one that fails is logged, counted and restarted."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import structlog

from perseus.rate_limited_log import RateLimitedLog
from perseus.retry import Retry

_log = structlog.get_logger(__name__)

_FIRST_DELAY_S, _MAX_DELAY_S, _FORGET_S = 1.0, 60.0, 300.0


def part_retry() -> Retry:
    """Return the retry policy for a failed part."""
    return Retry(_FIRST_DELAY_S, _MAX_DELAY_S, forget_after_s=_FORGET_S)


class OptionalParts:
    """The optional parts of an agent.

    Attributes:
        failure_counts: failures by part.
    """

    def __init__(self) -> None:
        self.failure_counts: Counter[str] = Counter()
        self._log = RateLimitedLog(_log)
        self._lock = threading.Lock()

    def failed(self, part: str, error: Exception) -> None:
        """Log and count an unforeseen failure of a part; any thread may call it."""
        with self._lock:
            self.failure_counts[part] += 1
            self._log.error("optional part failed", part, repr(error), part=part, exc_info=error)

    async def keep_running(self, part: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run a part to its end, restarting it after each failure."""
        retry = part_retry()
        while True:
            try:
                await run()
                return
            except Exception as error:
                self.failed(part, error)
            await asyncio.sleep(retry.failed(time.monotonic()))
