"""One response for all simultaneous scrapes: readings and text made for one serve the others.

The readings are taken on the event loop, in batches; they are written in a thread, as that time grows with
the number of series, and the loop must serve agents.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from perseus.metrics.exposition import render
from perseus.metrics.readings import Readings

FRESH_S = 1.0
"""How long a response serves: more frequent scrapes get the same one, at no cost."""

_MAX_FORMATS = 8
"""How many formats of a response are kept; a scraper chooses one by its header."""


class Scrape:
    """Answers scrapes with the readings of `collect`."""

    def __init__(
        self, collect: Callable[[], Awaitable[Readings]], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._collect = collect
        self._monotonic = monotonic
        self._turn = asyncio.Lock()
        self._taken_s = float("-inf")
        self._answers: dict[str, tuple[bytes, str]] = {}
        self._readings = Readings()

    async def answer(self, accept: str) -> tuple[bytes, str]:
        """Return the body, and its content type, for an Accept header."""
        async with self._turn:
            if self._monotonic() - self._taken_s >= FRESH_S:
                self._readings = await self._collect()
                self._taken_s = self._monotonic()
                self._answers.clear()
            if (known := self._answers.get(accept)) is not None:
                return known
            answer = await asyncio.to_thread(render, self._readings, accept)
            if len(self._answers) < _MAX_FORMATS:
                self._answers[accept] = answer
            return answer
