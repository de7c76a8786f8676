"""What load targets and feeds are, once they have been read. Times are seconds since 1970."""

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
        feeds: that it is for; empty for all.
        start_s, end_s: in force from the start until before the end; infinite until it is replaced.
        constraint: what may be drawn; None where nothing is limited any more.
        best_effort: whether nobody is to be disturbed for it.
    """

    feeds: tuple[str, ...]
    start_s: float
    end_s: float
    constraint: Constraint | None
    best_effort: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """W3C Trace Context, as it was told."""

    traceparent: str
    tracestate: str | None = None


@dataclass(frozen=True, slots=True)
class TargetSet:
    """A message with load targets; the sender's name, identifiers and time are those of its envelope."""

    event_id: str
    sender: str
    correlation_id: str
    time_s: float
    targets: tuple[Target, ...]
    trace: Trace

    @property
    def end_s(self) -> float:
        """When all of it is over."""
        return max(target.end_s for target in self.targets)


@dataclass(frozen=True, slots=True)
class FeedReading:
    """How a feed stands, as the coordinator says; powers in watts.

    Attributes:
        feed: its name.
        maximum_w: what it bears; None if nobody has said.
        default_w: its limit while no target is in force; None for `maximum_w`.
        limit_w: the lowest limit in force, whoever has set it; infinite for none.
        ceiling_w: what may be drawn now; infinite where nothing limits it.
        measured_w: mean over a minute or more.
        judged_w: mean over ten seconds in which the limit had to be kept; None where there are none.
        calculated_w: what jobs are expected to draw under their plans, and others drew lately.
        in_transition: whether the ceiling is on its way, or was a few seconds ago.
        is_compliant: whether plans and measured means keep the limit.
        to_pause: jobs that would have to be paused for the limit.
        held: jobs that are held back.
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
    """Why a power state is published; of the feeds on which nothing happened: periodic."""

    TARGET_SET = "target_set"
    START_RAMP_DOWN = "start_ramp_down"
    END_RAMP_DOWN = "end_ramp_down"
    START_RAMP_UP = "start_ramp_up"
    END_RAMP_UP = "end_ramp_up"
    PERIODIC = "periodic"


@dataclass(frozen=True, slots=True)
class Piece:
    """What is left of a target on one feed, where newer ones take the place of the rest.

    `number`: the target's place in its message.
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
        """Whether it counts at a time."""
        return self.start_s <= now_s < self.end_s

    @property
    def has_end(self) -> bool:
        """Whether it ends by itself."""
        return self.end_s < math.inf
