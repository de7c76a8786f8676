"""What can happen to a rank's session; `rank.session` says what it does then.

Some events are values of other modules: the trainer's marks, the coordinator's messages, counter changes,
clocks that were set, energy estimates that were asked for, and limits of the GPU that others have changed.
"""

from dataclasses import dataclass

from perseus.agent.clocks.sets import ClockSet
from perseus.agent.energy.counter import CounterChange
from perseus.agent.link.packets import ComputationMark, Finish, IterationMark, WaitMark
from perseus.agent.rank.messages import (
    EnergyEstimate,
    GpuLimits,
    PlanOffer,
    RankAccepted,
    RankMaxClock,
    RankRefused,
)


@dataclass(frozen=True, slots=True)
class TrainerJoined:
    """The trainer has said hello and was answered. The first event."""


@dataclass(frozen=True, slots=True)
class TrainerSpecified:
    """The trainer has said what it belongs to: the fingerprint of its job's specification."""

    spec_fingerprint: str


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
    | TrainerSpecified
    | TrainerGone
    | Finish
    | IterationMark
    | ComputationMark
    | WaitMark
    | Connected
    | Disconnected
    | Heard
    | RankAccepted
    | RankRefused
    | RankMaxClock
    | PlanOffer
    | CounterChange
    | ClockSet
    | EnergyEstimate
    | GpuLimits
    | SetNotPermitted
    | GpuFailed
    | AgentStops
    | Tick
)
