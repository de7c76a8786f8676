"""Which slots of jobs one coordinator serves, of a fleet that shares a database.

Every member has a lease in the database, which it renews often. The database's clock decides when a lease has
expired: whoever notices deletes the member, and a slot whose holder is no member is free. A member judges its
own lease by its monotonic clock alone, from the moment when it *sent* the renewal, and stops at two thirds:
clocks that run at rates within a third of each other then never see two holders of a slot. What a holder
writes does not depend on any clock: every transaction checks the slot's lease epoch (`storage.membership`).

Shares are balanced: every member computes the same shares from what it reads with each renewal, takes free
slots up to its own, and hands over what it holds beyond it. Those that hold more keep the larger shares, so
that nothing moves without need, and a fleet with one slot is one holder with others that stand by.

Pure: events in, with the time, and commands out. The shell carries out commands in order, and answers
`Renew`, `Take` and `HandOver` with an event each; an answer that never comes is answered by the deadline.
"""

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from perseus.service.domain.members import Member, Slot

RENEWALS_PER_LEASE = 10
"""How often a lease is renewed, and the slots are looked at."""

KEPT_SHARE = 2 / 3
"""The share of its lease after which a member stops if it could not renew it."""


class MemberState(enum.Enum):
    """What a member is doing."""

    SERVING = enum.auto()
    LEAVING = enum.auto()
    STOPPED = enum.auto()


_TRANSITIONS = {
    MemberState.SERVING: {MemberState.LEAVING, MemberState.STOPPED},
    MemberState.LEAVING: {MemberState.STOPPED},
    MemberState.STOPPED: set[MemberState](),
}


# ---------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """The lease is renewed; `sent_s` is when that was asked for. The rest was read afterwards."""

    sent_s: float
    members: Sequence[Member]
    slots: Sequence[Slot]


@dataclass(frozen=True, slots=True)
class RenewalFailed:
    """The database did not answer in time."""


@dataclass(frozen=True, slots=True)
class Expired:
    """The lease had expired before it could be renewed."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A slot is taken with this lease epoch; None if another was faster, or the outcome is unknown."""

    number: int
    lease_epoch: int | None


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A slot is served no longer, and free."""

    number: int


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """The coordinator is about to stop."""


Event = Ticked | Renewed | RenewalFailed | Expired | Taken | HandedOver | LeaveRequested


# ---------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Renew:
    """Renew the lease, unless it has expired; then read members and slots."""


@dataclass(frozen=True, slots=True)
class Take:
    """Take a slot if its lease epoch is still this one, and it is free or (by an unknown outcome) ours."""

    number: int
    lease_epoch: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Load what is stored of a slot, and serve it."""

    number: int
    lease_epoch: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """Stop serving a slot, store everything, and free it if the lease epoch is still this one."""

    number: int
    lease_epoch: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Stop serving a slot at once: it has, or may have, another holder."""

    number: int


@dataclass(frozen=True, slots=True)
class Depart:
    """Delete the member, which holds nothing any more."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End: the lease has expired, or may have. Whoever notices deletes the member."""


Command = Renew | Take | Serve | HandOver | Drop | Depart | Stop


