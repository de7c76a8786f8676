"""Messages between agent and coordinator about one rank.

Messages that are only sent are the contract's own (`protos/perseus/v1/agent_service.proto` documents them),
built where they arise. Measurements are rows here and columns in the contract, and received messages are
checked: `stream.translate` converts both. Clocks are MHz, None for stock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from perseus.agent.clocks.foreign import ForeignClock
from perseus.agent.link.computation import Computation, Kind, Rank
from perseus.agent.link.packets import Saving
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import rank_pb2

MAX_SENTENCE_LENGTH = 1024
"""Limit of texts for people in the contract."""


@dataclass(frozen=True, slots=True)
class PlanId:
    """The identity of a plan's clocks, which survives reconnects."""

    epoch: str
    version: int


NO_PLAN = PlanId("", 0)
"""Stock, without a plan."""


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Limits on a GPU that others have set: its power limit (0 if unknown), and workload power profiles."""

    power_limit_w: float = 0.0
    power_profiles: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuDescription:
    """The coordinator's view of a GPU; clocks highest first. `stock_mhz`: that of stock, if lower."""

    uuid: str
    model: str
    supported_clocks_mhz: tuple[int, ...]
    limits: GpuLimits = GpuLimits()
    stock_mhz: int | None = None


class RankLeftReason(IntEnum):
    """Why a rank is no longer served; wire numbers."""

    FINISHED = 1
    TRAINER_GONE = 2
    GPU_FAILED = 3


class GpuErrorReason(IntEnum):
    """The kind of a GPU error; wire numbers."""

    NOT_FOUND = 1
    DRIVER_FAILED = 2
    NO_PERMISSION = 3
    LOST = 4
    NOT_SUPPORTED = 5
    IN_USE = 6
    NOT_RECORDED = 7


class PlanRefusalReason(IntEnum):
    """Why a plan offer was refused; wire numbers."""

    PAST_START = 1
    CLOCK_NOT_SUPPORTED = 2
    NOT_PERMITTED = 3
    ORDER_MISMATCH = 4
    UNKNOWN_RANK = 5
    GPU_FAILED = 6


# --- Messages of the agent ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """One run of the agent (another run has another `instance_id`), and its node."""

    instance_id: str
    version: str
    hostname: str


def coordinates(rank: Rank) -> rank_pb2.RankCoordinates:
    """Return a rank's place as the contract's message."""
    return rank_pb2.RankCoordinates(pipeline=rank.pipeline, stage=rank.stage, tensor=rank.tensor)


def sentence(text: str) -> str:
    """Limit a text to what the contract allows: a driver's message may be long and contain line breaks."""
    shown = "".join(each if each.isprintable() else " " for each in text[:MAX_SENTENCE_LENGTH])
    return shown if len(text) <= MAX_SENTENCE_LENGTH else f"{shown[:-1]}…"


def rank_left(rank: Rank, reason: RankLeftReason) -> wire.RankLeft:
    """Build the message that a rank is no longer served; its GPU is back on stock."""
    number = rank_pb2.RankLeftReason.ValueType(int(reason))
    return wire.RankLeft(job_id=rank.job_id, rank=coordinates(rank), reason=number)


@dataclass(frozen=True, slots=True)
class PlanRefusal:
    """Why an offer was refused, for programs and for people. `clocks_mhz`: the unsupported clocks."""

    reason: PlanRefusalReason
    message: str
    clocks_mhz: tuple[int, ...] = ()


def plan_answer(rank: Rank, plan: PlanId, refusal: PlanRefusal | None, iteration: int) -> wire.PlanAnswer:
    """Build the answer to an offer; no refusal means accepted. `iteration`: the highest begun, -1 if none."""
    answer = wire.PlanAnswer(
        job_id=rank.job_id,
        rank=coordinates(rank),
        epoch=plan.epoch,
        version=plan.version,
        accepted=refusal is None,
        iteration=iteration,
    )
    if refusal is not None:
        answer.refusal_reason = rank_pb2.PlanRefusalReason.ValueType(int(refusal.reason))
        answer.message = sentence(refusal.message)
        answer.refused_clocks_mhz.extend(refusal.clocks_mhz)
    return answer


