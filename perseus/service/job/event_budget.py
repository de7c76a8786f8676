"""How many events agents may cause in a job. Part of the state machine.

Events are kept for months. An agent that comes and goes ten times a second, or whose GPU fails at every set,
would fill the store with them. So a job has a bucket of events, which fills again with time; those of single
ranks may not take the last quarter of it, which is for what is said of the whole job.
"""

from perseus.service.domain.model import EventType

_LEAST_CAPACITY = 1000
_CAPACITY_PER_RANK = 64
"""A job's whole profile takes about ten per rank."""
_REFILL_S = 3600.0

OF_RANKS = frozenset(
    {
        EventType.RANK_CHANGED,
        EventType.PLAN_OFFERED,
        EventType.PLAN_IN_FORCE,
        EventType.PLAN_REFUSED,
        EventType.GPU_ERROR,
        EventType.GPU_LIMITS_CHANGED,
    }
)
"""Events of single ranks and pipelines."""

OF_JOB = frozenset(
    {
        EventType.CLOCK_PROFILED,
        EventType.CLOCK_GIVEN_UP,
        EventType.STRAGGLER_DETECTED,
        EventType.STRAGGLER_WITHDRAWN,
        EventType.STALLED,
        EventType.STALL_ENDED,
        EventType.PROFILE_CORRECTED,
        EventType.CLOCK_CAPPED,
    }
)
"""Events of the whole job that agents can cause, too. All others are told, whatever has happened."""


class EventBudget:
    """The bucket of one job.

    Attributes:
        dropped_count: events dropped in the flood that there is, 0 while there is none.
    """

    def __init__(self, rank_count: int) -> None:
        self.dropped_count = 0
        self._capacity = self._left = float(_LEAST_CAPACITY + _CAPACITY_PER_RANK * rank_count)
        self._filled_s: float | None = None

    def fill(self, now_s: float) -> int:
        """Let time pass; return how many events were dropped in a flood that is over with this, mostly 0."""
        if self._filled_s is not None:
            more = (now_s - self._filled_s) * self._capacity / _REFILL_S
            self._left = min(self._capacity, self._left + more)
        self._filled_s = now_s
        if self._left < self._capacity / 2:
            return 0
        dropped_count, self.dropped_count = self.dropped_count, 0
        return dropped_count

    def take(self, kind: EventType) -> bool:
        """Tell whether an event may be told, or else is to be dropped."""
        if kind not in OF_RANKS | OF_JOB:
            return True
        least = self._capacity / 4 if kind in OF_RANKS else 0.0
        if self._left - 1 < least:
            self.dropped_count += 1
            return False
        self._left -= 1
        return True
