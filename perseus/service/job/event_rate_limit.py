"""Limits the events that agents may cause in a job. Part of the state machine.

Events are kept for months. An agent that connects and disconnects ten times a second, or whose GPU fails at
every set, would fill the store with them. So a job has a token bucket of events that refills with time;
events of single ranks may not take its last quarter, which is reserved for events of the whole job.
"""

from perseus.v1 import event_pb2

MIN_CAPACITY = 1000
_CAPACITY_PER_RANK = 64
"""Profiling a job completely causes about ten events per rank."""
_REFILL_S = 3600.0

OF_RANKS = frozenset(
    {
        event_pb2.JOB_EVENT_TYPE_RANK_CHANGED,
        event_pb2.JOB_EVENT_TYPE_PLAN_OFFERED,
        event_pb2.JOB_EVENT_TYPE_PLAN_IN_FORCE,
        event_pb2.JOB_EVENT_TYPE_PLAN_REFUSED,
        event_pb2.JOB_EVENT_TYPE_GPU_ERROR,
        event_pb2.JOB_EVENT_TYPE_GPU_LIMITS_CHANGED,
        event_pb2.JOB_EVENT_TYPE_FOREIGN_CLOCK,
    }
)
"""Events of single ranks and pipelines."""

OF_JOB = frozenset(
    {
        event_pb2.JOB_EVENT_TYPE_CLOCK_PROFILED,
        event_pb2.JOB_EVENT_TYPE_CLOCK_GIVEN_UP,
        event_pb2.JOB_EVENT_TYPE_STRAGGLER_DETECTED,
        event_pb2.JOB_EVENT_TYPE_STRAGGLER_WITHDRAWN,
        event_pb2.JOB_EVENT_TYPE_STALLED,
        event_pb2.JOB_EVENT_TYPE_STALL_ENDED,
        event_pb2.JOB_EVENT_TYPE_PROFILE_CORRECTED,
        event_pb2.JOB_EVENT_TYPE_CLOCK_CAPPED,
    }
)
"""Events of the whole job that agents can cause, too. All other events are announced unconditionally."""


class EventRateLimit:
    """The token bucket of one job.

    Attributes:
        dropped_count: events dropped in the current flood, 0 if there is none.
    """

    def __init__(self, rank_count: int) -> None:
        self.dropped_count = 0
        self._capacity = self._left = float(MIN_CAPACITY + _CAPACITY_PER_RANK * rank_count)
        self._filled_s: float | None = None

    def fill(self, now_s: float) -> int:
        """Refill the bucket; return the number of dropped events of a flood that has now ended, else 0."""
        if self._filled_s is not None:
            more = (now_s - self._filled_s) * self._capacity / _REFILL_S
            self._left = min(self._capacity, self._left + more)
        self._filled_s = now_s
        if self._left < self._capacity / 2:
            return 0
        dropped_count, self.dropped_count = self.dropped_count, 0
        return dropped_count

    def take(self, kind: event_pb2.JobEventType.ValueType) -> bool:
        """Tell whether an event may be announced; if not, it is counted as dropped."""
        if kind not in OF_RANKS | OF_JOB:
            return True
        minimum = self._capacity / 4 if kind in OF_RANKS else 0.0
        if self._left - 1 < minimum:
            self.dropped_count += 1
            return False
        self._left -= 1
        return True
