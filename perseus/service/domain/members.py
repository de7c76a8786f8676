"""Coordinators that share a database: its members, and the slots that jobs belong to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perseus.job_id import slot_of
from perseus.service.domain.errors import ServedElsewhereError


class Member(NamedTuple):
    """A coordinator from one start to its end: a restarted one is another member.

    Attributes:
        member_id: never used by another.
        address: HOST:PORT where clients and agents reach it; empty if it is unknown.
        page_url: the URL of its page, which it serves while it serves a slot; empty if it is unknown.
    """

    member_id: str
    address: str
    page_url: str = ""


class Slot(NamedTuple):
    """A share of the jobs.

    Attributes:
        number: from 0.
        holder: the identifier of the member that serves it, which may be gone; empty for none.
        lease_epoch: the fencing token: it rises whenever the slot is taken, and never falls.
    """

    number: int
    holder: str
    lease_epoch: int


@dataclass(slots=True)
class Fleet:
    """The coordinators that share a database, as one of them has last read; by default, it alone.

    Attributes:
        me: the identifier of the one that has read it.
        served: the slot that it serves; None while it stands by.
        members: all of them; one that is gone is no member.
        slots: all slots, by number.
        late_renewal_count: how often its lease could not be renewed in time.
        database_skew_s: how far the database's clock differs from its own; None if unknown.
    """

    me: str = ""
    served: int | None = 0
    members: Sequence[Member] = (Member("", ""),)
    slots: Sequence[Slot] = (Slot(0, "", 0),)
    late_renewal_count: int = 0
    database_skew_s: float | None = None

    def addresses(self) -> dict[int, str]:
        """Return the addresses of those that serve a slot, by slot; empty if unknown."""
        return {slot: holder.address for slot, holder in self.holders().items()}

    def holders(self) -> dict[int, Member]:
        """Return those that serve a slot, by slot."""
        known = {member.member_id: member for member in self.members}
        return {slot.number: known[slot.holder] for slot in self.slots if slot.holder in known}

    def page_url(self, job_id: str) -> str:
        """Return the URL of the other page that shows a job; empty if there is none, or it is unknown."""
        slot = slot_of(job_id, len(self.slots))
        holder = self.holders().get(slot)
        return holder.page_url if holder is not None and slot != self.served else ""

    def any_page(self) -> tuple[str, str]:
        """Return the address of one that serves a slot and its page's URL, preferably one with a page; each
        is empty if unknown."""
        holders = sorted(self.holders().values(), key=lambda holder: not holder.page_url)
        return (holders[0].address, holders[0].page_url) if holders else ("", "")

    def standbys(self) -> list[str]:
        """Return the addresses of those that serve no slot, where they are known."""
        holders = {slot.holder for slot in self.slots}
        return [
            member.address for member in self.members if member.address and member.member_id not in holders
        ]

    def idle_slots(self) -> list[int]:
        """Return the slots that nobody serves."""
        served = self.holders()
        return [slot.number for slot in self.slots if slot.number not in served]

    def standby_count(self) -> int | None:
        """Return how many stand by; None for one that shares its database with no other."""
        return len(self.members) - len(self.holders()) if self.me else None

    def check_job(self, job_id: str) -> None:
        """Check that a job is of the slot that this coordinator serves.

        Raises:
            ServedElsewhereError: it is not.
        """
        self.check_slot(slot_of(job_id, len(self.slots)), job_id)

    def check_slot(self, slot: int, job_id: str = "") -> None:
        """Check that this coordinator serves a slot, that of a job: what is of the whole fleet is slot 0's.

        Raises:
            ServedElsewhereError: it does not.
        """
        if slot != self.served:
            holder = self.holders().get(slot, Member("", ""))
            raise ServedElsewhereError(
                address=holder.address,
                slot=slot,
                page_url=holder.page_url,
                job_id=job_id,
                standbys=self.standbys(),
            )


ALONE = Fleet()
"""One that shares its database with no other."""
