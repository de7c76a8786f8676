"""Parts that the agent can do without: one that fails is logged, counted and started again."""

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
    """Return when a part is started again that has failed."""
    return Retry(_FIRST_DELAY_S, _MAX_DELAY_S, forget_after_s=_FORGET_S)


class OptionalParts:
    """Those of an agent.

    Attributes:
        failure_counts: how often each has failed.
    """

    def __init__(self) -> None:
        self.failure_counts: Counter[str] = Counter()
        self._log = RateLimitedLog(_log)
        self._lock = threading.Lock()

    def failed(self, part: str, error: Exception) -> None:
        """Note that a part has failed, on whatever thread: nobody has foreseen the error."""
        with self._lock:
            self.failure_counts[part] += 1
            self._log.error("optional part failed", part, repr(error), part=part, exc_info=error)

    async def keep_running(self, part: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run a part to its end, again and again where it fails."""
        retry = part_retry()
        while True:
            try:
                await run()
                return
            except Exception as error:
                self.failed(part, error)
            await asyncio.sleep(retry.failed(time.monotonic()))
