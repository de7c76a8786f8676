"""What a rank's session can want done; clocks to be set are values of `clocks.sets`."""

from dataclasses import dataclass

from perseus.agent.clocks.sets import ResetClock, ScheduleClock, SetClock
from perseus.agent.rank.messages import FromSession
from perseus.agent.rank.sampling import EstimateRequest


@dataclass(frozen=True, slots=True)
class EstimateEnergy:
    """Work an energy estimate out, which takes milliseconds; an `EnergyEstimate` answers, if there is one."""

    request: EstimateRequest


@dataclass(frozen=True, slots=True)
class Send:
    """Tell the coordinator. Telemetry is kept until acknowledged; all else is sent now or not at all, but for
    RankLeft, which can wait for the next connection.
    """

    message: FromSession


Command = SetClock | ResetClock | ScheduleClock | EstimateEnergy | Send
