"""What is stored of a job: each record replaces an older one of the same key."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from perseus.service.domain.ledger import EnergyHour
from perseus.service.domain.measured import Period, StageProfile
from perseus.service.domain.model import (
    NO_VERSION,
    JobState,
    MaxClock,
    PipelineOffer,
    Rank,
    StockIteration,
    Straggler,
)
from perseus.service.domain.profiling import GivenUpClock, ProfilingCost
from perseus.service.domain.signals import SignalTarget
from perseus.service.domain.specification import Coordinates, JobSpec, OperatingPolicy, Registration
from perseus.service.domain.stall import Stall
from perseus.service.domain.telemetry import IterationColumns
from perseus.v1 import job_pb2


@dataclass(slots=True)
class JobRecord:
    """What a run knows of itself and must not forget: its parts change it in place, and a copy is stored.

    Attributes:
        policy: the operating policy in force.
        state: where the job stands.
        state_reason: why it is there; one sentence.
        version: the highest version of clocks used so far.
        baseline: what an iteration takes at stock; None until that is measured.
        is_profile_complete: whether what is measured is enough to plan on.
        stragglers: which pipelines are slow, by pipeline.
        lag_s: how long a transfer between stages takes, as far as plans have shown; 0 before.
        profiling_cost: what profiling has taken so far, since it was begun or renewed.
        given_up_clocks: the clocks that could not be measured, in the order in which they were given up.
        stall: what was told last of why the job does not get on; None once it does.
        finish_time_s: when it finished, on the wall clock; None if it has not.
        baseline_request_ids: the latest requests to measure the baseline again.
        broken_promise_count: promises of plans that were broken and not made up for.
        set_latency_s: of the GPUs, as plans are made with it; 0 before it is known.
        pace_s: what a power budget makes iterations take, on the frontier's scale; None if none does.
        ceiling: the highest clock where nothing is planned, as a budget ordered it last; None without one.
        pacing: how the job runs by a signal; None where its policy follows none, or nothing was told yet.
    """

    policy: OperatingPolicy
    state: JobState = JobState.WAITING
    state_reason: str = "some ranks have not joined yet"
    version: int = NO_VERSION
    baseline: StockIteration | None = None
    is_profile_complete: bool = False
    stragglers: tuple[Straggler, ...] = ()
    lag_s: float = 0.0
    profiling_cost: ProfilingCost = field(default_factory=ProfilingCost)
    given_up_clocks: tuple[GivenUpClock, ...] = ()
    stall: Stall | None = None
    finish_time_s: float | None = None
    baseline_request_ids: tuple[str, ...] = ()
    prediction_violation_count: int = 0
    set_latency_s: float = 0.0
    budget_target_time_s: float | None = None
    max_clock: MaxClock | None = None
    signal_target: SignalTarget | None = None

    @property
    def has_finished(self) -> bool:
        """Whether the job has ended."""
        return self.state is JobState.FINISHED


MAX_REQUEST_IDS = 64
"""So many of the latest requests are known; an older one counts as new."""


@dataclass(frozen=True, slots=True)
class Registrations:
    """The latest registrations that led to a run, the newest last."""

    registrations: tuple[Registration, ...]

    @property
    def owner(self) -> str:
        """Whose the run is, as an agent's kernel said; "" if it was registered without an agent."""
        return self.registrations[-1].owner if self.registrations else ""

    @property
    def principal(self) -> str:
        """Among whose jobs the run counts; "" if among nobody's."""
        return self.registrations[-1].principal if self.registrations else ""

    @property
    def labels(self) -> tuple[tuple[str, str], ...]:
        """What the run is to whoever runs it, as was said last."""
        return self.registrations[-1].labels if self.registrations else ()

    def is_owner(self, owner: str) -> bool:
        """Whether the run may be theirs; one who is not known, "", may be anybody."""
        return owner in ("", self.owner) or not self.owner

    def with_newest(self, newest: Registration) -> "Registrations":
        """Return these with one more; it is there once."""
        others = (some for some in self.registrations if some != newest)
        return Registrations((*others, newest)[-MAX_REQUEST_IDS:])


@dataclass(frozen=True, slots=True)
class EndedRun:
    """The run has ended and none of its ranks is served any more: it is shown like this from now on."""

    job: job_pb2.Job


@dataclass(frozen=True, slots=True)
class ProfiledWork:
    """A stage's work is profiled well enough to be planned on, and may be of use to others under its key."""

    stage: int
    key: str


@dataclass(frozen=True, slots=True)
class OfferRecord:
    """The offer that a pipeline has now."""

    pipeline: int
    offer: PipelineOffer


@dataclass(frozen=True, slots=True, eq=False)
class IterationRows:
    """A rank's rows of iterations; those up to `closed_through` are in the periods and no longer needed."""

    rank: Coordinates
    rows: IterationColumns
    closed_through: int


@dataclass(frozen=True, slots=True)
class ForgetIterations:
    """The stored rows of incomplete iterations are no longer needed."""


@dataclass(frozen=True, slots=True)
class ForgetProfile:
    """What was profiled is of other work, or of other GPUs: nobody knows it any more."""


@dataclass(frozen=True, slots=True)
class RecordedInputs:
    """What a run was given until the coordinator failed at it, as a document (`job.recording`)."""

    document: str


Record = (
    JobRecord
    | EndedRun
    | Registrations
    | Rank
    | OfferRecord
    | StageProfile
    | ProfiledWork
    | Period
    | EnergyHour
    | IterationRows
    | ForgetIterations
    | ForgetProfile
    | RecordedInputs
)


def record_key(record: Record) -> Hashable:
    """Return what a record is about: a later one of the same key replaces it. Rows add up instead."""
    match record:
        case IterationRows():  # first: nearly all records are
            return id(record)
        case JobRecord():
            return (JobRecord,)
        case EndedRun():
            return (EndedRun,)
        case Registrations():
            return (Registrations,)
        case ForgetIterations():
            return (ForgetIterations,)
        case ForgetProfile():
            return (ForgetProfile,)
        case RecordedInputs():
            return (RecordedInputs,)
        case Rank():
            return record.coordinates
        case OfferRecord():
            return OfferRecord, record.pipeline
        case StageProfile():
            return StageProfile, record.stage, record.clock_mhz
        case ProfiledWork():
            return ProfiledWork, record.stage
        case Period():
            return Period, record.number
        case EnergyHour():
            return EnergyHour, record.hour, record.baseline_number


@dataclass(frozen=True, slots=True)
class StoredJob:
    """What the store knows of a run of a job: all that a machine needs to go on after a restart.

    Of the ledger that is the latest hour, None if there is none.
    """

    spec: JobSpec
    run_number: int
    create_time_s: float
    registrations: Registrations
    record: JobRecord | None
    ranks: tuple[Rank, ...]
    offers: tuple[OfferRecord, ...]
    profiles: tuple[StageProfile, ...]
    periods: tuple[Period, ...]
    open_rows: tuple[IterationRows, ...]
    last_sequence: int
    latest_hour: EnergyHour | None = None


@dataclass(frozen=True, slots=True)
class UnreadableJob:
    """A run of a job that is stored, but can't be read; `cause` is one line for people."""

    job_id: str
    run_number: int
    cause: str
