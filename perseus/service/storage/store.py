"""The entries that are written into the store; an entry replaces an older one with the same key."""

from dataclasses import dataclass
from typing import NamedTuple

from perseus.service.domain.power import BudgetRecord
from perseus.service.domain.principals import Session, Token
from perseus.service.domain.records import Record
from perseus.service.domain.slot_power import Division, SlotPower
from perseus.service.domain.specification import JobSpec
from perseus.v1 import event_pb2


@dataclass(frozen=True, slots=True)
class NewRun:
    """A new run of a job."""

    spec: JobSpec
    run_number: int
    create_time_s: float


@dataclass(frozen=True, slots=True)
class JobDeleted:
    """The deletion of a job with all its runs; its ledger rows stay.

    Its versions up to `version` are never used again.
    """

    job_id: str
    version: int


class JobEntry(NamedTuple):
    """A record of a job's run."""

    job_id: str
    run_number: int
    record: Record


class EventEntry(NamedTuple):
    """An event of a job's run."""

    job_id: str
    run_number: int
    event: event_pb2.JobEvent


class TelemetrySequence(NamedTuple):
    """The acknowledged telemetry of an agent, up to this sequence; `principal` is the agent's."""

    instance_id: str
    sequence: int
    principal: str = ""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A bearer token, which replaces one of the same name."""

    token: Token


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """A browser's login has begun."""

    session: Session


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The login with this digest has ended."""

    digest: str


@dataclass(frozen=True, slots=True)
class BudgetEntry:
    """A power budget, which replaces one with the same identifier."""

    record: BudgetRecord


@dataclass(frozen=True, slots=True)
class SlotPowerEntry:
    """What the coordinator of a slot publishes for power budgets; `division` is slot 0's to make."""

    slot: int
    lease_epoch: int
    power: SlotPower
    division: Division


class UnstorableEntryError(ValueError):
    """An entry of a run contains a value that could not be read back; the text names it. Nothing is
    written."""

    def __init__(self, job_id: str, run_number: int, cause: str) -> None:
        super().__init__(f"job {job_id!r}, run {run_number}: {cause}")
        self.job_id = job_id
        self.run_number = run_number


@dataclass(frozen=True, slots=True)
class Pruned:
    """The result of one step of pruning.

    Attributes:
        row_count: the number of deleted rows.
        archived: the runs that were archived, as (job_id, run_number): little but their report is left.
        is_done: whether nothing more is due at this time.
    """

    row_count: int
    archived: tuple[tuple[str, int], ...]
    is_done: bool


Entry = (
    NewRun
    | JobDeleted
    | JobEntry
    | EventEntry
    | TelemetrySequence
    | TokenEntry
    | SessionEntry
    | SessionEnded
    | BudgetEntry
    | SlotPowerEntry
)
