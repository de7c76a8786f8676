"""What outlives the coordinator, behind one interface that any database can implement.

Everything is written as a list of entries in one transaction, and read back only at the start (the jobs'
latest runs), when an agent introduces itself (its last sequence), when somebody asks for events or for an
earlier run, and when a stage may have been profiled before. An entry of a key that is already there replaces
the older one.

Whatever the database itself fails at is a StoreFailedError (`domain.errors`): nothing can be promised from
then on.
"""

import abc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perseus.service.domain.events import ALL_EVENTS, EventFilter, JobEvent
from perseus.service.domain.ledger import EnergyGroup, HourFilter
from perseus.service.domain.measured import KnownProfile
from perseus.service.domain.power import BudgetRecord, UnreadableBudget
from perseus.service.domain.principals import Token
from perseus.service.domain.records import Record, StoredJob, UnreadableJob
from perseus.service.domain.retention import Retention
from perseus.service.domain.specification import JobSpec


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


Entry = NewRun | JobDeleted | JobEntry | JobEvent | TelemetrySequence | TokenEntry | BudgetEntry


class JobStore(abc.ABC):
    """Jobs by runs: profiles, offers, reports and events; and how far each agent's telemetry was taken."""

    @abc.abstractmethod
    async def epoch(self) -> str:
        """Return the identifier of this database's state; made when it was created, or state was lost."""

    @abc.abstractmethod
    async def renew_epoch(self) -> str:
        """Make another epoch, durably, because state is lost; return it."""

    @property
    @abc.abstractmethod
    def check_word(self) -> str:
        """The word for all that is written so far: it shows whether that is lost (`check_words`)."""

    @abc.abstractmethod
    def has_lost(self, check_word: str) -> bool:
        """Tell whether a word that somebody holds is of state that is not here."""

    @abc.abstractmethod
    async def deleted_version(self) -> int:
        """Return the highest version that a deleted job has used, 0 if none."""

    @abc.abstractmethod
    async def write(self, entries: Sequence[Entry]) -> None:
        """Write all entries, or none; they are safe when this returns.

        Raises:
            UnstorableEntryError: one of them holds what could not be read back.
        """

    @abc.abstractmethod
    async def load_jobs(self) -> list[StoredJob | UnreadableJob]:
        """Return the latest run of every job, by identifier, but of those that are archived."""

    @abc.abstractmethod
    async def load_run(self, job_id: str, run_number: int) -> StoredJob | UnreadableJob | None:
        """Return a run of a job, if there is such a one; archived or not."""

    @abc.abstractmethod
    async def run_numbers(self, job_id: str) -> list[int]:
        """Return the numbers of a job's runs, the latest first."""

    @abc.abstractmethod
    async def known_requests(self, job_id: str | None = None) -> Mapping[str, Mapping[str, int]]:
        """Return, by job, the run that each request to register has led to: of one, or as `load_jobs`."""

    @abc.abstractmethod
    async def known_profiles(self, keys: Sequence[str]) -> Collection[KnownProfile]:
        """Return what is profiled of the work under each stage's key, stage 0 first, by the youngest run."""

    @abc.abstractmethod
    async def events(
        self,
        job_id: str,
        run_number: int,
        after_sequence: int,
        limit: int,
        wanted: EventFilter = ALL_EVENTS,
    ) -> list[JobEvent]:
        """Return a run's first `limit` events above a sequence that are wanted, in their order."""

    @abc.abstractmethod
    async def ledger(self, wanted: HourFilter) -> list[EnergyGroup]:
        """Return what runs have used in the hours that are wanted, in sums, by job, deletion and run.

        Deleted jobs are there; of those of a name the one that is there comes last.
        """

    @abc.abstractmethod
    async def telemetry_sequence(self, instance_id: str) -> int:
        """Return the highest sequence taken from an agent, 0 if none."""

    @abc.abstractmethod
    async def telemetry_principal(self, instance_id: str) -> str:
        """Return by whom an agent's telemetry came last, "" if that is not known."""

    @abc.abstractmethod
    def instance_key(self, instance_id: str) -> str:
        """Return what shows that an agent is that instance: told to itself alone."""

    @abc.abstractmethod
    async def load_tokens(self) -> list[Token]:
        """Return all bearer tokens, revoked and expired ones too, by name."""

    @abc.abstractmethod
    async def load_budgets(self) -> list[BudgetRecord | UnreadableBudget]:
        """Return all power budgets, ended ones too, by identifier."""

    @abc.abstractmethod
    async def prune(self, retention: Retention, now_s: float) -> Pruned:
        """Delete some of what is no longer to be kept at this time of the wall clock: a small step."""

    @abc.abstractmethod
    async def size_bytes(self) -> int:
        """Return what the database takes on its disk, without its log."""

    @abc.abstractmethod
    async def watch(self) -> None:
        """Wait until something fails, whoever asked for it, a reader even.

        Raises:
            StoreFailedError: what it was.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Close the database; whatever was written stays."""
