"""Events of a rank's session; `rank.session` handles them.

Some events are values of other modules: the trainer's marks, the coordinator's messages, counter changes,
completed clock sets, requested energy estimates, and GPU limits that others have changed.
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
    """The trainer has sent its hello and received an answer. The first event."""


@dataclass(frozen=True, slots=True)
class TrainerSpecified:
    """The trainer has declared the fingerprint of its job's specification."""

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
    """A message of any kind from the coordinator."""


@dataclass(frozen=True, slots=True)
class SetNotPermitted:
    """The GPU does not permit this agent to set clocks."""

    message: str


@dataclass(frozen=True, slots=True)
class GpuFailed:
    """The GPU, or access to it, failed."""

    message: str


@dataclass(frozen=True, slots=True)
class AgentStops:
    """The agent shuts down on purpose."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A periodic tick, about every tenth of a second."""


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
