"""Coordinators that share a database: its members, and the slots that jobs belong to."""

from typing import NamedTuple


class Member(NamedTuple):
    """A coordinator from one start to its end: a restarted one is another member.

    Attributes:
        member_id: never used by another.
        address: HOST:PORT where clients and agents reach it; empty if it is unknown.
    """

    member_id: str
    address: str


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
