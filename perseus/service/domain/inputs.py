"""Inputs of a job's state machine.

The API checks their form (finite, in range) first; the state machine checks whether they fit the job.
"""

from dataclasses import dataclass

from perseus.service.domain.bounds import check_range
from perseus.service.domain.measured import KnownProfile
from perseus.service.domain.model import (
    Gpu,
    GpuErrorReason,
    MaxClock,
    RankLeftReason,
    RefusalReason,
    Straggler,
)
from perseus.service.domain.signals import SignalRule, SignalTargetState, WorkWindow
from perseus.service.domain.specification import Coordinates, OperatingPolicy, Registration
from perseus.service.domain.telemetry import TelemetryBatch
from perseus.solver import MAX_CLOCK_MHZ, Frontier, Plan, Refinement
from perseus.v1 import event_pb2


@dataclass(frozen=True, slots=True)
class RankJoined:
    """An agent serves a rank. An empty epoch in force means stock without a plan.

    Telemetry up to `after_sequence` is of an earlier trainer. `spec_fingerprint`: the specification that the
    trainer belongs to, empty if it gives none.
    """

    rank: Coordinates
    instance_id: str
    hostname: str
    gpu: Gpu
    iteration: int
    in_force_epoch: str
    in_force_version: int
    after_sequence: int
    spec_fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class RankLeft:
    """An agent no longer serves a rank, whose GPU is back on stock."""

    rank: Coordinates
    instance_id: str
    reason: RankLeftReason


@dataclass(frozen=True, slots=True)
class GpuErrorReported:
    """A rank's GPU or its driver refused or failed an operation. The rank may never have joined."""

    rank: Coordinates
    gpu_uuid: str
    reason: GpuErrorReason
    message: str


@dataclass(frozen=True, slots=True)
class AgentDisconnected:
    """An agent's stream ended without notice."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class AgentLeft:
    """An agent left in an orderly way: its GPUs are back on stock."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class AgentHeard:
    """A heartbeat of an agent."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class TelemetryArrived:
    """A new batch of telemetry arrived."""

    rank: Coordinates
    instance_id: str
    batch: TelemetryBatch


@dataclass(frozen=True, slots=True)
class OfferAnswered:
    """A rank accepted an offer (`refusal` is None) or refused it. `iteration` is the highest begun.

    `refused_clocks_mhz`: the clocks that its GPU does not have, if that is why.
    """

    rank: Coordinates
    instance_id: str
    epoch: str
    version: int
    refusal: RefusalReason | None
    message: str
    iteration: int
    refused_clocks_mhz: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """The plan in force on a rank has changed."""

    rank: Coordinates
    instance_id: str
    epoch: str
    version: int
    iteration: int


@dataclass(frozen=True, slots=True)
class StragglerReported:
    """A client reports that a pipeline is slow."""

    straggler: Straggler


@dataclass(frozen=True, slots=True)
class StragglerCleared:
    """A client reports that a pipeline is no longer slow."""

    pipeline: int


@dataclass(frozen=True, slots=True)
class PolicySet:
    """The operating policy changes."""

    policy: OperatingPolicy


@dataclass(frozen=True, slots=True)
class BudgetTargetSet:
    """A power budget sets the target iteration time, on the frontier's scale; None lifts it.

    `is_urgent`: within seconds, not from a start iteration on.
    """

    target_time_s: float | None
    is_urgent: bool


@dataclass(frozen=True, slots=True)
class SignalTargetSet:
    """A signal sets the target iteration time, on the frontier's scale; None means no slowdown.

    `rule`: the rule behind it; the input counts only while this is the job's policy. `window`: the work, and
    the time for it; progress starts at 0 in a new window. `value`: the signal's value, None if unknown.
    """

    rule: SignalRule
    window: WorkWindow
    state: SignalTargetState
    target_time_s: float | None
    value: float | None


@dataclass(frozen=True, slots=True)
class MaxClockSet:
    """A power budget sets the maximum clock of GPUs that compute under no plan; None lifts it.

    `outlasts_lease`: as in `MaxClock`.
    """

    max_clock_mhz: int | None
    outlasts_lease: bool = False

    def to_max_clock(self) -> MaxClock | None:
        """Return the maximum clock, if there is one.

        Raises:
            InvalidFieldError: it is out of range.
        """
        if self.max_clock_mhz is None:
            return None
        check_range("max_clock_mhz", self.max_clock_mhz, 1, MAX_CLOCK_MHZ)
        return MaxClock(self.max_clock_mhz, self.outlasts_lease)


@dataclass(frozen=True, slots=True)
class RegisteredAgain:
    """A client registered the same specification again: the run continues."""

    registration: Registration


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Another specification was registered, and no rank is live: the run ends, for this reason."""

    why: str


@dataclass(frozen=True, slots=True)
class EpochRenewed:
    """The coordinator has lost an unknown amount of state; the new epoch marks the loss."""

    epoch: str


@dataclass(frozen=True, slots=True)
class FinishRequested:
    """A client ends the job."""


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """A client asks for the job to resume from stock."""


@dataclass(frozen=True, slots=True)
class BaselineRequested:
    """A client asks for another stock baseline; the same request may arrive several times."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ProfileFound:
    """The answer to FindProfile: known profiles of the same work on the same GPUs, stage by stage."""

    found: tuple[KnownProfile, ...]


@dataclass(frozen=True, slots=True)
class Solved:
    """The requested frontier."""

    frontier: Frontier


@dataclass(frozen=True, slots=True)
class SolveFailed:
    """The frontier could not be solved, for this cause."""

    cause: str


@dataclass(frozen=True, slots=True)
class LagNotFound:
    """No lag explains the slow plan, so there will be no frontier."""

    found: event_pb2.MeasurementsUnexplained


@dataclass(frozen=True, slots=True)
class SolveRetried:
    """The solver's process has died `crash_count` times on this problem; the next attempt is in `delay_s`."""

    cause: str
    crash_count: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Refined:
    """The requested plan."""

    refinement: Refinement
    plan: Plan


@dataclass(frozen=True, slots=True)
class RefineFailed:
    """The plan could not be refined, for this cause."""

    refinement: Refinement
    cause: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Input = (
    RankJoined
    | RankLeft
    | GpuErrorReported
    | AgentDisconnected
    | AgentLeft
    | AgentHeard
    | TelemetryArrived
    | OfferAnswered
    | PlanInForce
    | StragglerReported
    | StragglerCleared
    | PolicySet
    | BudgetTargetSet
    | SignalTargetSet
    | MaxClockSet
    | RegisteredAgain
    | Abandoned
    | EpochRenewed
    | FinishRequested
    | ResumeRequested
    | BaselineRequested
    | ProfileFound
    | Solved
    | SolveFailed
    | LagNotFound
    | SolveRetried
    | Refined
    | RefineFailed
    | Tick
)