@dataclass(frozen=True, slots=True)
class IterationRow:
    """A finished iteration: from its begin to its end. `clock_event_reasons`: those that throttled it.

    `capped_clock_mhz`: the highest clock that it reached under these.

    The gap lies between the end of the previous iteration and its begin; all its fields are 0 if that end is
    unknown. `gap_slowed_time_s` is the most that clocks below the highest can have added to the gap.
    `relative_work`: from the trainer, 0 if unknown. `work`: counted by a hook, 0 if unknown.
    `has_clock_change`: clocks came into force during the iteration.
    """

    iteration: int
    plan_version: int
    duration_s: float
    energy_j: float
    is_regular: bool
    clock_event_reasons: int
    gap_time_s: float = 0.0
    gap_energy_j: float = 0.0
    gap_slowed_time_s: float = 0.0
    capped_clock_mhz: int = 0
    relative_work: float = 0.0
    has_clock_change: bool = False
    work: int = 0


@dataclass(frozen=True, slots=True)
class ComputationRow:
    """A finished computation; its begin relative to the iteration's, and the clock at its begin."""

    iteration: int
    computation: Computation
    begin_s: float
    duration_s: float
    clock_mhz: int | None


@dataclass(frozen=True, slots=True)
class EnergySample:
    """Typical time and energy of one kind of computation at one clock, with standard errors."""

    kind: Kind
    chunk: int
    clock_mhz: int | None
    computation_count: int
    time_s: float
    time_se_s: float
    energy_j: float
    energy_se_j: float


@dataclass(frozen=True, slots=True)
class EnergyEstimate:
    """A plan's energy from the energy counter so far; replaces the previous estimate for that version.

    Blocking power is None while the windows do not determine it (a stage may hardly ever wait). The joint
    information on the powers of `samples`, `undetermined` and waiting is a lower triangle by rows, and a
    vector, as in the contract; both are empty if it is not reported. `work`: the mean of its iterations', to
    which the samples apply; 0 if unknown.
    """

    plan_version: int
    iteration_count: int
    samples: tuple[EnergySample, ...]
    blocking_power_w: float | None
    blocking_power_se_w: float
    window_count: int
    discarded_window_count: int
    undetermined: tuple[EnergySample, ...] = ()
    power_information: tuple[float, ...] = ()
    power_information_vector: tuple[float, ...] = ()
    work: float = 0.0


@dataclass(frozen=True, slots=True)
class ClockStatistics:
    """How well the clocks followed a plan so far; replaces the previous statistics for that version.

    `prediction_error_s` is None until a prediction was checked. `set_latency_count`: the number of sets
    behind the median latency, 0 while it is assumed.
    """

    plan_version: int
    set_count: int
    computation_count: int
    late_raise_count: int
    missed_count: int
    computation_time_s: float
    on_clock_time_s: float
    set_latency_s: float
    margin_s: float
    prediction_error_s: float | None
    set_latency_count: int = 0


@dataclass(frozen=True, slots=True)
class MessageRefused:
    """A message is unknown or invalid; sent in both directions. `rank` is None if it concerned none."""

    reason: str
    field: str
    expected: str
    found: str
    rank: Rank | None = None


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Measurements of one rank. `clocks` is None if none may be set; `gpu_limits` as read last.

    `foreign_clock`: at which another client holds the GPU; None if none does.
    """

    rank: Rank
    iterations: tuple[IterationRow, ...]
    computations: tuple[ComputationRow, ...]
    energy: EnergyEstimate | None
    clocks: ClockStatistics | None
    gpu_limits: GpuLimits | None = None
    foreign_clock: ForeignClock | None = None


FromSession = wire.RankJoined | wire.RankLeft | wire.PlanAnswer | wire.PlanInForce | Telemetry
"""Messages of a rank's session."""


