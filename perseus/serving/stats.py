"""What an engine reports of an interval, and the objectives for its latencies.

One type for both sources: a plug-in inside the engine sums up its steps, a scraper takes the differences of
two scrapes. Both send an interval at least 4 times a second, also while the engine is idle.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from perseus.serving.errors import ServingError

_OBJECTIVE = re.compile(r"p(\d{1,2}(?:\.\d+)?)\s*(?:<=|≤|<)?\s*(\d+(?:\.\d+)?)\s*(ms|s)")
_MAX_KV_USAGE = 1.01
"""A share, but for rounding."""


@dataclass(frozen=True, slots=True)
class LatencyCount:
    """`count` latencies from `lower_s` to `upper_s`: a histogram's bucket, or one value with both equal."""

    lower_s: float
    upper_s: float
    count: float

    def over(self, limit_s: float) -> float:
        """Return how many exceed a limit; in a bucket, its share, as in Prometheus' `histogram_quantile`."""
        if self.upper_s <= limit_s:
            return 0.0
        if self.lower_s >= limit_s or not isfinite(self.upper_s):
            return self.count
        return self.count * (self.upper_s - limit_s) / (self.upper_s - self.lower_s)


@dataclass(frozen=True, slots=True)
class LatencyObjective:
    """At least `percentile` percent of the latencies are at most `limit_s`."""

    percentile: float
    limit_s: float

    @classmethod
    def parse(cls, text: str) -> "LatencyObjective":
        """Return an objective as people write it: `p99 <= 2 s`, `p95 100ms`.

        Raises:
            ServingError: the text is none.
        """
        found = _OBJECTIVE.fullmatch(text.strip().lower())
        if found is None:
            raise ServingError(
                f"objective: expected a percentile and a limit as in 'p99 <= 2 s', found {text!r}"
            )
        percentile, limit = float(found[1]), float(found[2])
        if percentile < 50 or limit <= 0:
            raise ServingError(f"objective: expected p50 or more and a limit above 0, found {text!r}")
        return cls(percentile, limit / 1000 if found[3] == "ms" else limit)

    @property
    def allowed_share(self) -> float:
        """The share of latencies that may exceed the limit."""
        return 1 - self.percentile / 100

    def late(self, latencies: Sequence[LatencyCount]) -> tuple[float, float]:
        """Return how many latencies exceed the limit, and how many there are."""
        return sum(each.over(self.limit_s) for each in latencies), sum(each.count for each in latencies)


@dataclass(frozen=True, slots=True)
class Objectives:
    """For the time to first token, and for the latency between two tokens of a request."""

    ttft: LatencyObjective
    itl: LatencyObjective


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The engine's settings that bound its batches."""

    max_batched_tokens: int
    kv_capacity_tokens: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What happened in an interval, and what is there at its end.

    `prompt_tokens` count when a prompt is through, or by chunk. `itl_sum_s`: of all the ITLs, as buckets only
    bound it. `step_count` is None where the engine counts no steps. `power_w`: mean of all the instance's
    GPUs; None if unknown.
    """

    length_s: float
    running_count: int
    waiting_count: int
    kv_usage: float
    prompt_tokens: float
    generation_tokens: float
    ttft: Sequence[LatencyCount]
    itl: Sequence[LatencyCount]
    itl_sum_s: float
    step_count: int | None = None
    power_w: float | None = None

    @property
    def contradiction(self) -> str | None:
        """What can't be: the figures are then no basis for a clock."""
        counts = {
            "running": self.running_count,
            "waiting": self.waiting_count,
            "prompt tokens": self.prompt_tokens,
            "generation tokens": self.generation_tokens,
            "power": self.power_w or 0.0,
            "steps": self.step_count or 0,
            "sum of ITLs": self.itl_sum_s,
            "latencies": min((each.count for each in (*self.ttft, *self.itl)), default=0),
        }
        for name, count in counts.items():
            if not isfinite(count) or count < 0:
                return f"{name}: {count}"
        if not self.length_s > 0 or not isfinite(self.length_s):
            return f"an interval of {self.length_s} s"
        if not 0 <= self.kv_usage <= _MAX_KV_USAGE:
            return f"KV cache usage: {self.kv_usage}"
        if self.step_count == 0 and self.generation_tokens > 0:
            return f"{self.generation_tokens:.0f} tokens generated in no step"
        return None
