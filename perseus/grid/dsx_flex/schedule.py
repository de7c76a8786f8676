"""Which load target counts when.

A newer message of a sender takes the place of its older ones on the feeds that it names, for the time that it
covers, and of nothing else: before and after that, what was said before still holds. Newer is what was sent
later, by the sender's own time, so that the order in which a broker delivers does not matter. A message
without a constraint covers as any other, and leaves nothing.

Senders do not know of each other, and none may lift what another has asked for: each has a schedule of its
own, and where those overlap the lowest limit counts, as it does for power budgets.
"""

from collections.abc import Iterable, Sequence

from perseus.grid.dsx_flex.values import Piece, Target, TargetSet

Interval = tuple[float, float]
"""From a time until before another, seconds."""


def without(interval: Interval, covered: Sequence[Interval]) -> list[Interval]:
    """Return what of an interval lies outside others, in order."""
    left = [interval]
    for begin_s, end_s in covered:
        left = [
            part
            for start_s, stop_s in left
            for part in ((start_s, min(stop_s, begin_s)), (max(start_s, end_s), stop_s))
            if part[0] < part[1]
        ]
    return sorted(left)


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
                above = covered.get((some.sender, feed), [])
                found += _left(some, number, target, feed, above)
                covered[some.sender, feed] = _joined([*above, (target.start_s, target.end_s)])
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


def _joined(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the same times as intervals that lie apart: a thousand messages may cover one."""
    found: list[Interval] = []
    for begin_s, end_s in sorted(intervals):
        if found and begin_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end_s))
        else:
            found.append((begin_s, end_s))
    return found


def active(pieces_of_feed: Iterable[Piece], now_s: float) -> Piece | None:
    """Return the lowest target that counts now; None if there is none."""
    some = [piece for piece in pieces_of_feed if piece.is_active(now_s)]
    return min(some, key=lambda piece: piece.constraint.limit_w, default=None)
