"""The stored records of a job: each replaces an older one of the same key."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from perseus.service.domain.figures import LastMeasured
from perseus.service.domain.ledger import EnergyHour, UncomparedHours
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
from perseus.service.domain.specification import (
    Coordinates,
    JobSpec,
    OperatingPolicy,
    Parallelism,
    Registration,
)
from perseus.service.domain.stall import Stall, StockReason
from perseus.service.domain.telemetry import IterationColumns
from perseus.v1 import job_pb2


@dataclass(slots=True)
class JobRecord:
    """The durable state of a run: its parts change it in place, and the store keeps a copy.

    Attributes:
        policy: the operating policy in force.
        state: the job's state.
        state_reason: why it is in that state; one sentence.
        version: the highest version of clocks used so far.
        baseline: an iteration at stock; None until it is measured.
        is_profile_complete: whether there are enough measurements to plan on.
        stragglers: the slow pipelines, in order.
        lag_s: how long a transfer between stages takes, as inferred from plans; 0 before that.
        given_up_clocks: the clocks that could not be measured, in the order in which they were given up.
        stall: the stall that was reported last; None once the job makes progress.
        finish_time_s: when it finished, on the wall clock; None if it has not.
        baseline_request_ids: the latest requests to measure the baseline again.
        prediction_violation_count: violated predictions that have not been made up for.
        set_latency_s: the GPUs' set latency that plans assume; 0 before it is known.
        budget_target_time_s: the iteration time that a power budget asks for, on the frontier's scale; None
            without one.
        max_clock: the maximum clock without a plan, as a budget set it last; None without one.
        signal_target: how the job follows a signal; None if its policy follows none, or before the first.
        earlier_profiling_cost: the cost of profiling before it was renewed last.
        stock_reason: why it is back at stock; None in another state.
        fall_back_count: how often it went back to stock in a row for a reason after which it is tried again.
        fall_back_time_s: when it did so last.
        disturbed_time_s: since when the stock baseline waits for a disturbance to end; None once measured.
        overhead_s: the part of a measured iteration that the latest frontier left out; 0 before that.
        slowdown_share: the share of the policy's slowdown that plans use, less where they proved slower.
        typical_work: of an iteration, by stage, as hooks count it; 0 if they don't, empty before it is known.
        work_exponent: times are proportional to this power of the work that hooks count.
    """

    policy: OperatingPolicy
    state: JobState = JobState.WAITING
    state_reason: str = "some ranks have not joined yet"
    version: int = NO_VERSION
    baseline: StockIteration | None = None
    is_profile_complete: bool = False
    stragglers: tuple[Straggler, ...] = ()
    lag_s: float = 0.0
    given_up_clocks: tuple[GivenUpClock, ...] = ()
    stall: Stall | None = None
    finish_time_s: float | None = None
    baseline_request_ids: tuple[str, ...] = ()
    prediction_violation_count: int = 0
    set_latency_s: float = 0.0
    budget_target_time_s: float | None = None
    max_clock: MaxClock | None = None
    signal_target: SignalTarget | None = None
    earlier_profiling_cost: ProfilingCost = field(default_factory=ProfilingCost)
    stock_reason: StockReason | None = None
    fall_back_count: int = 0
    fall_back_time_s: float = 0.0
    disturbed_time_s: float | None = None
    overhead_s: float = 0.0
    slowdown_share: float = 1.0
    typical_work: tuple[float, ...] = ()
    work_exponent: float = 1.0

    @property
    def has_finished(self) -> bool:
        """Whether the job has ended."""
        return self.state is JobState.FINISHED


@dataclass(slots=True)
class Counters:
    """Durable counts of a run that its iterations add to, beside the record, which does not change with them.

    Attributes:
        profiling_cost: the cost of profiling since it began or was renewed.
        signal_count: iterations since the record's `signal_target` was set.
    """

    profiling_cost: ProfilingCost = field(default_factory=ProfilingCost)
    signal_count: int = 0


MAX_REQUEST_IDS = 64
"""How many of the latest requests are remembered; an older one counts as new."""


@dataclass(frozen=True, slots=True)
class Registrations:
    """The latest registrations that led to a run, the newest last."""

    registrations: tuple[Registration, ...]

    @property
    def owner(self) -> str:
        """The run's owner, from the kernel of the agent's node; "" if it was registered without an agent."""
        return self.registrations[-1].owner if self.registrations else ""

    @property
    def principal(self) -> str:
        """The principal whose limits the run counts against; "" if none."""
        return self.registrations[-1].principal if self.registrations else ""

    @property
    def labels(self) -> tuple[tuple[str, str], ...]:
        """The user's labels of the run, from the latest registration."""
        return self.registrations[-1].labels if self.registrations else ()

    def is_owner(self, owner: str) -> bool:
        """Whether the run may belong to an owner; an unknown owner, "", matches any."""
        return owner in ("", self.owner) or not self.owner

    def with_newest(self, newest: Registration) -> "Registrations":
        """Return these with one more, without duplicates."""
        others = (some for some in self.registrations if some != newest)
        return Registrations((*others, newest)[-MAX_REQUEST_IDS:])