# --- Messages of the coordinator ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to the agent's hello. `power_interval_s`: None if no power readings are wanted.

    `max_bundle_bytes`: the largest bundle that the coordinator takes, 0 for none. The stream is for the jobs
    of `slot`, of `slot_count` that the fleet's jobs are spread over. `takes_short_rows`: whether the
    coordinator takes rows of computations without what the registered order says.
    """

    epoch: str
    lease_s: float
    acknowledged_sequence: int
    protocol_version: int = 1
    power_interval_s: float | None = None
    max_bundle_bytes: int = 0
    slot: int = 0
    slot_count: int = 1
    takes_short_rows: bool = False


@dataclass(frozen=True, slots=True)
class MaxClock:
    """The highest clock while a rank computes without a stage plan.

    `outlasts_lease`: plan and maximum clock stay in force when the lease expires; otherwise the GPU returns
    to stock.
    """

    clock_mhz: int
    outlasts_lease: bool = False


@dataclass(frozen=True, slots=True)
class RankAccepted:
    """The rank is served; its computations in order, and its maximum clock, if any."""

    rank: Rank
    order: tuple[Computation, ...]
    max_clock: MaxClock | None = None


JOB_NOT_FOUND = "JOB_NOT_FOUND"
"""The reason to refuse a rank whose job the coordinator does not know."""

JOB_FINISHED = "JOB_FINISHED"
"""The reason to refuse a rank whose job has ended; the registration of a new run may follow."""

SPEC_MISMATCH = "SPEC_MISMATCH"
"""The reason to refuse a rank whose specification is not (yet) registered: others may be running the job."""

JOB_ALREADY_EXISTS = "JOB_ALREADY_EXISTS"
"""The reason to refuse a registration while ranks of another specification are live."""


@dataclass(frozen=True, slots=True)
class RankRefused:
    """The rank is not served; a stable reason, a message for people, and its maximum clock, if any.

    `lease_left_s`: how much of the lease is left of the agent that serves the rank or its GPU, if one does.
    """

    rank: Rank
    reason: str
    message: str
    max_clock: MaxClock | None = None
    lease_left_s: float | None = None


@dataclass(frozen=True, slots=True)
class RankMaxClock:
    """The rank's new maximum clock, or none."""

    rank: Rank
    max_clock: MaxClock | None


@dataclass(frozen=True, slots=True)
class TelemetryAck:
    """Everything up to a sequence is stored."""

    sequence: int


@dataclass(frozen=True, slots=True)
class TelemetryRefused:
    """A batch is invalid and not stored; the acknowledgement skips it."""

    sequence: int
    reason: str
    field: str
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """The answer to a heartbeat.

    `power_interval_s`: the new interval of power readings; None: unchanged. `savings`: those that are known,
    of the jobs whose first ranks this agent serves. `time_s`: the coordinator's clock, if given.
    """

    power_interval_s: float | None = None
    savings: Mapping[str, Saving] = field(default_factory=dict)
    time_s: float | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    """The coordinator is about to stop."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stock:
    """The GPU's own clocks."""


@dataclass(frozen=True, slots=True)
class Hold:
    """One clock for all computations."""

    clock_mhz: int


@dataclass(frozen=True, slots=True)
class StageClocks:
    """One clock for each computation, in parallel; 0 for a FIXED one."""

    computations: tuple[Computation, ...]
    clocks_mhz: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanOffer:
    """Clocks for one rank, from the begin of an iteration on; those of an urgent offer at once."""

    rank: Rank
    plan: PlanId
    start_iteration: int
    lease_s: float
    clocks: Stock | Hold | StageClocks
    is_urgent: bool = False


ToSession = RankAccepted | RankRefused | RankMaxClock | PlanOffer
"""Messages that concern one rank."""

Incoming = Welcome | ToSession | TelemetryAck | TelemetryRefused | MessageRefused | HeartbeatAnswer | Drain
