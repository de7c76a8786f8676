"""Load targets and feeds as plain values. Times are seconds since 1970."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

_WATTS: Mapping[str, float] = {"watt": 1.0, "kilowatt": 1e3, "megawatt": 1e6}
UNITS = tuple(_WATTS)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A power limit, in the unit in which it was given: watt, kilowatt or megawatt."""

    value: float
    unit: str

    @property
    def limit_w(self) -> float:
        """The limit in watts."""
        return self.value * _WATTS[self.unit]


@dataclass(frozen=True, slots=True)
class Target:
    """A load target.

    Attributes:
        feeds: the feeds that it is for; empty for all.
        start_s, end_s: in force from the start until before the end; an infinite end means until replaced.
        constraint: the limit; None lifts earlier limits.
        best_effort: whether it must stop no job.
    """

    feeds: tuple[str, ...]
    start_s: float
    end_s: float
    constraint: Constraint | None
    best_effort: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """W3C Trace Context, as received."""

    traceparent: str
    tracestate: str | None = None


@dataclass(frozen=True, slots=True)
class TargetSet:
    """A message with load targets; sender, identifiers and time come from its envelope."""

    event_id: str
    sender: str
    correlation_id: str
    time_s: float
    targets: tuple[Target, ...]
    trace: Trace

    @property
    def end_s(self) -> float:
        """The end of its last target."""
        return max(target.end_s for target in self.targets)


@dataclass(frozen=True, slots=True)
class FeedReading:
    """The state of a feed, as the coordinator reports it; powers in watts.

    Attributes:
        feed: its name.
        maximum_w: its rating; None if unspecified.
        default_w: its limit while no target is in force; None for `maximum_w`.
        limit_w: the lowest limit in force, including others'; infinite for none.
        power_cap_w: the power that may be drawn now; infinite for no limit.
        measured_w: mean over a minute or more.
        judged_w: mean over ten seconds in which the limit had to be kept; None where there are none.
        calculated_w: the expected power of jobs under plans, plus the recent power of all others.
        in_transition: whether the power cap is moving, or was a few seconds ago.
        is_compliant: whether plans and measured means keep the limit.
        to_pause: jobs that would have to be paused to keep the limit.
        held: jobs that are slowed down.
    """

    feed: str
    maximum_w: float | None
    default_w: float | None
    limit_w: float
    power_cap_w: float
    measured_w: float
    judged_w: float | None
    calculated_w: float
    in_transition: bool
    is_compliant: bool
    to_pause: tuple[str, ...] = ()
    held: tuple[str, ...] = ()


class FeedEvent(enum.Enum):
    """Why a power state is published; `PERIODIC` for feeds on which nothing happened."""

    TARGET_SET = "target_set"
    START_RAMP_DOWN = "start_ramp_down"
    END_RAMP_DOWN = "end_ramp_down"
    START_RAMP_UP = "start_ramp_up"
    END_RAMP_UP = "end_ramp_up"
    PERIODIC = "periodic"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a target on one feed that newer targets have not replaced.

    `number`: the target's index in its message.
    """

    feed: str
    start_s: float
    end_s: float
    constraint: Constraint
    best_effort: bool
    correlation_id: str
    event_id: str
    number: int

    def is_active(self, now_s: float) -> bool:
        """Return whether it applies at a time."""
        return self.start_s <= now_s < self.end_s

    @property
    def has_end(self) -> bool:
        """Whether it ends by itself."""
        return self.end_s < math.inf
