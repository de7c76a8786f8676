"""Which power budgets the coordinator has to have for the load targets, and what to ask of it for that. Pure.

A budget's identifier says which part of which message it is for, so nothing is applied twice, whoever was
restarted; and whose it is, so that what operators have set is left alone.
"""

import enum
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from perseus.grid.dsx_flex.values import Piece

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


@dataclass(frozen=True, slots=True)
class Changes:
    """What to ask for: first `to_set`, then `to_cancel`, so that no limit is missing in between.

    `unknown`: budgets with this door's name that are for no message that it knows; they are left alone.
    """

    to_set: tuple[Budget, ...] = ()
    to_cancel: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def prefix(identifier: str) -> str:
    """Return what the identifiers of all budgets of one door begin with."""
    return f"dsx-flex:{identifier}:"


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


def changes(
    some: Iterable[Piece], known: Mapping[str, KnownBudget], event_ids: Iterable[str], identifier: str
) -> Changes:
    """Return what to ask for so that the coordinator has budgets for exactly these pieces.

    A budget that somebody else has cancelled stays so.

    Args:
        some: what counts from now on.
        known: the coordinator's budgets by identifier, others' among them.
        event_ids: messages that were accepted.
        identifier: this door's.
    """
    wanted = {budget.budget_id: budget for piece in some for budget in [budget_of(piece, identifier)]}
    ours = {each: state for each, state in known.items() if each.startswith(prefix(identifier))}
    accepted = set(event_ids)
    current = [each for each, state in ours.items() if state.stage is Stage.CURRENT and each not in wanted]
    new = [budget for each, budget in wanted.items() if each not in ours]
    changed = [
        budget
        for each, budget in wanted.items()
        if (state := ours.get(each)) is not None
        and state.stage is not Stage.CANCELLED
        and not budget.is_same(state.budget)
    ]
    return Changes(
        to_set=(*new, *changed),
        to_cancel=tuple(each for each in current if _event_id(each, identifier) in accepted),
        unknown=tuple(each for each in current if _event_id(each, identifier) not in accepted),
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


def _event_id(budget_id: str, identifier: str) -> str:
    return budget_id.removeprefix(prefix(identifier)).partition(":")[0]


def _is_same_time(one_s: float, other_s: float) -> bool:
    return one_s == other_s or abs(one_s - other_s) < _SAME_S
