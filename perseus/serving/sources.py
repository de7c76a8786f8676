"""The intervals of an instance's processes, merged into one. Pure.

An engine may have several API servers, and data-parallel engines behind them. Tokens and latencies are each
process's own and add up. What runs and waits is an engine's, as the latest process reported it.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from itertools import chain

from perseus.serving.controller import MAX_STATS_AGE_S
from perseus.serving.stats import EngineStats

_MAX_PENDING = 8
"""Intervals of a source: 2 s, twice as long as statistics count."""


@dataclass(slots=True)
class _Source:
    engine_index: int
    heard_s: float
    pending: list[EngineStats] = field(default_factory=list)
    latest: EngineStats | None = None


class Sources:
    """What reports on one instance.

    Attributes:
        heard_s: when the latest interval came; -inf before the first.
        has_restarted: whether the engine has restarted since the last `take`.
    """

    def __init__(self) -> None:
        self.heard_s = float("-inf")
        self.has_restarted = False
        self._sources: dict[Hashable, _Source] = {}

    def join(self, source: Hashable, now_s: float, engine_index: int = 0) -> None:
        """Add a source; the first after none is a new process of the engine."""
        self.has_restarted |= not self._sources and self.heard_s > float("-inf")
        self._sources[source] = _Source(engine_index, now_s)

    def leave(self, source: Hashable) -> None:
        """Remove a source."""
        self._sources.pop(source, None)

    def report(self, source: Hashable, now_s: float, stats: EngineStats) -> None:
        """Add an interval of a source that has joined."""
        self.heard_s = now_s
        found = self._sources[source]
        found.heard_s, found.latest = now_s, stats
        found.pending.append(stats)
        del found.pending[:-_MAX_PENDING]  # nobody takes them while the instance is not controlled

    def take(self, now_s: float) -> EngineStats | None:
        """Return what all sources have reported since the last call.

        None if one of them has not reported since; if it has not for a second, nothing is known of the
        instance as a whole, and what others reported meanwhile is dropped.
        """
        self.has_restarted = False
        sources = self._sources.values()
        if any(now_s - each.heard_s >= MAX_STATS_AGE_S for each in sources):
            for each in sources:
                each.pending.clear()
        if not sources or not all(each.pending for each in sources):
            return None
        intervals = [each for source in sources for each in source.pending]
        engines: dict[int, EngineStats] = {}
        for source in sorted(sources, key=lambda each: each.heard_s):
            assert source.latest is not None
            engines[source.engine_index] = source.latest
        steps = [each.step_count for each in intervals]
        merged = replace(
            intervals[-1],
            length_s=sum(each.length_s for each in intervals) / len(self._sources),
            running_count=sum(each.running_count for each in engines.values()),
            waiting_count=sum(each.waiting_count for each in engines.values()),
            kv_usage=sum(each.kv_usage for each in engines.values()) / len(engines),
            prompt_tokens=sum(each.prompt_tokens for each in intervals),
            generation_tokens=sum(each.generation_tokens for each in intervals),
            ttft=list(chain.from_iterable(each.ttft for each in intervals)),
            itl=list(chain.from_iterable(each.itl for each in intervals)),
            itl_sum_s=sum(each.itl_sum_s for each in intervals),
            step_count=None if None in steps else sum(each or 0 for each in steps),
        )
        for each in sources:
            each.pending.clear()
        return merged
