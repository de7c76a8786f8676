"""Inputs and commands of the gateway's state machine."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from perseus.grid.dsx_flex.breaches import Breach
from perseus.grid.dsx_flex.budgets import KnownBudget
from perseus.grid.dsx_flex.values import FeedEvent, FeedReading, Piece, TargetSet, Trace


@dataclass(frozen=True, slots=True)
class TargetsReceived:
    """Load targets have arrived, signed by their sender."""

    some: TargetSet


@dataclass(frozen=True, slots=True)
class FeedsListed:
    """Readings of all feeds."""

    readings: tuple[FeedReading, ...]


@dataclass(frozen=True, slots=True)
class FeedRead:
    """A new reading of one feed."""

    reading: FeedReading


@dataclass(frozen=True, slots=True)
class BudgetsListed:
    """All of the coordinator's budgets, by identifier."""

    known: Mapping[str, KnownBudget]


@dataclass(frozen=True, slots=True)
class BudgetAnswered:
    """The coordinator's answer to a request: a budget as it is now."""

    known: KnownBudget


@dataclass(frozen=True, slots=True)
class BudgetRefused:
    """The coordinator refused a budget; the gateway will ask again."""

    budget_id: str


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """The coordinator can't be reached; feeds are unknown until they are listed again."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent once a second."""


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
    """The gateway's decision on a message with load targets."""

    ACCEPTED = "accepted"
    SUPERSEDED = "accepted, but newer messages have replaced all of it already"
    DUPLICATE = "accepted before"
    EXPIRED = "refused: all of its targets are over"
    TOO_OLD = "refused: sent longer ago than messages are remembered"
    FUTURE_DATED = "refused: sent in the future, by this machine's clock"
    TOO_MANY = "refused: the sender has too many messages or targets"
    UNKNOWN_FEED = "refused: names a feed that is not served"
    NO_POWER = "refused: expected a limit above 0 W, found 0 W"


ACCEPTED = frozenset({Verdict.ACCEPTED, Verdict.SUPERSEDED})


@dataclass(frozen=True, slots=True)
class Answer:
    """Log the verdict on a message; `detail`: the unknown feed, for example."""

    some: TargetSet
    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True, slots=True)
class KeepTargets:
    """Store an accepted message on disk, before its receipt is acknowledged."""

    some: TargetSet


@dataclass(frozen=True, slots=True)
class ForgetTargets:
    """Delete messages that no longer have any effect."""

    event_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AskForBudgets:
    """Request budgets: the coordinator's may differ from those that the targets need (`Gateway.changes`)."""


@dataclass(frozen=True, slots=True)
class FeedSnapshot:
    """The published state of a feed; each of `targets` with whether it is active."""

    reading: FeedReading
    targets: tuple[tuple[Piece, bool], ...]
    event: FeedEvent
    in_flight: bool
    since_s: float | None
    is_compliant: bool


@dataclass(frozen=True, slots=True)
class PublishStatus:
    """Publish the state of all feeds."""

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
    """Store and publish the state of a breach, with jobs that would have to be paused, or are slowed."""

    breach: Breach
    to_pause: tuple[str, ...]
    held: tuple[str, ...]
    trace: Trace | None


Command = Answer | KeepTargets | ForgetTargets | AskForBudgets | PublishStatus | PublishAlert