@dataclass(frozen=True, slots=True)
class EndedRun:
    """The final view of a run that has ended and whose ranks are no longer served.

    Attributes:
        job: as clients see it.
        measured: its frontier and latest timelines; None for a quarantined run.
    """

    job: job_pb2.Job
    measured: LastMeasured | None = None


@dataclass(frozen=True, slots=True)
class ProfiledWork:
    """A stage's work is profiled well enough to plan on; other jobs may adopt it under its key."""

    stage: int
    key: str


@dataclass(frozen=True, slots=True)
class OfferRecord:
    """A pipeline's current offer."""

    pipeline: int
    offer: PipelineOffer


@dataclass(frozen=True, slots=True, eq=False)
class IterationRows:
    """A rank's rows of iterations. The periods include those up to `closed_through`; they may be dropped."""

    rank: Coordinates
    rows: IterationColumns
    closed_through: int


@dataclass(frozen=True, slots=True)
class ForgetIterations:
    """The stored rows of incomplete iterations are no longer needed."""


@dataclass(frozen=True, slots=True)
class ForgetProfile:
    """The stored profile is of other work or other GPUs: delete it."""


@dataclass(frozen=True, slots=True)
class RecordedInputs:
    """The inputs of a run until the coordinator failed for it, as a document (`job.recording`)."""

    document: str


Record = (
    JobRecord
    | Counters
    | EndedRun
    | Registrations
    | Rank
    | OfferRecord
    | StageProfile
    | ProfiledWork
    | Period
    | EnergyHour
    | UncomparedHours
    | IterationRows
    | ForgetIterations
    | ForgetProfile
    | RecordedInputs
)


def record_key(record: Record) -> Hashable:
    """Return a record's key: a later record of the same key replaces it. Iteration rows add up instead."""
    match record:
        case IterationRows():  # first: nearly all records are
            return id(record)
        case JobRecord():
            return (JobRecord,)
        case Counters():
            return (Counters,)
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
        case UncomparedHours():
            return UncomparedHours, record.baseline_number


@dataclass(frozen=True, slots=True)
class StoredJob:
    """Everything that a state machine needs to resume a run after a restart.

    `latest_hour`: the ledger's latest hour, None if there is none.
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
    counters: Counters = field(default_factory=Counters)


@dataclass(frozen=True, slots=True)
class ListedRun:
    """The stored state of a job's latest run, for lists.

    Attributes:
        record: None if nothing is stored yet but that it is registered.
        parallelism: None if the specification is too long to be read for a list.
    """

    job_id: str
    run_number: int
    record: JobRecord | None
    parallelism: Parallelism | None


@dataclass(frozen=True, slots=True)
class UnreadableJob:
    """A stored run that can't be read; `cause` is one line for people."""

    job_id: str
    run_number: int
    cause: str
