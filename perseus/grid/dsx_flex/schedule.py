"""Which load target counts when.

A newer message of a sender takes the place of its older ones on the feeds that it names, for the time that it
covers, and of nothing else: before and after that, what was said before still holds. Newer is what was sent
later, by the sender's own time, so that the order in which a broker delivers does not matter. A message
without a constraint covers as any other, and leaves nothing.

Senders do not know of each other, and none may lift what another has asked for: each has a schedule of its
own, and where those overlap the lowest limit counts, as it does for power budgets.
"""

import bisect
from collections.abc import Iterable, Sequence

from perseus.grid.dsx_flex.values import Piece, Target, TargetSet

Interval = tuple[float, float]
"""From a time until before another, seconds."""


def without(interval: Interval, covered: Sequence[Interval]) -> list[Interval]:
    """Return what of an interval lies outside others, in order; those lie apart, and are in order."""
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
    """Return the first of the intervals that does not end before a time."""
    return bisect.bisect_left(covered, time_s, key=lambda each: each[1])


def pieces(sets: Iterable[TargetSet], feeds: Iterable[str]) -> list[Piece]:
    """Return what counts on each feed, by feed and time; what is over, too.

    Of messages that were sent at the same time, the later one in `sets` is newer; of targets in one message,
    too.
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
    """Add an interval to some that lie apart, in order; it may join several of them."""
    begin_s, end_s = interval
    first = last = _first_after(covered, begin_s)
    while last < len(covered) and covered[last][0] <= end_s:
        begin_s, end_s = min(begin_s, covered[last][0]), max(end_s, covered[last][1])
        last += 1
    covered[first:last] = [(begin_s, end_s)]


def active(pieces_of_feed: Iterable[Piece], now_s: float) -> Piece | None:
    """Return the lowest target that counts now; None if there is none."""
    some = [piece for piece in pieces_of_feed if piece.is_active(now_s)]
    return min(some, key=lambda piece: piece.constraint.limit_w, default=None)
