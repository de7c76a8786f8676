"""The budget and cost of profiling, and the clocks that could not be measured, as plain values."""

import enum
import math
from dataclasses import dataclass

from perseus.service.domain.specification import Coordinates


class ClockGivenUpReason(enum.Enum):
    """Why a stage could not be measured at a clock; the most serious first."""

    NO_ESTIMATE = "no estimate"
    INCOMPLETE_ESTIMATE = "incomplete estimate"
    NO_ENERGY = "no energy"
    DISTURBED = "disturbed"


_SENTENCES = {
    ClockGivenUpReason.NO_ESTIMATE: "sent no energy estimate",
    ClockGivenUpReason.INCOMPLETE_ESTIMATE: "sent an energy estimate that lacks computations or iterations",
    ClockGivenUpReason.NO_ENERGY: "reported that computations cost no energy",
    ClockGivenUpReason.DISTURBED: "every pipeline was slowed by a straggler, a power cap or heat",
}


class ProfilingLimit(enum.Enum):
    """A limit of the profiling budget; the value is its unit."""

    ITERATION_COUNT = "iterations"
    TIME = "s"
    EXTRA_TIME = "s more than at stock"
    ENERGY = "J more than at stock"


@dataclass(frozen=True, slots=True)
class GivenUpClock:
    """A clock that a stage could not be measured at.

    `rank` is the first rank that the reason applies to; None with DISTURBED.
    """

    stage: int
    clock_mhz: int
    reason: ClockGivenUpReason
    rank: Coordinates | None

    def __str__(self) -> str:
        why = f"{self.rank or ''} {_SENTENCES[self.reason]}".lstrip()
        return f"stage {self.stage} could not be measured at {self.clock_mhz} MHz: {why}"


@dataclass(frozen=True, slots=True)
class ProfilingCost:
    """The cost of the iterations under held clocks, for the whole job.

    Attributes:
        iteration_count: how many there were.
        time_s: how long they took.
        extra_time_s: the time by which iterations exceeded the stock baseline, where they did.
        energy_j: their energy.
        extra_energy_j: their energy minus that of as many iterations at stock; may be negative.
    """

    iteration_count: int = 0
    time_s: float = 0.0
    extra_time_s: float = 0.0
    energy_j: float = 0.0
    extra_energy_j: float = 0.0

    def plus(self, other: "ProfilingCost") -> "ProfilingCost":
        """Return the sum of two costs."""
        return ProfilingCost(
            self.iteration_count + other.iteration_count,
            self.time_s + other.time_s,
            self.extra_time_s + other.extra_time_s,
            self.energy_j + other.energy_j,
            self.extra_energy_j + other.extra_energy_j,
        )


@dataclass(frozen=True, slots=True)
class ProfilingBudget:
    """Limits on profiling: each figure as in ProfilingCost, infinite for no limit."""

    iteration_count: float = math.inf
    time_s: float = math.inf
    extra_time_s: float = 360.0
    extra_energy_j: float = math.inf

    def limit_of(self, limit: ProfilingLimit) -> float:
        """Return the budget's figure for a limit."""
        return {
            ProfilingLimit.ITERATION_COUNT: self.iteration_count,
            ProfilingLimit.TIME: self.time_s,
            ProfilingLimit.EXTRA_TIME: self.extra_time_s,
            ProfilingLimit.ENERGY: self.extra_energy_j,
        }[limit]

    def used(self, cost: ProfilingCost, limit: ProfilingLimit) -> float:
        """Return how much of a limit is used."""
        return {
            ProfilingLimit.ITERATION_COUNT: cost.iteration_count,
            ProfilingLimit.TIME: cost.time_s,
            ProfilingLimit.EXTRA_TIME: cost.extra_time_s,
            ProfilingLimit.ENERGY: cost.extra_energy_j,
        }[limit]

    def used_up(self, cost: ProfilingCost) -> ProfilingLimit | None:
        """Return the first limit that is used up, if any."""
        return next(
            (limit for limit in ProfilingLimit if self.used(cost, limit) >= self.limit_of(limit)), None
        )


@dataclass(frozen=True, slots=True)
class ProfilingProgress:
    """Progress of profiling.

    Attributes:
        tried_clock_count: clocks tried so far for the stage with the most, including those given up.
        max_clock_count: the most clocks that are tried for any stage.
        remaining_s: the most time left, if rounds go on taking as long as before; None during the first.
    """

    tried_clock_count: int
    max_clock_count: int
    remaining_s: float | None
