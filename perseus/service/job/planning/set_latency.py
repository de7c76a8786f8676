"""The set latency of the job's GPUs, as used in planning. Part of the state machine.

Every rank reports the median of its last sets. Stages wait for each other and pipelines share their plans, so
the largest latency over all ranks counts: with a smaller one, raises would come late and cost time, while a
dwell that is slightly too long costs only a little energy.

Plans do not follow every change. A larger latency counts once it exceeds the planned one by a quarter; a
smaller one once it is below it by a third and every rank has reported (after a restart, most have not);
either only after it has lasted for `SETTLING_TIME_S`. The first latency counts as soon as all ranks have
reported or plans are made. Until then plans assume that clocks change at once, which costs joules but no
seconds: agents raise clocks early.

The largest is found without visiting all ranks: latencies are counted by the millisecond, rounded up.
"""

import math
from collections import Counter
from collections.abc import Collection

from perseus.service.domain.records import JobRecord
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import ClockStatistics

MIN_SETS = 3
"""Sets that a rank's median needs: a single late one proves nothing."""

SETTLING_TIME_S = 60.0
"""How long the latency must have been different before plans follow it."""

_LARGER = 1.25
_SMALLER = 1.5
_STEPS_PER_S = 1000


class SetLatency:
    """The latency of a job's GPUs."""

    def __init__(self, record: JobRecord, rank_count: int) -> None:
        self._record = record
        self._rank_count = rank_count
        self._steps: dict[Coordinates, int] = {}
        # The number of ranks with each latency.
        self._counts: Counter[int] = Counter()
        self._other_since_s: float | None = None

    @property
    def planned_s(self) -> float:
        """The latency that plans are made with; 0 while unknown."""
        return self._record.set_latency_s

    @property
    def largest_s(self) -> float:
        """The largest reported latency, rounded up to the millisecond; 0 if no rank has reported one."""
        return max(self._counts, default=0) / _STEPS_PER_S

    def take(self, rank: Coordinates, clocks: ClockStatistics) -> None:
        """Take a rank's report."""
        if clocks.set_latency_count < MIN_SETS:
            return
        steps = max(1, math.ceil(clocks.set_latency_s * _STEPS_PER_S))
        if self._steps.get(rank) != steps:
            self._drop(rank)
            self._steps[rank] = steps
            self._counts[steps] += 1

    def forget(self, ranks: Collection[Coordinates]) -> None:
        """Forget ranks that are gone: they may return on other GPUs."""
        for rank in ranks:
            self._drop(rank)

    def follow(self, now_s: float) -> None:
        """Adopt the reported latency for planning, if it has differed for long enough."""
        if not self._is_other():
            self._other_since_s = None
            return
        if self._other_since_s is None:
            self._other_since_s = now_s
        is_first = not self.planned_s and len(self._steps) == self._rank_count
        if is_first or now_s - self._other_since_s >= SETTLING_TIME_S:
            self._record.set_latency_s = self.largest_s
            self._other_since_s = None

    def adopt_changes(self) -> None:
        """Adopt the reported latency before plans are made, if none was known."""
        self._record.set_latency_s = self.planned_s or self.largest_s

    def _is_other(self) -> bool:
        largest_s = self.largest_s
        if not largest_s:
            return False
        if largest_s > _LARGER * self.planned_s:
            return True
        return largest_s * _SMALLER < self.planned_s and len(self._steps) == self._rank_count

    def _drop(self, rank: Coordinates) -> None:
        steps = self._steps.pop(rank, None)
        if steps is not None:
            self._counts[steps] -= 1
            if not self._counts[steps]:
                del self._counts[steps]

    def validate(self) -> None:
        """Check the invariants."""
        assert Counter(self._steps.values()) == self._counts
