"""Which power budgets the coordinator has to have for the load targets, and what to ask of it for that. Pure.

A budget's identifier says which part of which message it is for, so nothing is applied twice, whoever was
restarted; and whose it is, so that what operators have set is left alone.

The coordinator lets one principal have so many budgets. Each sender has a share of them, for what counts
soonest; what counts later is asked for when its turn comes, and makes way for what comes to count before it.
And no limit ends before what replaces it is in force, for as long as that is, so a budget that is refused
never lets a limit rise.
"""

import enum
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from perseus.grid.dsx_flex.values import Piece

MAX_BUDGETS = 240
"""At once: fewer than the coordinator's `limit_budgets`, so that what replaces others finds room."""

SOON_S = 60.0
"""What counts so soon is a budget at once."""

_SUPERSEDED = "made way"
"""Correlation identifier of a budget that the door cancels to set it again: no operator has cancelled it."""

_BUDGETS_KEPT = 16_384

_SAME_S = 1e-3
"""Times that differ by less are the same: messages have microseconds, budgets nanoseconds."""


class Stage(enum.Enum):
    """Where the coordinator has a budget in its life."""

    CURRENT = "scheduled or in force"
    ENDED = "ended"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Budget:
    """A power budget; `end_s` is infinite for one that ends by cancelling alone."""

    budget_id: str
    feed: str
    limit_w: float
    start_s: float
    end_s: float
    correlation_id: str

    @property
    def request_id(self) -> str:
        """The same for every request for this very budget, and for no other."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:32]

    def meets(self, other: "Budget") -> bool:
        """Whether there is a time for which both are on one feed."""
        return self.feed == other.feed and self.start_s < other.end_s and other.start_s < self.end_s

    def is_same(self, other: "Budget") -> bool:
        """Whether both say the same."""
        return (
            (self.budget_id, self.feed) == (other.budget_id, other.feed)
            and math.isclose(self.limit_w, other.limit_w, rel_tol=1e-9)
            and _is_same_time(self.start_s, other.start_s)
            and _is_same_time(self.end_s, other.end_s)
        )


@dataclass(frozen=True, slots=True)
class KnownBudget:
    """A budget that the coordinator has."""

    budget: Budget
    stage: Stage

    @property
    def is_superseded(self) -> bool:
        """Whether it was cancelled by the door, to be set again."""
        return self.stage is Stage.CANCELLED and self.budget.correlation_id == _SUPERSEDED


@dataclass(frozen=True, slots=True)
class Changes:
    """What may be asked for now; more may be once that is granted.

    Attributes:
        to_defer: to be set as they are here, and then cancelled: they make way.
        outdated: feeds on which a budget still counts that is to be no more.
        unknown: budgets with this door's name that are for no message that it knows; they are left alone.
    """

    to_defer: tuple[Budget, ...] = ()
    to_set: tuple[Budget, ...] = ()
    to_cancel: tuple[str, ...] = ()
    outdated: frozenset[str] = frozenset()
    unknown: tuple[str, ...] = ()


def prefix(identifier: str) -> str:
    """Return what the identifiers of all budgets of one door begin with."""
    return f"dsx-flex:{identifier}:"


@lru_cache(_BUDGETS_KEPT)
def budget_of(piece: Piece, identifier: str) -> Budget:
    """Return the budget for what is left of a target on a feed."""
    feed = hashlib.sha256(piece.feed.encode()).hexdigest()[:8]
    start = round(piece.start_s * 1e3)
    return Budget(
        budget_id=f"{prefix(identifier)}{piece.event_id}:{piece.number}:{feed}:{start}",
        feed=piece.feed,
        limit_w=piece.constraint.limit_w,
        start_s=piece.start_s,
        end_s=piece.end_s,
        correlation_id=piece.correlation_id,
    )


def due(some: Iterable[Piece], senders: Mapping[str, str], now_s: float) -> list[Piece]:
    """Return the pieces that are to be budgets by now, the soonest first.

    All that count now, or soon; and of those that count later as many of one sender as of every other, with
    room for one more sender.

    Args:
        some: what counts from now on.
        senders: of all messages, by their identifiers.
        now_s: the time.
    """
    ordered = sorted(some, key=lambda each: each.start_s)
    found = [piece for piece in ordered if piece.start_s <= now_s + SOON_S]
    later: dict[str, list[Piece]] = {}
    for piece in ordered[len(found) :]:
        later.setdefault(senders[piece.event_id], []).append(piece)
    share = max(0, MAX_BUDGETS - len(found)) // (len(later) + 1)
    found += [piece for own in later.values() for piece in own[:share]]
    return sorted(found, key=lambda each: each.start_s)


def changes(
    some: Sequence[Piece],
    known: Mapping[str, KnownBudget],
    senders: Mapping[str, str],
    identifier: str,
    now_s: float,
) -> Changes:
    """Return what to ask for so that the coordinator has budgets for exactly the pieces that are due.

    A budget that somebody else has cancelled stays so. One that is over here ends by itself there: the clock
    here may have jumped ahead.

    Args:
        some: what counts from now on.
        known: the coordinator's budgets by identifier, others' among them.
        senders: of all messages that were accepted, by their identifiers.
        identifier: this door's.
        now_s: the time.
    """
    wanted = {budget.budget_id: budget for piece in some for budget in [budget_of(piece, identifier)]}
    ours = {
        each: state
        for each, state in known.items()
        if each.startswith(prefix(identifier)) and not state.is_superseded
    }
    current = [
        each
        for each, state in ours.items()
        if state.stage is Stage.CURRENT and state.budget.end_s > now_s and each not in wanted
    ]
    missing: dict[str, list[Budget]] = {}
    for budget_id, budget in wanted.items():
        if budget_id not in ours:
            missing.setdefault(senders[event_id_of(budget_id, identifier)], []).append(budget)

    def replaced_until_s(budget_id: str) -> float:
        """Until when all that is to be in force in its place is; infinite for all of its time."""
        sender = senders[event_id_of(budget_id, identifier)]
        starts_s = (each.start_s for each in missing.get(sender, ()) if each.meets(ours[budget_id].budget))
        return min(starts_s, default=math.inf)

    due_ids = [budget_of(piece, identifier).budget_id for piece in due(some, senders, now_s)]
    new = [budget_id for budget_id in due_ids if budget_id not in ours]
    current_count = sum(state.stage is Stage.CURRENT for state in ours.values())
    later = sorted(
        (wanted[each] for each in wanted.keys() - set(due_ids) if each in ours),
        key=lambda budget: budget.start_s,
    )
    excess = min(len(new), current_count + len(new) - MAX_BUDGETS)
    changed = [
        budget_id
        for budget_id, budget in wanted.items()
        if (state := ours.get(budget_id)) is not None
        and state.stage is not Stage.CANCELLED
        and not budget.is_same(state.budget)
        and (budget.end_s > state.budget.end_s or replaced_until_s(budget_id) == math.inf)
    ]
    unwanted = [each for each in current if event_id_of(each, identifier) in senders]
    # What is replaced for the beginning of its time counts for the rest alone.
    shortened = [
        replace(ours[each].budget, start_s=until_s)
        for each in unwanted
        for until_s in [replaced_until_s(each)]
        if max(now_s, ours[each].budget.start_s + _SAME_S) < until_s < math.inf
    ]
    return Changes(
        to_defer=tuple(
            replace(each, correlation_id=_SUPERSEDED)
            for each in later[::-1][: max(0, excess)]
            if ours[each.budget_id].stage is Stage.CURRENT
        ),
        to_set=(*(wanted[budget_id] for budget_id in (*new, *changed)), *shortened),
        to_cancel=tuple(each for each in unwanted if replaced_until_s(each) == math.inf),
        outdated=frozenset(ours[each].budget.feed for each in unwanted if ours[each].budget.start_s <= now_s),
        unknown=tuple(each for each in current if event_id_of(each, identifier) not in senders),
    )


def in_force(some: Sequence[Piece], known: Mapping[str, KnownBudget], identifier: str) -> set[Piece]:
    """Return those pieces for which the coordinator has their budgets."""
    found = set()
    for piece in some:
        budget = budget_of(piece, identifier)
        state = known.get(budget.budget_id)
        if state is not None and state.stage is Stage.CURRENT and budget.is_same(state.budget):
            found.add(piece)
    return found


def event_id_of(budget_id: str, identifier: str) -> str:
    """Return the identifier of the message that a budget of this door's is for."""
    return budget_id.removeprefix(prefix(identifier)).partition(":")[0]


def _is_same_time(one_s: float, other_s: float) -> bool:
    return one_s == other_s or abs(one_s - other_s) < _SAME_S
