"""Events: what happened to a job, numbered; which of them somebody asks for, and which a watcher misses."""

from collections.abc import Collection
from dataclasses import dataclass

from perseus.service.domain.evidence import Evidence, StateChanged
from perseus.service.domain.model import EventType, JobState


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that happened to a job; numbered within the run from 1. `message` is for people."""

    sequence: int
    type: EventType
    message: str
    evidence: Evidence | None

    @property
    def is_end(self) -> bool:
        """Whether this is the run's end."""
        return isinstance(self.evidence, StateChanged) and self.evidence.after is JobState.FINISHED


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something happened to a run of a job, at this time on the wall clock."""

    job_id: str
    run_number: int
    create_time_s: float
    happening: Happening


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which events are wanted; all by default.

    Attributes:
        types: of these types only; of all if empty.
        start_time_s: at or after this time.
        end_time_s: before this time.
    """

    types: Collection[EventType] = ()
    start_time_s: float | None = None
    end_time_s: float | None = None


ALL_EVENTS = EventFilter()


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """A watcher knows all events that there were when it began; the last of them, 0 if there was none."""

    last_event_sequence: int


@dataclass(frozen=True, slots=True)
class WatchGap:
    """What a watcher misses: events that were deleted before it came to them, and iterations.

    Attributes:
        first_missed_sequence, last_missed_sequence: of the events; 0 if there is none.
        missed_iteration_count: iterations of pipelines.
    """

    first_missed_sequence: int = 0
    last_missed_sequence: int = 0
    missed_iteration_count: int = 0
