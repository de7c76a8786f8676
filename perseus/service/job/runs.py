"""Decides which run of its job a registration leads to. Pure.

    there is no run yet                     the first begins
    an earlier run knows the request        that run is returned
    the latest run has finished
        and knows the request               it is returned
        and does not                        a new one begins
    it has not finished
        and the specification is the same   it continues
        it differs, and a rank is live      refused
        it differs, and none is             it is abandoned, and a new one begins

A request that the unfinished latest run knows, but with another specification, is no retry: its specification
decides.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatestRun:
    """A job's latest run in relation to a registration.

    Attributes:
        number: its number, from 1.
        has_finished: whether it has ended.
        has_live_rank: whether a rank is connected, or may come back within its lease.
        difference: the part in which the specification differs from the run's; None for the same.
    """

    number: int
    has_finished: bool
    has_live_rank: bool
    difference: str | None


@dataclass(frozen=True, slots=True)
class Repeat:
    """The request led to this run before, and changes nothing."""

    number: int


@dataclass(frozen=True, slots=True)
class Continue:
    """The latest run continues: plan, profile and versions stay."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Live ranks run another specification: this part of it differs."""

    difference: str


@dataclass(frozen=True, slots=True)
class Begin:
    """A new run begins; the latest one is abandoned because of this difference, or has ended (None)."""

    number: int
    abandons: str | None = None


Decision = Repeat | Continue | Refuse | Begin


def decide(latest: LatestRun | None, known_to: int | None) -> Decision:
    """Return where a registration leads; `known_to` is the run that its request led to before, if any."""
    if latest is None:
        return Begin(1)
    if known_to is not None and (known_to != latest.number or latest.has_finished):
        return Repeat(known_to)
    if latest.has_finished:
        return Begin(latest.number + 1)
    if latest.difference is None:
        return Continue()
    if latest.has_live_rank:
        return Refuse(latest.difference)
    return Begin(latest.number + 1, abandons=latest.difference)
