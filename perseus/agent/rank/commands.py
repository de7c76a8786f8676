"""Commands of a rank's session; those that set clocks are in `clocks.sets`."""

from dataclasses import dataclass

from perseus.agent.clocks.sets import RepeatSet, ResetClock, ScheduleClock, SetClock
from perseus.agent.rank.messages import FromSession
from perseus.agent.rank.sampling import EstimateRequest


@dataclass(frozen=True, slots=True)
class EstimateEnergy:
    """Compute an energy estimate, which takes milliseconds; the result, if any, is an `EnergyEstimate`."""

    request: EstimateRequest


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the coordinator. Telemetry is kept until acknowledged, and RankLeft can wait for the
    next connection; other messages are sent now or dropped.
    """

    message: FromSession


@dataclass(frozen=True, slots=True)
class AllowPacking:
    """Let the trainer pack its marks, or have each sent at once, from its next iteration on."""

    is_allowed: bool


Command = SetClock | ResetClock | ScheduleClock | RepeatSet | EstimateEnergy | Send | AllowPacking
