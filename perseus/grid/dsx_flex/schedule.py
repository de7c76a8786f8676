"""Decides which load target applies when.

A sender's newer message replaces its older ones only on the feeds that it names and for the time that it
covers: before and after that, the older ones still apply. A message is newer if it was sent later by the
sender's own clock, so the broker's order of delivery does not matter. A message without a constraint replaces
older ones like any other, and leaves no limit.

Senders don't know of each other, and none may lift another's target: each has its own schedule, and where
schedules overlap the lowest limit applies, as with power budgets.
"""

import bisect
from collections.abc import Iterable, Sequence

from perseus.grid.dsx_flex.values import Piece, Target, TargetSet

Interval = tuple[float, float]
"""Start (inclusive) and end (exclusive), seconds."""


def without(interval: Interval, covered: Sequence[Interval]) -> list[Interval]:
    """Return the parts of an interval outside others, in order; the others are disjoint and in order."""
    begin_s, end_s = interval
    left = []
    for index in range(_first_after(covered, begin_s), len(covered)):
        start_s, stop_s = covered[index]
        if start_s >= end_s:
            break
        if begin_s < start_s:
            left.append((begin_s, start_s))
        begin_s = max(begin_s, stop_s)
    if begin_s < end_s:
        left.append((begin_s, end_s))
    return left


def _first_after(covered: Sequence[Interval], time_s: float) -> int:
    """Return the index of the first interval that does not end before a time."""
    return bisect.bisect_left(covered, time_s, key=lambda each: each[1])


def pieces(sets: Iterable[TargetSet], feeds: Iterable[str]) -> list[Piece]:
    """Return the pieces of targets that apply on each feed, by feed and time, including past ones.

    Among messages that were sent at the same time, the later one in `sets` is newer, and likewise among the
    targets of a message.
    """
    newest_first = sorted(enumerate(sets), key=lambda each: (each[1].time_s, each[0]), reverse=True)
    known = sorted(set(feeds))
    covered: dict[tuple[str, str], list[Interval]] = {}
    found: list[Piece] = []
    for _, some in newest_first:
        for number, target in reversed(list(enumerate(some.targets))):
            for feed in known:
                if target.feeds and feed not in target.feeds:
                    continue
                above = covered.setdefault((some.sender, feed), [])
                found += _left(some, number, target, feed, above)
                _cover(above, (target.start_s, target.end_s))
    return sorted(
        found, key=lambda piece: (piece.feed, piece.start_s, piece.end_s, piece.event_id, piece.number)
    )


def _left(
    some: TargetSet, number: int, target: Target, feed: str, above: Sequence[Interval]
) -> Iterable[Piece]:
    if target.constraint is None:
        return
    for start_s, end_s in without((target.start_s, target.end_s), above):
        yield Piece(
            feed=feed,
            start_s=start_s,
            end_s=end_s,
            constraint=target.constraint,
            best_effort=target.best_effort,
            correlation_id=some.correlation_id,
            event_id=some.event_id,
            number=number,
        )


def _cover(covered: list[Interval], interval: Interval) -> None:
    """Add an interval to disjoint ones in order; it may merge several of them."""
    begin_s, end_s = interval
    first = last = _first_after(covered, begin_s)
    while last < len(covered) and covered[last][0] <= end_s:
        begin_s, end_s = min(begin_s, covered[last][0]), max(end_s, covered[last][1])
        last += 1
    covered[first:last] = [(begin_s, end_s)]


def active(pieces_of_feed: Iterable[Piece], now_s: float) -> Piece | None:
    """Return the lowest target that applies now; None if there is none."""
    some = [piece for piece in pieces_of_feed if piece.is_active(now_s)]
    return min(some, key=lambda piece: piece.constraint.limit_w, default=None)
