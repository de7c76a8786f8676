"""What can happen to a job: the events that its state machine takes.

Each is checked for form before it gets here (finite, in range); whether it fits the job is the machine's to
say.
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
    trainer belongs to, empty if it says none.
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
    """A rank's GPU, or the way to it, refused or failed to do something. The rank may never have joined."""

    rank: Coordinates
    gpu_uuid: str
    reason: GpuErrorReason
    message: str


@dataclass(frozen=True, slots=True)
class AgentDisconnected:
    """An agent's stream ended without a goodbye."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class AgentLeft:
    """An agent said goodbye: its GPUs are back on stock."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class AgentHeard:
    """A sign of life."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class TelemetryArrived:
    """A batch that was not seen before."""

    rank: Coordinates
    instance_id: str
    batch: TelemetryBatch


@dataclass(frozen=True, slots=True)
class OfferAnswered:
    """A rank accepted an offer (`refusal` is None) or refused it. `iteration` is the highest begun.

    `refused_clocks_mhz`: those that its GPU does not have, where that is why.
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
    """Somebody says that a pipeline is slow."""

    straggler: Straggler


@dataclass(frozen=True, slots=True)
class StragglerCleared:
    """Somebody says that a pipeline is no longer slow."""

    pipeline: int


@dataclass(frozen=True, slots=True)
class PolicySet:
    """The operating policy changes."""

    policy: OperatingPolicy


@dataclass(frozen=True, slots=True)
class BudgetTargetSet:
    """A power budget makes iterations take this long, on the frontier's scale; None: none does any more.

    `is_urgent`: within seconds, not from some iteration on.
    """

    target_time_s: float | None
    is_urgent: bool


@dataclass(frozen=True, slots=True)
class SignalTargetSet:
    """A signal says how long iterations are to take, on the frontier's scale; None: it slows nothing down.

    `rule`: what that is to keep; it counts only while the job's policy is it. `window`: the work, and the
    time for it; another one than before begins with nothing done. `value`: the signal's, None if not known.
    """

    rule: SignalRule
    window: WorkWindow
    state: SignalTargetState
    target_time_s: float | None
    value: float | None


@dataclass(frozen=True, slots=True)
class MaxClockSet:
    """A power budget wants no clock above this one where a GPU computes under no plan; None ends that.

    `outlasts_lease`: as of `Ceiling`.
    """

    max_clock_mhz: int | None
    outlasts_lease: bool = False

    def to_max_clock(self) -> MaxClock | None:
        """Return the ceiling, if there is one.

        Raises:
            InvalidFieldError: it is no clock.
        """
        if self.max_clock_mhz is None:
            return None
        check_range("max_clock_mhz", self.max_clock_mhz, 1, MAX_CLOCK_MHZ)
        return MaxClock(self.max_clock_mhz, self.outlasts_lease)


@dataclass(frozen=True, slots=True)
class RegisteredAgain:
    """Somebody registers the same specification again: the run goes on."""

    registration: Registration


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Another specification was registered, and no rank is live: the run ends; why."""

    why: str


@dataclass(frozen=True, slots=True)
class EpochRenewed:
    """The coordinator has lost state, of which nobody knows how much: what it was is told by the epoch."""

    epoch: str


@dataclass(frozen=True, slots=True)
class FinishRequested:
    """Somebody ends the job."""


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """Somebody wants the job to go on from stock."""


@dataclass(frozen=True, slots=True)
class BaselineRequested:
    """Somebody wants the stock baseline measured again; the same request comes once or often."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ProfileFound:
    """The answer to FindProfile: what is known of the same work on the same GPUs, stage by stage."""

    found: tuple[KnownProfile, ...]


@dataclass(frozen=True, slots=True)
class Solved:
    """The frontier that was asked for."""

    frontier: Frontier


@dataclass(frozen=True, slots=True)
class SolveFailed:
    """There will be no frontier; why."""

    cause: str


@dataclass(frozen=True, slots=True)
class LagNotFound:
    """No frontier explains the slow plan: there will be none."""

    found: event_pb2.MeasurementsUnexplained


@dataclass(frozen=True, slots=True)
class SolveRetried:
    """The solver's process died, `crash_count` by now over this problem; it goes on in `delay_s`."""

    cause: str
    crash_count: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Refined:
    """The plan that was asked for."""

    refinement: Refinement
    plan: Plan


@dataclass(frozen=True, slots=True)
class RefineFailed:
    """There will be no such plan; why."""

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
