"""Why a job makes no progress, as plain values."""

import enum
from dataclasses import dataclass

from perseus.service.domain.specification import Coordinates


class StallReason(enum.Enum):
    """Why a job makes no progress."""

    RANK_MISSING = "rank missing"
    NO_ITERATIONS = "no iterations"
    IRREGULAR_ITERATIONS = "irregular iterations"
    OTHER_CLOCKS = "other clocks"
    REPEATED_ITERATIONS = "repeated iterations"
    NO_ENERGY_ESTIMATES = "no energy estimates"


_OF_ONE_AND_MANY = {
    StallReason.RANK_MISSING: ("is missing", "are missing"),
    StallReason.NO_ITERATIONS: ("reports no iterations", "report no iterations"),
    StallReason.IRREGULAR_ITERATIONS: (
        "runs iterations that differ from the registered order, or are not measured whole",
        "run iterations that differ from the registered order, or are not measured whole",
    ),
    StallReason.OTHER_CLOCKS: (
        "runs under other clocks than it was offered",
        "run under other clocks than they were offered",
    ),
    StallReason.REPEATED_ITERATIONS: (
        "repeats iteration numbers within one connection",
        "repeat iteration numbers within one connection",
    ),
    StallReason.NO_ENERGY_ESTIMATES: (
        "sends no energy estimates that can be used",
        "send no energy estimates that can be used",
    ),
}


@dataclass(frozen=True, slots=True)
class Stall:
    """A job makes no progress.

    Attributes:
        reason: why.
        rank: the first rank that the reason applies to; None if it applies to all.
        rank_count: how many ranks it applies to.
        since_time_s: since when, on the wall clock.
        iteration: the latest that a rank reported, -1 if none.
    """

    reason: StallReason
    rank: Coordinates | None
    rank_count: int
    since_time_s: float
    iteration: int

    def __str__(self) -> str:
        one, many = _OF_ONE_AND_MANY[self.reason]
        if self.rank is None:
            return f"all {self.rank_count} ranks {many}"
        if self.rank_count == 1:
            return f"{self.rank} {one}"
        return f"{self.rank_count} ranks {many}, the first is {self.rank}"