class Membership:
    """One member, which has joined at `joined_s`; the lease has `lease_s` seconds.

    Attributes:
        state: what it is doing; once STOPPED, only a new member may go on.
        held: the lease epoch of every slot that it serves.
    """

    def __init__(self, member_id: str, lease_s: float, joined_s: float) -> None:
        self.state = MemberState.SERVING
        self.held: dict[int, int] = {}
        self._member_id = member_id
        self._lease_s = lease_s
        self._deadline_s = joined_s + lease_s * KEPT_SHARE
        self._renew_at_s = joined_s
        self._is_renewing = False
        self._taking: set[int] = set()
        self._handing_over: set[int] = set()

    def holds(self, number: int, now_s: float) -> bool:
        """Whether it may offer and write for a slot at this time."""
        return number in self.held and now_s < self._deadline_s

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Take an event at a time of the monotonic clock; return what to do."""
        if self.state is MemberState.STOPPED:
            return []
        if now_s >= self._deadline_s:  # even if a renewal is answered now: it may have come too late
            return self._stop()
        match event:
            case Ticked():
                return self._on_ticked(now_s)
            case Renewed():
                return self._on_renewed(event, now_s)
            case RenewalFailed():
                self._is_renewing = False
                return self._on_ticked(now_s)
            case Expired():
                return self._stop()
            case Taken(number, lease_epoch):
                return self._on_taken(number, lease_epoch)
            case HandedOver(number):
                return self._on_handed_over(number)
            case LeaveRequested():
                return self._on_leave_requested()
        assert_never(event)

    def _on_ticked(self, now_s: float) -> list[Command]:
        if self._is_renewing or now_s < self._renew_at_s:
            return []
        self._is_renewing = True
        self._renew_at_s = now_s + self._lease_s / RENEWALS_PER_LEASE
        return [Renew()]

    def _on_renewed(self, event: Renewed, now_s: float) -> list[Command]:
        self._is_renewing = False
        self._deadline_s = event.sent_s + self._lease_s * KEPT_SHARE
        if now_s >= self._deadline_s:  # the answer comes from before a freeze
            return self._stop()
        commands: list[Command] = []
        for slot in event.slots:
            epoch = self.held.get(slot.number)
            if epoch is not None and (slot.holder, slot.lease_epoch) != (self._member_id, epoch):
                commands += self._drop(slot.number)
        if self.state is MemberState.SERVING:
            commands += self._balance(event.members, event.slots)
        return commands

    def _balance(self, members: Sequence[Member], slots: Sequence[Slot]) -> list[Command]:
        share = _share(self._member_id, members, slots)
        present = {member.member_id for member in members}
        commands: list[Command] = []
        room = share - len(self.held) - len(self._taking)
        for number, holder, epoch in slots:
            if number in self.held or number in self._taking:
                continue
            # A slot of ours that we don't serve was taken with an unknown outcome: a new epoch settles it.
            if holder == self._member_id or (holder not in present and room > 0):
                room -= 1
                self._taking.add(number)
                commands.append(Take(number, epoch))
        excess_count = len(self.held) - len(self._handing_over) - share
        kept = [number for number in sorted(self.held) if number not in self._handing_over]
        for number in kept[len(kept) - max(0, excess_count) :]:
            commands += self._hand_over(number)
        return commands

    def _on_taken(self, number: int, lease_epoch: int | None) -> list[Command]:
        self._taking.discard(number)
        if lease_epoch is None:
            return self._depart_if_empty()
        self.held[number] = lease_epoch
        serve: list[Command] = [Serve(number, lease_epoch)]
        return serve + (self._hand_over(number) if self.state is MemberState.LEAVING else [])

    def _on_handed_over(self, number: int) -> list[Command]:
        self.held.pop(number, None)
        self._handing_over.discard(number)
        return self._depart_if_empty()

    def _on_leave_requested(self) -> list[Command]:
        self._enter(MemberState.LEAVING)
        commands: list[Command] = []
        for number in sorted(self.held.keys() - self._handing_over):
            commands += self._hand_over(number)
        return commands + self._depart_if_empty()

    def _depart_if_empty(self) -> list[Command]:
        if self.state is not MemberState.LEAVING or self.held or self._taking:
            return []
        self._enter(MemberState.STOPPED)
        return [Depart()]

    def _hand_over(self, number: int) -> list[Command]:
        self._handing_over.add(number)
        return [HandOver(number, self.held[number])]

    def _drop(self, number: int) -> list[Command]:
        del self.held[number]
        self._handing_over.discard(number)
        return [Drop(number)]

    def _stop(self) -> list[Command]:
        self._enter(MemberState.STOPPED)
        return [*(command for number in sorted(self.held) for command in self._drop(number)), Stop()]

    def _enter(self, state: MemberState) -> None:
        assert state in _TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state


def _share(member_id: str, members: Sequence[Member], slots: Sequence[Slot]) -> int:
    """Return how many slots are a member's; who holds more comes first, for the larger shares."""
    held_count = Counter(slot.holder for slot in slots)
    order = sorted((member.member_id for member in members), key=lambda some: (-held_count[some], some))
    quotient, rest = divmod(len(slots), len(order))
    return quotient + (order.index(member_id) < rest)
