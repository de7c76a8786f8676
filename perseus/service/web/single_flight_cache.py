"""A cache of answers that take long to make: each is made once for all, and kept in proportion to its
cost."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Value = TypeVar("Value")

MIN_FRESH_S = 1.0
"""How long an answer serves at least."""

MAX_FRESH_S = 10.0
"""And at most. In between it serves a hundred times as long as it took: that costs a hundredth of a core."""

_FRESH_PER_WORK = 100.0


@dataclass(slots=True)
class _Entry(Generic[Value]):
    value: Value | None = None
    fresh_until_s: float = float("-inf")
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class SingleFlightCache(Generic[Value]):
    """The latest answers, by their keys."""

    def __init__(self, limit: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Keep `limit` answers."""
        self._limit = limit
        self._monotonic = monotonic
        self._kept: OrderedDict[Hashable, _Entry[Value]] = OrderedDict()

    async def get(self, key: Hashable, make: Callable[[], Awaitable[Value]]) -> Value:
        """Return a fresh answer; concurrent callers with the same key wait for the same one.

        Raises:
            Exception: it could not be made. Other callers try again.
        """
        kept = self._kept.setdefault(key, _Entry())
        self._kept.move_to_end(key)
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)
        async with kept.turn:
            if kept.value is None or self._monotonic() >= kept.fresh_until_s:
                began_s = self._monotonic()
                kept.value = await make()
                now_s = self._monotonic()
                kept.fresh_until_s = now_s + min(
                    MAX_FRESH_S, max(MIN_FRESH_S, _FRESH_PER_WORK * (now_s - began_s))
                )
            return kept.value
