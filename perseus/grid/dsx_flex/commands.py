"""What goes into the door's machine, and what comes out of it."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from perseus.grid.dsx_flex.breaches import Breach
from perseus.grid.dsx_flex.budgets import KnownBudget
from perseus.grid.dsx_flex.values import FeedEvent, FeedReading, Piece, TargetSet, Trace


@dataclass(frozen=True, slots=True)
class TargetsReceived:
    """Load targets have come, signed by their sender."""

    some: TargetSet


@dataclass(frozen=True, slots=True)
class FeedsListed:
    """How all feeds stand."""

    readings: tuple[FeedReading, ...]


@dataclass(frozen=True, slots=True)
class FeedRead:
    """How one feed stands now."""

    reading: FeedReading


@dataclass(frozen=True, slots=True)
class BudgetsListed:
    """All budgets that the coordinator has, by identifier."""

    known: Mapping[str, KnownBudget]


@dataclass(frozen=True, slots=True)
class BudgetAnswered:
    """A budget as the coordinator has it now."""

    known: KnownBudget


@dataclass(frozen=True, slots=True)
class BudgetRefused:
    """The coordinator does not take a budget; it is asked again."""

    budget_id: str


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """Nobody knows how feeds stand, until they are listed again."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; once a second."""


Input = (
    TargetsReceived
    | FeedsListed
    | FeedRead
    | BudgetsListed
    | BudgetAnswered
    | BudgetRefused
    | CoordinatorLost
    | Tick
)


class Verdict(enum.Enum):
    """What became of a message with load targets."""

    ACCEPTED = "accepted"
    SUPERSEDED = "accepted, and all of it replaced by newer ones already"
    DUPLICATE = "accepted before"
    EXPIRED = "refused: all of its targets are over"
    TOO_OLD = "refused: sent longer ago than messages are remembered"
    FUTURE_DATED = "refused: sent in the future, by this machine's clock"
    TOO_MANY = "refused: as many messages, or targets, as a sender may have are there"
    UNKNOWN_FEED = "refused: names a feed that is not served"
    NO_POWER = "refused: a limit of 0 W, where the contract wants more"


ACCEPTED = frozenset({Verdict.ACCEPTED, Verdict.SUPERSEDED})


@dataclass(frozen=True, slots=True)
class Answer:
    """Say in the log what became of a message; `detail`: which feed, say."""

    some: TargetSet
    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True, slots=True)
class KeepTargets:
    """Keep an accepted message on disk, before its receipt is acknowledged."""

    some: TargetSet


@dataclass(frozen=True, slots=True)
class ForgetTargets:
    """Nothing depends on these messages any more."""

    event_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AskForBudgets:
    """The coordinator's budgets may not be those that the targets need: see `Door.changes`."""


@dataclass(frozen=True, slots=True)
class FeedSnapshot:
    """How one feed stands, as it is told; `targets` with whether each is enforced."""

    reading: FeedReading
    targets: tuple[tuple[Piece, bool], ...]
    event: FeedEvent
    in_flight: bool
    since_s: float | None
    is_compliant: bool


@dataclass(frozen=True, slots=True)
class PublishStatus:
    """Publish how all feeds stand."""

    feeds: Mapping[str, FeedSnapshot]
    time_s: float
    correlation_id: str | None = None
    trace: Trace | None = None

    @property
    def is_heartbeat(self) -> bool:
        """Whether nothing has happened."""
        return self.correlation_id is None and all(
            feed.event is FeedEvent.PERIODIC for feed in self.feeds.values()
        )


@dataclass(frozen=True, slots=True)
class PublishAlert:
    """Keep how a breach stands, and publish it, with jobs that would have to be paused, or are held back."""

    breach: Breach
    to_pause: tuple[str, ...]
    held: tuple[str, ...]
    trace: Trace | None


Command = Answer | KeepTargets | ForgetTargets | AskForBudgets | PublishStatus | PublishAlert
