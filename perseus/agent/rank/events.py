"""What can happen to a rank's session, and what it can want done; `rank.session` says when and why.

Some events are values of other modules: the trainer's marks, the coordinator's messages, counter changes.
"""

from dataclasses import dataclass

from perseus.agent.energy.counter import CounterChange
from perseus.agent.link.packets import ComputationMark, Finish, IterationMark
from perseus.agent.rank.messages import (
    EnergyEstimate,
    PlanAnswer,
    PlanInForce,
    PlanOffer,
    RankAccepted,
    RankJoined,
    RankLeft,
    RankRefused,
    Telemetry,
)
from perseus.agent.rank.sampling import EstimateRequest

# --- Events -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainerJoined:
    """The trainer has said hello and was answered. The first event."""


@dataclass(frozen=True, slots=True)
class TrainerGone:
    """The trainer's end of the socket is closed."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The coordinator has welcomed the agent."""

    lease_s: float


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The stream to the coordinator has ended."""


@dataclass(frozen=True, slots=True)
class Heard:
    """The coordinator said something, whatever it was."""


@dataclass(frozen=True, slots=True)
class ClockSet:
    """A set was carried out (MHz, None for stock); in force since `time_s`.

    `due_s`: when it was to begin; `begun_at_s`: when it did, once the set before it was done.
    """

    clock_mhz: int | None
    time_s: float
    begun_at_s: float
    due_s: float


@dataclass(frozen=True, slots=True)
class Estimated:
    """An energy estimate that was asked for is there."""

    estimate: EnergyEstimate


@dataclass(frozen=True, slots=True)
class SetNotPermitted:
    """The GPU does not let this agent set clocks."""

    message: str


@dataclass(frozen=True, slots=True)
class GpuFailed:
    """The GPU, or the way to it, failed."""

    message: str


@dataclass(frozen=True, slots=True)
class AgentStops:
    """The agent ends on purpose."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; every tenth of a second or so."""


Event = (
    TrainerJoined
    | TrainerGone
    | Finish
    | IterationMark
    | ComputationMark
    | Connected
    | Disconnected
    | Heard
    | RankAccepted
    | RankRefused
    | PlanOffer
    | CounterChange
    | ClockSet
    | Estimated
    | SetNotPermitted
    | GpuFailed
    | AgentStops
    | Tick
)


# --- Commands -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SetClock:
    """Lock the GPU's clock, in place of all that was asked for before."""

    clock_mhz: int


@dataclass(frozen=True, slots=True)
class ResetClock:
    """Back to stock, in place of all that was asked for before."""


@dataclass(frozen=True, slots=True)
class ScheduleClock:
    """Lock the GPU's clock (None: back to stock) at a moment to come, in place of what was scheduled before.

    What is asked for meanwhile takes its place.
    """

    clock_mhz: int | None
    at_s: float


@dataclass(frozen=True, slots=True)
class EstimateEnergy:
    """Work an energy estimate out, which takes milliseconds; answered with `Estimated` if there is one."""

    request: EstimateRequest


@dataclass(frozen=True, slots=True)
class Send:
    """Tell the coordinator. Telemetry is kept until acknowledged; all else is sent now or not at all, but for
    RankLeft, which can wait for the next connection.
    """

    message: RankJoined | RankLeft | PlanAnswer | PlanInForce | Telemetry


Command = SetClock | ResetClock | ScheduleClock | EstimateEnergy | Send
