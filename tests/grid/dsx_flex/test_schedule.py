"""Which target applies when, against the plain rule, moment by moment."""

import math

from hypothesis import given
from hypothesis import strategies as st

from perseus.grid.dsx_flex.schedule import active, pieces
from perseus.grid.dsx_flex.values import Target, TargetSet
from tests.grid.dsx_flex.gateways import message, target

HOURS = st.integers(0, 12)
FEEDS = ("hall-a", "hall-b")


@st.composite
def targets(draw: st.DrawFn) -> Target:
    start = draw(HOURS)
    end = draw(st.one_of(st.integers(start + 1, 13), st.just(math.inf)))
    limit = draw(st.one_of(st.none(), st.integers(1, 9)))
    return target(limit, start, end, draw(st.sampled_from([(), FEEDS[:1], FEEDS[1:], FEEDS])))


@st.composite
def histories(draw: st.DrawFn) -> list[TargetSet]:
    several = draw(st.lists(st.lists(targets(), min_size=1, max_size=3), max_size=6))
    return [
        message(n, *some, sent_s=draw(st.integers(0, 5)), sender=draw(st.sampled_from(["acme", "volt"])))
        for n, some in enumerate(several)
    ]


def plainly_w(history: list[TargetSet], feed: str, at_h: float) -> float:
    """Return the limit at a moment: the lowest of each sender's newest targets for it."""
    limits = []
    for sender in {some.sender for some in history}:
        own = [some for some in history if some.sender == sender]
        reported = [
            each
            for some in sorted(own, key=lambda each: each.time_s)
            for each in some.targets
            if each.start_s <= at_h < each.end_s and feed in (each.feeds or FEEDS)
        ]
        if reported and reported[-1].constraint is not None:
            limits.append(reported[-1].constraint.limit_w)
    return min(limits, default=math.inf)


@given(histories())
def test_at_every_moment_the_lowest_of_each_senders_newest_target_applies(
    history: list[TargetSet],
) -> None:
    found = pieces(history, FEEDS)
    assert all(piece.start_s < piece.end_s for piece in found)
    for feed in FEEDS:
        for half_hour in range(28):
            at_h = half_hour / 2
            piece = active([each for each in found if each.feed == feed], at_h)
            limit_w = math.inf if piece is None else piece.constraint.limit_w
            assert limit_w == plainly_w(history, feed, at_h)


@given(histories(), st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(history: list[TargetSet], random: object) -> None:
    history = [message(n, *some.targets, sent_s=n, sender=some.sender) for n, some in enumerate(history)]
    shuffled = list(history)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert pieces(shuffled, FEEDS) == pieces(history, FEEDS)
