"""Power budgets for the load targets, and the requests that bring the coordinator's into line. Pure.

A budget's identifier contains the part of the message that it is for, so that nothing is applied twice after
any restart, and the gateway's name, so that operators' budgets are left alone.

The coordinator limits the budgets of a principal. Each sender has a share of them, for the pieces that start
soonest; later pieces get their budgets when their turn comes, and make way for pieces that start before them.
No limit ends before its replacement is in force, for as long as that lasts, so a refused budget never lets a
limit rise.
"""

import enum
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from perseus.grid.dsx_flex.values import Piece

MAX_BUDGETS = 240
"""The most budgets at a time: below the coordinator's `limit_budgets`, to leave room for replacements."""

SOON_S = 60.0
"""Pieces that start within this time get a budget at once."""

_SUPERSEDED = "made way"
"""Correlation identifier of a budget that the gateway, not an operator, cancels and will set again."""

_BUDGETS_KEPT = 16_384

_SAME_S = 1e-3
"""Times closer than this count as equal: messages have microseconds, budgets nanoseconds."""


class Stage(enum.Enum):
    """The stage of a budget's life cycle in the coordinator."""

    CURRENT = "scheduled or in force"
    ENDED = "ended"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Budget:
    """A power budget; `end_s` is infinite for one that ends only when it is cancelled."""

    budget_id: str
    feed: str
    limit_w: float
    start_s: float
    end_s: float
    correlation_id: str

    @property
    def request_id(self) -> str:
        """The identifier of requests for exactly this budget."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:32]

    def meets(self, other: "Budget") -> bool:
        """Return whether both are on the same feed and overlap in time."""
        return self.feed == other.feed and self.start_s < other.end_s and other.start_s < self.end_s

    def is_same(self, other: "Budget") -> bool:
        """Return whether both are equal, apart from rounding."""
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
        """Whether the gateway cancelled it, to set it again later."""
        return self.stage is Stage.CANCELLED and self.budget.correlation_id == _SUPERSEDED


@dataclass(frozen=True, slots=True)
class Changes:
    """The requests to make now; more may follow once these are granted.

    Attributes:
        to_defer: budgets to make way: set as they are here, then cancel.
        to_set: budgets to set.
        to_cancel: identifiers of budgets to cancel.
        outdated: feeds on which an unwanted budget is still in force.
        unknown: budgets with this gateway's name for messages that it does not know; they are left alone.
    """

    to_defer: tuple[Budget, ...] = ()
    to_set: tuple[Budget, ...] = ()
    to_cancel: tuple[str, ...] = ()
    outdated: frozenset[str] = frozenset()
    unknown: tuple[str, ...] = ()


def prefix(identifier: str) -> str:
    """Return the prefix of the identifiers of all budgets of a gateway."""
    return f"dsx-flex:{identifier}:"


@lru_cache(_BUDGETS_KEPT)
def budget_of(piece: Piece, identifier: str) -> Budget:
    """Return the budget for a piece of a target."""
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
    """Return the pieces that should have budgets by now, the soonest first.

    These are all that apply now or soon, and of the later ones the same number from each sender, with room
    for one more sender.

    Args:
        some: the pieces from now on.
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
    """Return the requests that give the coordinator budgets for exactly the pieces that are due.

    A budget that somebody else has cancelled stays cancelled. A budget that has ended by this clock is not
    cancelled, as this clock may have jumped ahead: it ends there by itself.

    Args:
        some: the pieces from now on.
        known: all of the coordinator's budgets by identifier, including others'.
        senders: of all accepted messages, by their identifiers.
        identifier: this gateway's.
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
        """Return until when its replacements are in force already; infinite for all of its time."""
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
    # A budget whose beginning is replaced already is kept only for the rest of its time.
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
    """Return the pieces whose budgets the coordinator has."""
    found = set()
    for piece in some:
        budget = budget_of(piece, identifier)
        state = known.get(budget.budget_id)
        if state is not None and state.stage is Stage.CURRENT and budget.is_same(state.budget):
            found.add(piece)
    return found


def event_id_of(budget_id: str, identifier: str) -> str:
    """Return the identifier of the message that one of this gateway's budgets is for."""
    return budget_id.removeprefix(prefix(identifier)).partition(":")[0]


def _is_same_time(one_s: float, other_s: float) -> bool:
    return one_s == other_s or abs(one_s - other_s) < _SAME_S
