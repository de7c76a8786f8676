"""Which slot of jobs one coordinator serves, of a fleet that shares a database.

Every member has a lease in the database, which it renews often. The database's clock decides when a lease has
expired: whoever notices deletes the member, and a slot whose holder is no member is free. A member judges its
own lease by its monotonic clock alone, from the moment when it *sent* the renewal, and stops at two thirds:
clocks that run at rates within a third of each other then never see two holders of a slot. What a holder
writes does not depend on any clock: every transaction checks the slot's lease epoch (`storage.membership`).

A member holds at most one slot: it takes a free one if it holds none, keeps it until it leaves, and stops if
it has lost it. Members beyond the number of slots stand by for all of them.

Pure: events in, with the time, and commands out. The shell carries out commands in order, and answers `Renew`
and `Take` with an event each; an answer that never comes is answered by the deadline.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from perseus.service.domain.members import Member, Slot

RENEWALS_PER_LEASE = 10
"""How often a lease is renewed, and the slots are looked at."""

KEPT_SHARE = 2 / 3
"""The share of its lease after which a member stops if it could not renew it."""


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
class LeaveRequested:
    """The coordinator serves no longer, has stored everything, and is about to stop."""


Event = Ticked | Renewed | RenewalFailed | Expired | Taken | LeaveRequested


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
class Depart:
    """Delete the member: a slot that it holds is then free."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop serving at once, and end: the lease has expired or may have, or the slot has another holder.

    Attributes:
        cause: which of them, in words.
    """

    cause: str


Command = Renew | Take | Serve | Depart | Stop


class Membership:
    """One member, which has joined at `joined_s`; the lease has `lease_s` seconds.

    Attributes:
        held: the slot that it serves, if any.
        has_ended: whether it has left or stopped: only a new member may go on.
    """

    def __init__(self, member_id: str, lease_s: float, joined_s: float) -> None:
        self.held: Slot | None = None
        self.has_ended = False
        self._member_id = member_id
        self._lease_s = lease_s
        self._deadline_s = joined_s + lease_s * KEPT_SHARE
        self._renew_at_s = joined_s
        self._is_renewing = False
        self._is_taking = False

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Take an event at a time of the monotonic clock; return what to do."""
        if self.has_ended:
            return []
        if now_s >= self._deadline_s:  # even if a renewal is answered now: it may have come too late
            return self._stop_unrenewed()
        match event:
            case Ticked():
                return self._on_ticked(now_s)
            case Renewed():
                return self._on_renewed(event, now_s)
            case RenewalFailed():
                self._is_renewing = False
                return self._on_ticked(now_s)
            case Expired():
                return self._stop("it had expired before it was renewed")
            case Taken(number, lease_epoch):
                return self._on_taken(number, lease_epoch)
            case LeaveRequested():
                self.has_ended = True
                return [Depart()]
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
            return self._stop_unrenewed()
        ours = [slot for slot in event.slots if slot.holder == self._member_id]
        if self.held is not None:
            if ours == [self.held]:
                return []
            # Of two, one was taken long after its outcome was given up: only a new member can free it.
            is_second = self.held in ours
            return self._stop("it has a second slot" if is_second else "its slot has been taken since")
        if self._is_taking:
            return []
        # A slot of ours that we don't serve was taken with an unknown outcome: a new epoch settles it.
        slot = ours[0] if ours else self._free(event)
        if slot is None:
            return []
        self._is_taking = True
        return [Take(slot.number, slot.lease_epoch)]

    def _free(self, event: Renewed) -> Slot | None:
        """Return a free slot, if there is one; another one than others who look for one at the same time."""
        present = {member.member_id for member in event.members}
        free = [slot for slot in event.slots if slot.holder not in present]
        idle = sorted({self._member_id, *present} - {slot.holder for slot in event.slots})
        return free[idle.index(self._member_id) % len(free)] if free else None

    def _on_taken(self, number: int, lease_epoch: int | None) -> list[Command]:
        self._is_taking = False
        if lease_epoch is None:
            return []
        self.held = Slot(number, self._member_id, lease_epoch)
        return [Serve(number, lease_epoch)]

    def _stop_unrenewed(self) -> list[Command]:
        return self._stop(f"it was not renewed for {self._lease_s * KEPT_SHARE:g} s")

    def _stop(self, cause: str) -> list[Command]:
        self.held = None
        self.has_ended = True
        return [Stop(cause)]
