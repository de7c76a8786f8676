"""What is written into the store: entries, of which one of a key that is there replaces the older one."""

from dataclasses import dataclass
from typing import NamedTuple

from perseus.service.domain.power import BudgetRecord
from perseus.service.domain.principals import Token
from perseus.service.domain.records import Record
from perseus.service.domain.specification import JobSpec
from perseus.v1 import event_pb2


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run of a job begins."""

    spec: JobSpec
    run_number: int
    create_time_s: float


@dataclass(frozen=True, slots=True)
class JobDeleted:
    """A job is forgotten with all its runs, but for the ledger.

    Of its versions, those up to `version` are never used again.
    """

    job_id: str
    version: int


class JobEntry(NamedTuple):
    """Something of a run of a job is as its record says."""

    job_id: str
    run_number: int
    record: Record


class EventEntry(NamedTuple):
    """Something happened to a run of a job."""

    job_id: str
    run_number: int
    event: event_pb2.JobEvent


class TelemetrySequence(NamedTuple):
    """All telemetry of an agent up to this sequence has been taken; `principal` is by whom it came."""

    instance_id: str
    sequence: int
    principal: str = ""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A bearer token is as it says, in place of the one that has its name."""

    token: Token


@dataclass(frozen=True, slots=True)
class BudgetEntry:
    """A power budget is as it says, in place of the one that has its identifier."""

    record: BudgetRecord


class UnstorableEntryError(ValueError):
    """An entry of a run holds what could not be read back; the text names the field. Nothing is written."""

    def __init__(self, job_id: str, run_number: int, cause: str) -> None:
        super().__init__(f"job {job_id!r}, run {run_number}: {cause}")
        self.job_id = job_id
        self.run_number = run_number


@dataclass(frozen=True, slots=True)
class Pruned:
    """What one step of pruning did.

    Attributes:
        row_count: rows that it deleted.
        archived: runs of which little else than the report is left from now on, as (job_id, run_number).
        is_done: whether nothing more is due at this time.
    """

    row_count: int
    archived: tuple[tuple[str, int], ...]
    is_done: bool


Entry = NewRun | JobDeleted | JobEntry | EventEntry | TelemetrySequence | TokenEntry | BudgetEntry
