"""The gateway's state machine: load targets, feeds, budgets and the time in, commands out. Pure.

A message is accepted or refused once, by its content and the clock, and stored before it has any effect. At
every change, the gateway derives the budgets from all accepted messages (`schedule`) and compares them with
the coordinator's (`budgets`), so that the state converges after any restart or outage.

It publishes:

- a power state whenever something happens on a feed (`transitions`), when a message's budgets are in place,
  and as a heartbeat;
- a power state under the message's correlation identifier if a message is refused: its targets are missing
  from those of its feeds, as the contract has no other way to report that; likewise if the coordinator
  refuses its budgets: its targets are not active;
- a breach when it is detected, escalated and resolved (`breaches`), and again after a restart.

While the coordinator can't be reached, the state of feeds is unknown, and no power state is published.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from perseus.grid.dsx_flex import budgets, schedule
from perseus.grid.dsx_flex.breaches import Breach, BreachStatus, BreachWatch
from perseus.grid.dsx_flex.commands import (
    ACCEPTED,
    Answer,
    AskForBudgets,
    BudgetAnswered,
    BudgetRefused,
    BudgetsListed,
    Command,
    CoordinatorLost,
    FeedRead,
    FeedsListed,
    FeedSnapshot,
    ForgetTargets,
    Input,
    KeepTargets,
    PublishAlert,
    PublishStatus,
    TargetsReceived,
    Tick,
    Verdict,
)
from perseus.grid.dsx_flex.transitions import Transitions
from perseus.grid.dsx_flex.values import FeedEvent, FeedReading, Piece, TargetSet, Trace

MAX_AHEAD_S = 60.0
"""How far in the future a message may have been sent, as clocks differ."""

MEMORY_S = 7 * 86400.0
"""How long messages are remembered to recognise duplicates; messages sent earlier are refused."""

MAX_REMEMBERED = 10_000
"""Messages remembered of one sender: no grid needs more than one a minute."""

MAX_PER_HOUR = 600
"""Messages of one sender, by arrival."""

MAX_TARGETS = 2_048
"""Current and future targets of one sender, on all feeds: over twenty days of hourly ones on four feeds."""

MAX_REPLACED_TARGETS = 32_768
"""The same, including replaced targets and those that lift limits."""

_HOUR_S = 3600.0
_JUMP_S = 120.0
"""The clock is read every second or so: a larger step means that it was set, or the process was suspended."""

STEP_BACK_S = 1.0
"""Smaller steps back are normal for a wall clock: time then stands still until the clock catches up."""

_DIGITS = 1e-9


class Gateway:
    """One agent of the contract.

    Args:
        identifier: its name in the contract.
        heartbeat_s: the interval of power states while nothing happens.
        new_id: makes identifiers of breaches: UUIDs of version 4.
        accepted: the stored messages, in order of arrival.
        open_breaches: breaches published before a restart and not resolved.
    """

    def __init__(
        self,
        identifier: str,
        heartbeat_s: float,
        new_id: Callable[[], str],
        accepted: Iterable[TargetSet] = (),
        open_breaches: Iterable[Breach] = (),
    ) -> None:
        self._identifier = identifier
        self._heartbeat_s = heartbeat_s
        self._new_id = new_id
        self._sets: dict[str, TargetSet] = {some.event_id: some for some in accepted}
        self._readings: dict[str, FeedReading] = {}
        self._is_lost = True
        self._budgets: dict[str, budgets.KnownBudget] | None = None
        self._transitions: dict[str, Transitions] = {}
        self._breaches = {each.feed: BreachWatch(new_id, each) for each in open_breaches}
        self._unpublished = set(self._breaches)
        """Feeds whose open breach must be published once more."""
        self._unanswered: dict[str, TargetSet] = {}
        self._unkept: set[str] = set()
        """Messages whose refused budgets have been reported to the sender."""
        self._held_back: set[str] = set()
        """Feeds whose latest reading is handled only once a target is answered."""
        self._all_pieces: list[Piece] | None = None
        """Pieces of all accepted messages, including past ones; None after a change."""
        self._published_s: float | None = None
        self._latest_s = -math.inf
        self._steady_since_s = -math.inf
        """When the clock last jumped."""
        self._arrivals_s: dict[str, deque[float]] = {}
        """Arrival times of the latest messages, by sender."""
        self._handlers: dict[type, Callable[..., list[Command]]] = {
            TargetsReceived: self._on_targets_received,
            FeedsListed: self._on_feeds_listed,
            FeedRead: self._on_feed_read,
            BudgetsListed: self._on_budgets_listed,
            BudgetAnswered: self._on_budget_answered,
            BudgetRefused: self._on_budget_refused,
            CoordinatorLost: self._on_coordinator_lost,
            Tick: self._on_tick,
        }

    def handle(self, event: Input, now_s: float) -> list[Command]:
        """Handle an input at a time of the wall clock; return the commands in order."""
        return self._handlers[type(event)](event, self._time_s(now_s))

    def changes(self, now_s: float) -> budgets.Changes:
        """Return the requests to the coordinator; none while its budgets are unknown."""
        if self._budgets is None:
            return budgets.Changes()
        time_s = self._time_s(now_s)
        return budgets.changes(self._pieces(time_s), self._budgets, self._senders(), self._identifier, time_s)

    def _time_s(self, now_s: float) -> float:
        """Return a monotonic time; if the clock was set back, reset everything that used the later time."""
        if now_s < self._latest_s - STEP_BACK_S:
            self._latest_s, self._published_s, self._steady_since_s = now_s, None, now_s
            self._transitions.clear()
            self._breaches = {
                feed: BreachWatch(self._new_id, replace(found, detected_s=min(found.detected_s, now_s)))
                for feed, watch in self._breaches.items()
                if (found := watch.open_breach) is not None
            }
        if now_s > self._latest_s + _JUMP_S:
            self._steady_since_s = now_s
        self._latest_s = max(self._latest_s, now_s)
        return self._latest_s

    def _senders(self) -> dict[str, str]:
        return {event_id: some.sender for event_id, some in self._sets.items()}

    @property
    def knows_feeds(self) -> bool:
        """Whether messages can be judged: the coordinator has listed its feeds at least once."""
        return bool(self._readings)

    # --- Inputs ---------------------------------------------------------------------------------------------

    def _on_targets_received(self, event: TargetsReceived, now_s: float) -> list[Command]:
        some = event.some
        verdict, detail = self._judged(some, now_s)
        commands: list[Command] = []
        if verdict in ACCEPTED:
            self._sets[some.event_id] = some
            self._all_pieces = None
            commands += [KeepTargets(some), AskForBudgets()]
        if verdict in ACCEPTED or verdict is Verdict.DUPLICATE:
            self._unanswered[some.event_id] = some
        else:
            commands += self._status({}, now_s, some)
        return [*commands, Answer(some, verdict, detail), *self._answers(now_s)]

    def _on_feeds_listed(self, event: FeedsListed, now_s: float) -> list[Command]:
        self._is_lost = False
        before = set(self._readings)
        # The contract requires a feed's capacity, so feeds without one can't be published.
        self._readings = {each.feed: each for each in event.readings if each.maximum_w is not None}
        self._held_back &= self._readings.keys()
        commands: list[Command] = []
        if before != set(self._readings):
            self._all_pieces = None
            commands.append(AskForBudgets())
        for reading in self._readings.values():
            commands += self._on_reading(reading, now_s)
        return commands

    def _on_feed_read(self, event: FeedRead, now_s: float) -> list[Command]:
        reading = event.reading
        if reading.feed not in self._readings or reading.maximum_w is None:
            return []
        self._readings[reading.feed] = reading
        return self._on_reading(reading, now_s)

    def _on_budgets_listed(self, event: BudgetsListed, now_s: float) -> list[Command]:
        is_first, self._budgets = self._budgets is None, dict(event.known)
        commands: list[Command] = [AskForBudgets(), *self._answers(now_s)]
        if is_first:  # of this connection
            commands += self._status({}, now_s)
        return commands

    def _on_budget_answered(self, event: BudgetAnswered, now_s: float) -> list[Command]:
        if self._budgets is not None:
            self._budgets[event.known.budget.budget_id] = event.known
        return self._answers(now_s)

    def _on_budget_refused(self, event: BudgetRefused, now_s: float) -> list[Command]:
        """Report to the sender, once, that a target is not in force yet: it is not among the active ones."""
        some = self._sets.get(budgets.event_id_of(event.budget_id, self._identifier))
        if some is None or some.event_id in self._unkept:
            return []
        self._unkept.add(some.event_id)
        self._unanswered.setdefault(some.event_id, some)
        return self._status({}, now_s, some)

    def _on_coordinator_lost(self, event: CoordinatorLost, now_s: float) -> list[Command]:
        self._is_lost, self._budgets = True, None
        return []

    def _on_tick(self, event: Tick, now_s: float) -> list[Command]:
        commands: list[Command] = []
        if not self._is_lost and self._budgets is not None:
            for reading in self._readings.values():
                commands += self._on_reading(reading, now_s)
            if self._published_s is None or now_s >= self._published_s + self._heartbeat_s:
                commands += self._status({}, now_s)
        if forgotten := self._forget(now_s):
            commands.append(ForgetTargets(forgotten))
        return commands

    # --- Messages -------------------------------------------------------------------------------------------

    def _judged(self, some: TargetSet, now_s: float) -> tuple[Verdict, str]:
        if some.event_id in self._sets:
            return Verdict.DUPLICATE, ""
        if some.time_s > now_s + MAX_AHEAD_S:
            return Verdict.FUTURE_DATED, f"{some.time_s - now_s:.0f} s ahead"
        if some.time_s <= now_s - MEMORY_S:
            return Verdict.TOO_OLD, f"{now_s - some.time_s:.0f} s ago"
        for target in some.targets:
            if missing := [feed for feed in target.feeds if feed not in self._readings]:
                return Verdict.UNKNOWN_FEED, missing[0]
        if any(target.constraint is not None and not target.constraint.limit_w for target in some.targets):
            return Verdict.NO_POWER, ""
        if some.end_s <= now_s:
            return Verdict.EXPIRED, ""
        if too_many := self._too_many(some, now_s):
            return Verdict.TOO_MANY, too_many
        left = schedule.pieces([*self._sets.values(), some], self._readings)
        senders = {**self._senders(), some.event_id: some.sender}
        target_count = sum(senders[each.event_id] == some.sender and each.end_s > now_s for each in left)
        if target_count > MAX_TARGETS:
            return (
                Verdict.TOO_MANY,
                f"{target_count} targets of {some.sender}, expected at most {MAX_TARGETS}",
            )
        is_limiting = any(target.constraint is not None for target in some.targets)
        if is_limiting and not any(each.event_id == some.event_id and each.end_s > now_s for each in left):
            return Verdict.SUPERSEDED, ""
        return Verdict.ACCEPTED, ""

    def _too_many(self, some: TargetSet, now_s: float) -> str:
        """Return which limit a sender exceeds; an empty text if none."""
        arrivals_s = self._arrivals_s.setdefault(some.sender, deque())
        while arrivals_s and arrivals_s[0] <= now_s - _HOUR_S:
            arrivals_s.popleft()
        if len(arrivals_s) >= MAX_PER_HOUR:
            return f"{MAX_PER_HOUR} messages of {some.sender} in an hour"
        arrivals_s.append(now_s)
        own = [each for each in self._sets.values() if each.sender == some.sender]
        if len(own) >= MAX_REMEMBERED:
            return f"{MAX_REMEMBERED} messages of {some.sender}"
        count = sum(
            len(target.feeds or self._readings)
            for each in (*own, some)
            for target in each.targets
            if target.end_s > now_s
        )
        if count > MAX_REPLACED_TARGETS:
            return f"{count} targets of {some.sender}, expected at most {MAX_REPLACED_TARGETS}"
        return ""

    def _answers(self, now_s: float) -> list[Command]:
        """Publish the power states of messages whose budgets are in place."""
        if not self._unanswered or self._budgets is None or self._is_lost:
            return []
        changes = self.changes(now_s)
        if changes.to_cancel:
            return []
        some = budgets.due(self._pieces(now_s), self._senders(), now_s)
        enforced = budgets.in_force(some, self._budgets, self._identifier)
        waiting = {piece.event_id for piece in some if piece not in enforced}
        commands: list[Command] = []
        answered: set[str] = set()
        for event_id, each in list(self._unanswered.items()):
            named = self._named(each)
            if event_id not in waiting and named.isdisjoint(changes.outdated):
                del self._unanswered[event_id]
                self._unkept.discard(event_id)
                commands += self._status(dict.fromkeys(named, FeedEvent.TARGET_SET), now_s, each)
                answered |= named
        for feed in sorted(answered & self._held_back):
            commands += self._on_reading(self._readings[feed], now_s)
        return commands

    def _named(self, some: TargetSet) -> set[str]:
        return {feed for target in some.targets for feed in target.feeds or self._readings}

    def _is_answer_due(self, feed: str) -> bool:
        """Return whether `TARGET_SET` must still be published for a feed, before the target's effects."""
        return any(
            feed in self._named(each)
            for event_id, each in self._unanswered.items()
            if event_id not in self._unkept
        )

    def _forget(self, now_s: float) -> tuple[str, ...]:
        """Forget messages that affect neither the present nor older messages any more."""
        due = [some for some in self._sets.values() if some.time_s <= now_s - MEMORY_S]
        if not due or now_s < self._steady_since_s + _HOUR_S:  # not right after a jump: it can't be undone
            return ()
        needed = {piece.event_id for piece in self._pieces(now_s)}
        forgotten = []
        for some in sorted(due, key=lambda each: each.time_s):
            older = [
                each
                for each in self._sets.values()
                if each.sender == some.sender and each.time_s <= some.time_s and each.end_s > now_s
            ]
            if some.event_id not in needed and all(each is some for each in older):
                del self._sets[some.event_id]
                self._unkept.discard(some.event_id)
                self._unanswered.pop(some.event_id, None)
                self._all_pieces = None
                forgotten.append(some.event_id)
        return tuple(forgotten)

    # --- Feeds ----------------------------------------------------------------------------------------------

    def _on_reading(self, reading: FeedReading, now_s: float) -> list[Command]:
        """Handle a reading of a feed; return what to publish."""
        feed = reading.feed
        target = schedule.active(self._enforced(feed, now_s), now_s)
        transitions = self._transitions.setdefault(feed, Transitions())
        commands: list[Command] = []
        if self._is_answer_due(feed):
            self._held_back.add(feed)
        else:
            self._held_back.discard(feed)
            for event in transitions.take(reading, has_target=target is not None, now_s=now_s):
                commands += self._status({feed: event}, now_s, self._set_of(target))
        watch = self._breaches.setdefault(feed, BreachWatch(self._new_id))
        if self._budgets is None and watch.open_breach is not None:
            return commands  # whether its target still applies is unknown
        breaches = watch.take(reading, target, now_s)
        if feed in self._unpublished:
            self._unpublished.discard(feed)
            if not breaches and watch.open_breach is not None:
                breaches = [watch.open_breach]
        for breach in breaches:
            is_over = breach.status is BreachStatus.RESOLVED
            to_pause, held = ((), ()) if is_over else (reading.to_pause, reading.held)
            commands.append(PublishAlert(breach, to_pause, held, self._trace(breach.correlation_id)))
        return commands

    def _status(
        self, events: Mapping[str, FeedEvent], now_s: float, cause: TargetSet | None = None
    ) -> list[Command]:
        if self._is_lost:
            return []
        self._published_s = now_s
        some = self._pieces(now_s)
        enforced = budgets.in_force(some, self._budgets or {}, self._identifier)
        outdated = self.changes(now_s).outdated
        enforced = {piece for piece in enforced if piece.feed not in outdated}
        feeds = {
            feed: self._snapshot(
                reading,
                [piece for piece in some if piece.feed == feed],
                enforced,
                events.get(feed, FeedEvent.PERIODIC),
                now_s,
            )
            for feed, reading in self._readings.items()
        }
        if cause is None:
            return [PublishStatus(feeds, now_s)]
        return [PublishStatus(feeds, now_s, cause.correlation_id, cause.trace)]

    def _snapshot(
        self,
        reading: FeedReading,
        targets: list[Piece],
        enforced: set[Piece],
        event: FeedEvent,
        now_s: float,
    ) -> FeedSnapshot:
        transitions = self._transitions.get(reading.feed) or Transitions()
        target = schedule.active(targets, now_s)
        is_within = target is None or reading.calculated_w <= target.constraint.limit_w * (1 + _DIGITS)
        return FeedSnapshot(
            reading=reading,
            targets=tuple((piece, piece in enforced and piece.is_active(now_s)) for piece in targets),
            event=event,
            in_flight=transitions.in_flight,
            since_s=transitions.since_s,
            is_compliant=target is None or (reading.is_compliant and is_within and target in enforced),
        )

    def _pieces(self, now_s: float) -> list[Piece]:
        if self._all_pieces is None:
            self._all_pieces = schedule.pieces(self._sets.values(), self._readings)
        return [piece for piece in self._all_pieces if piece.end_s > now_s]

    def _enforced(self, feed: str, now_s: float) -> list[Piece]:
        some = [piece for piece in self._pieces(now_s) if piece.feed == feed]
        enforced = budgets.in_force(some, self._budgets or {}, self._identifier)
        return [piece for piece in some if piece in enforced]

    def _set_of(self, target: Piece | None) -> TargetSet | None:
        return None if target is None else self._sets.get(target.event_id)

    def _trace(self, correlation_id: str) -> Trace | None:
        found = (some.trace for some in self._sets.values() if some.correlation_id == correlation_id)
        return next(found, None)
