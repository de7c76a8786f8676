"""What outlives the coordinator, behind one interface that any database can implement.

Everything is written as a list of entries in one transaction, and read back only at the start (jobs), when
an agent introduces itself (its last sequence) and when somebody asks for a job's events. An entry of a key
that is already there replaces the older one.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass

from perseus.service.domain.events import ALL_EVENTS, EventFilter, JobEvent
from perseus.service.domain.records import Record, StoredJob
from perseus.service.domain.specification import JobSpec


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job is registered."""

    spec: JobSpec
    create_time_s: float


@dataclass(frozen=True, slots=True)
class JobEntry:
    """Something of a job is as its record says."""

    job_id: str
    record: Record


@dataclass(frozen=True, slots=True)
class TelemetrySequence:
    """All telemetry of an agent up to this sequence has been taken."""

    instance_id: str
    sequence: int


Entry = NewJob | JobEntry | JobEvent | TelemetrySequence


class JobStore(abc.ABC):
    """Jobs, their profiles, offers, reports and events, and how far each agent's telemetry was taken."""

    @abc.abstractmethod
    async def epoch(self) -> str:
        """Return the identifier of this database's state; made when it was created."""

    @abc.abstractmethod
    async def write(self, entries: Sequence[Entry]) -> None:
        """Write all entries, or none; they are safe when this returns."""

    @abc.abstractmethod
    async def load_jobs(self) -> list[StoredJob]:
        """Return all jobs, by identifier."""

    @abc.abstractmethod
    async def events(
        self, job_id: str, after_sequence: int, limit: int, wanted: EventFilter = ALL_EVENTS
    ) -> list[JobEvent]:
        """Return a job's first `limit` events above a sequence that are wanted, in their order."""

    @abc.abstractmethod
    async def telemetry_sequence(self, instance_id: str) -> int:
        """Return the highest sequence taken from an agent, 0 if none."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Close the database; whatever was written stays."""
