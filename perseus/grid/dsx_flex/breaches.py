"""Breaches: measured power above a load target, from detection to resolution. Pure.

The judged power is the coordinator's mean over ten seconds in which the limit had to be kept: power on the
way down to a target is no breach. Severity follows the contract: critical from 20 % above the target.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

from perseus.grid.dsx_flex.values import Constraint, FeedReading, Piece

THRESHOLD = 0.02
"""Excess that is no breach: means over ten seconds may exceed the target by this much."""
CRITICAL = 0.20
DETECT_S = 5.0
"""How long an excess must last to be a breach."""
ESCALATE_S = 60.0
"""A breach that lasts this long is escalated; one that becomes critical, at once."""


class BreachStatus(enum.Enum):
    """The stage of a breach's life cycle."""

    ACTIVE = "active"
    ESCALATED = "escalated"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class Breach:
    """The latest state of a breach; times in seconds since 1970."""

    breach_id: str
    feed: str
    correlation_id: str
    constraint: Constraint
    best_effort: bool
    detected_s: float
    status: BreachStatus
    is_critical: bool
    measured_w: float
    resolved_s: float | None = None


class BreachWatch:
    """Detects breaches on one feed. `new_id` makes identifiers; `open_breach` is from before a restart."""

    def __init__(self, new_id: Callable[[], str], open_breach: Breach | None = None) -> None:
        self._new_id = new_id
        self._open = open_breach
        self._above_since_s: float | None = None

    @property
    def open_breach(self) -> Breach | None:
        """The unresolved breach, if there is one."""
        return self._open

    def take(self, reading: FeedReading, target: Piece | None, now_s: float) -> list[Breach]:
        """Handle a reading under the feed's target, None for none; return breaches to publish."""
        changed: list[Breach] = []
        if self._open is not None and (target is None or not _is_for(self._open, target)):
            changed.append(self._resolved(self._open, reading, now_s))
        if target is None or reading.judged_w is None or reading.in_transition:
            self._above_since_s = None
            return changed
        excess = reading.judged_w / target.constraint.limit_w - 1
        if self._open is None:
            changed += self._found(reading, target, excess, now_s)
        elif excess <= 0:
            changed.append(self._resolved(self._open, reading, now_s))
        else:
            changed += self._escalated(self._open, reading, excess, now_s)
        return changed

    def _found(self, reading: FeedReading, target: Piece, excess: float, now_s: float) -> list[Breach]:
        if excess <= THRESHOLD:
            self._above_since_s = None
            return []
        if self._above_since_s is None:
            self._above_since_s = now_s
        if now_s < self._above_since_s + DETECT_S:
            return []
        assert reading.judged_w is not None
        self._open = Breach(
            breach_id=self._new_id(),
            feed=target.feed,
            correlation_id=target.correlation_id,
            constraint=target.constraint,
            best_effort=target.best_effort,
            detected_s=now_s,
            status=BreachStatus.ACTIVE,
            is_critical=excess > CRITICAL,
            measured_w=reading.judged_w,
        )
        return [self._open]

    def _escalated(self, before: Breach, reading: FeedReading, excess: float, now_s: float) -> list[Breach]:
        is_critical = excess > CRITICAL
        is_due = now_s >= before.detected_s + ESCALATE_S or (is_critical and not before.is_critical)
        if before.status is BreachStatus.ESCALATED or not is_due:
            return []
        assert reading.judged_w is not None
        self._open = replace(
            before, status=BreachStatus.ESCALATED, is_critical=is_critical, measured_w=reading.judged_w
        )
        return [self._open]

    def _resolved(self, before: Breach, reading: FeedReading, now_s: float) -> Breach:
        self._open = self._above_since_s = None
        measured_w = reading.measured_w if reading.judged_w is None else reading.judged_w
        return replace(before, status=BreachStatus.RESOLVED, measured_w=measured_w, resolved_s=now_s)


def _is_for(breach: Breach, target: Piece) -> bool:
    return (breach.correlation_id, breach.constraint) == (target.correlation_id, target.constraint)
