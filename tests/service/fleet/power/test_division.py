"""Shares of slots in a feed: that they cost least, and that their sum never exceeds the feed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from perseus.service.domain.power import FeedStatus
from perseus.service.domain.slot_power import Curve, Division, KnownSlot, SlotPower
from perseus.service.fleet.power.allocation import allocate
from perseus.service.fleet.power.demand import JobDemand, PowerPoint
from perseus.service.fleet.power.division import MARGIN, MAX_POINTS, Divider, Hull, added_up, divided
from perseus.service.fleet.power.feed_watch import MIN_WINDOW_S

SLOT_COUNT = 3
FEED = "a"
LIMIT_W = 1000.0


@st.composite
def jobs(draw: st.DrawFn, prefix: str) -> list[JobDemand]:
    made = []
    for number in range(draw(st.integers(0, 3))):
        speeds = sorted(
            draw(st.lists(st.integers(40, 100), min_size=1, max_size=5, unique=True)), reverse=True
        )
        powers_w = sorted(
            draw(st.lists(st.integers(1, 200), min_size=len(speeds), max_size=len(speeds), unique=True)),
            reverse=True,
        )
        points = tuple(
            PowerPoint(100 / speed, speed / 100, {FEED: float(power_w)})
            for speed, power_w in zip(speeds, powers_w, strict=True)
        )
        weight = draw(st.sampled_from([0.5, 1.0, 3.0]))
        made.append(JobDemand(f"{prefix}-{number}", points, weight=weight))
    return made


def drawing(power_w: float) -> FeedStatus:
    return FeedStatus(FEED, None, False, True, (), (), 0.0, power_w, 0.0, None, (), None, None, 0.0, False)


slots_of_jobs = st.tuples(*(jobs(f"slot-{slot}") for slot in range(SLOT_COUNT)))


def curve(some: Sequence[JobDemand], fixed_w: float = 0.0) -> Curve:
    return added_up(fixed_w, [(Hull.of(job, FEED), 1.0, 1.0) for job in some])


def line(least_w: float, most_w: float, weight: float = 1.0) -> Curve:
    """Return a curve whose loss rises with the square of the missing power."""
    parts = np.linspace(0, 1, 11)
    losses = weight * (1 - parts) ** 2
    return Curve(tuple(least_w + parts * (most_w - least_w)), tuple(losses.tolist()), weight)


@given(slots_of_jobs, st.floats(1, 2000))
def test_the_loss_is_that_of_one_coordinator_with_all_jobs(
    some: Sequence[Sequence[JobDemand]], limit_w: float
) -> None:
    """Up to rounding to plans: `bound` is the least loss of mixtures."""
    every = [job for own in some for job in own]
    if not every:
        return
    curves = [curve(own) for own in some]
    shares = divided(curves, limit_w)
    assert sum(shares) == pytest.approx(1)
    if limit_w >= sum(each.powers_w[0] for each in curves):
        losses = [each.loss(share * limit_w) for each, share in zip(curves, shares, strict=True)]
        assert sum(losses) == pytest.approx(allocate(every, {FEED: limit_w}).bound, abs=1e-6)


@given(slots_of_jobs, st.floats(0, 1.2), st.lists(st.floats(0.01, 1), min_size=3, max_size=3))
def test_no_other_shares_lose_less_or_lack_less(
    some: Sequence[Sequence[JobDemand]], cut: float, others: Sequence[float]
) -> None:
    curves = [curve(own, fixed_w=10.0) for own in some]
    limit_w = cut * sum(each.powers_w[-1] for each in curves)

    def cost(shares: Sequence[float]) -> tuple[float, float]:
        powers_w = [share * limit_w for share in shares]
        lack_w = sum(max(0.0, c.powers_w[0] - w) for c, w in zip(curves, powers_w, strict=True))
        return lack_w, sum(c.loss(w) for c, w in zip(curves, powers_w, strict=True))

    lack_w, loss = cost(divided(curves, limit_w))
    drawn_w = [each.powers_w[-1] for each in curves]
    for other in (others, drawn_w):
        other_lack_w, other_loss = cost([each / sum(other) for each in other])
        assert lack_w <= other_lack_w + 1e-6
        assert lack_w > 1e-6 or other_lack_w > 1e-6 or loss <= other_loss + 1e-6


def test_a_curve_has_few_points_and_is_never_below_the_real_one() -> None:
    speeds = np.arange(1.0, 0.5, -0.002)
    points = tuple(PowerPoint(1 / s, float(s), {FEED: float(1000 * s**3)}) for s in speeds)
    whole = Hull.of(JobDemand("x", points, weight=2.0), FEED)
    found = added_up(0.0, [(whole, 1.0, 1.0)])
    assert len(found.powers_w) == MAX_POINTS
    exact = [2 * (1 - (w / 1000) ** (1 / 3)) for w in np.linspace(130, 1000, 500)]
    published = [found.loss(w) for w in np.linspace(130, 1000, 500)]
    assert all(mine >= theirs - 1e-4 for mine, theirs in zip(published, exact, strict=True))
    assert max(np.subtract(published, exact)) < 0.001


def test_powers_are_as_measured_and_losses_in_part() -> None:
    points = (PowerPoint(1.0, 1.0, {FEED: 100.0}), PowerPoint(2.0, 0.5, {FEED: 40.0}))
    hull = Hull.of(JobDemand("x", points), FEED)
    found = added_up(10.0, [(hull, 1.1, 0.5)])
    assert found.powers_w == pytest.approx((54.0, 120.0))
    assert (found.losses, found.weight) == ((0.25, 0.0), 0.5)


# ---------------------------------------------------------------------- when shares move


def known(version: int, *curves: Curve) -> list[KnownSlot]:
    return [KnownSlot(SlotPower(version, {FEED: each}, {}), True, True) for each in curves]


def begun(*curves: Curve, limit_w: float = LIMIT_W) -> Divider:
    divider = Divider(Division())
    divider.divide(known(0, *curves), {FEED: limit_w}, 0.0)
    return divider


def shares(divider: Divider) -> Sequence[float]:
    return [round(share, 3) for share in divider.division.shares[FEED]]


def settle(divider: Divider, curves: Sequence[Curve], now_s: float, limit_w: float = LIMIT_W) -> None:
    """Let all keep each division, until there is no other."""
    for _ in range(3):
        divider.divide(known(divider.division.version, *curves), {FEED: limit_w}, now_s)


def test_equal_slots_have_equal_shares_and_noise_does_not_move_them() -> None:
    curves = [line(300, 600)] * 2
    divider = begun(*curves)
    assert shares(divider) == pytest.approx([0.5, 0.5], abs=0.02)
    for second in range(1, 300):
        noisy = [line(300 + second % 7, 600 + second % 5), line(300, 600)]
        settle(divider, noisy, float(second))
    assert divider.division.version == 1


def test_a_share_moves_once_that_was_worth_it_for_a_window() -> None:
    divider = begun(line(300, 600), line(300, 600))
    heavier = [line(300, 600, weight=3), line(300, 600)]
    before = divider.division
    settle(divider, heavier, 10.0)
    assert divider.division == before
    settle(divider, heavier, 10.0 + MIN_WINDOW_S)
    assert shares(divider)[0] > 0.54
    assert sum(divider.division.shares[FEED]) == pytest.approx(1)


def test_a_slot_gets_its_least_power_at_once() -> None:
    divider = begun(line(300, 600), line(300, 600))
    settle(divider, [line(550, 900), line(300, 600)], 1.0)
    assert divider.division.shares[FEED][0] * (1 - MARGIN) * LIMIT_W >= 550 - 1e-6


def test_shares_follow_a_falling_power_cap_at_once() -> None:
    curves = line(0, 600, weight=3), line(200, 600)
    divider = begun(*curves, limit_w=1300)
    assert shares(divider) == [0.5, 0.5]
    settle(divider, curves, 1.0, limit_w=900)
    assert shares(divider)[0] > 0.51


def test_a_share_rises_only_after_all_keep_the_shares_that_fell() -> None:
    divider = begun(line(300, 600), line(300, 600))
    before = divider.division.shares[FEED][0]
    changed = line(600, 900), line(300, 600)
    divider.divide(known(1, *changed), {FEED: LIMIT_W}, 1.0)
    first, second = divider.division.shares[FEED]
    assert (divider.division.version, first) == (2, before)
    assert second < 0.4
    late = known(2, *changed)
    late[1] = known(1, *changed)[1]
    assert divider.divide(late, {FEED: LIMIT_W}, 2.0).version == 2
    divider.divide(known(2, *changed), {FEED: LIMIT_W}, 3.0)
    assert divider.division.version == 3
    assert divider.division.shares[FEED] == pytest.approx((1 - second, second))


def test_a_slot_that_nobody_serves_gets_what_it_drew_within_its_share() -> None:
    curves = [line(300, 900)] * 2
    divider = begun(*curves)
    for drawn_w, share in ((200.0, 0.2), (700.0, 0.2)):
        status = drawing(drawn_w)
        power = SlotPower(1, {FEED: curves[1]}, {FEED: status})
        for second in range(3):
            version = divider.division.version
            now = [known(version, *curves)[0], KnownSlot(power, is_served=False)]
            divider.divide(now, {FEED: LIMIT_W}, 1.0 + MIN_WINDOW_S * second)
        assert divider.division.shares[FEED][1] == pytest.approx(share, abs=0.001)
        assert sum(divider.division.shares[FEED]) == pytest.approx(1)


def test_a_feed_is_divided_anew_after_its_budgets() -> None:
    divider = begun(line(300, 600), line(300, 600))
    divider.divide(known(1, line(300, 600), line(300, 600)), {}, 1.0)
    assert (divider.division.version, divider.division.shares) == (2, {})
    divider.divide(known(2, line(0, 300), line(600, 900)), {FEED: LIMIT_W}, 2.0)
    assert shares(divider)[0] < 0.35


@pytest.mark.parametrize(
    ("other", "shares"),
    [
        (KnownSlot(SlotPower(0, {}, {FEED: drawing(500.0)}), True, True), {}),
        (KnownSlot(None, is_served=True), {}),
        (KnownSlot(SlotPower(0, {FEED: line(300, 600)}, {}), is_served=True), {}),
        (KnownSlot(SlotPower(0, {}, {}), True, True), {FEED: (1.0, 0.0)}),
    ],
    ids=["has not seen the limit", "has just begun", "has just taken over", "knows no such feed"],
)
def test_a_coordinator_that_may_not_know_the_limit_is_waited_for(
    other: KnownSlot, shares: dict[str, tuple[float, ...]]
) -> None:
    now = known(0, line(300, 600))
    division = Divider(Division()).divide([*now, other], {FEED: LIMIT_W}, 0.0)
    assert (division.version > 0, division.shares) == (shares != {}, shares)


# ---------------------------------------------------------------------- the sum of shares, whatever happens


@dataclass
class Coordinator:
    """One slot's coordinator, between reading and publishing or not."""

    kept: Division
    read: Division | None = None


class Shares(RuleBasedStateMachine):
    """Coordinators that read, keep and publish at any time, die and are succeeded, and one that divides."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = Division()
        self.rows = [KnownSlot()] * SLOT_COUNT
        self.coordinators: list[Coordinator | None] = [None] * SLOT_COUNT
        self.dead_kept: dict[int, float] = {}
        self.divider = Divider(self.stored)
        self.seen: list[KnownSlot] | None = None
        self.now_s = 0.0

    slot = st.integers(0, SLOT_COUNT - 1)

    @initialize()
    def start(self) -> None:
        for slot in range(SLOT_COUNT):
            self.take_over(slot)
            self.begin(slot)
            self.publish(slot, 300, 400, 1.0)

    @rule(slot=slot)
    def take_over(self, slot: int) -> None:
        if self.coordinators[slot] is None:
            self.coordinators[slot] = Coordinator(Division(-1))
            self.begin(slot)
            self.rows[slot] = replace(self.rows[slot], is_served=True, is_of_holder=False)
            if slot == 0:
                self.divider = Divider(self.stored)
                self.seen = None

    @rule(slot=slot)
    def begin(self, slot: int) -> None:
        if (coordinator := self.coordinators[slot]) is not None:
            coordinator.read = self.stored

    @rule(
        slot=slot,
        least_w=st.integers(50, 500),
        added_w=st.integers(1, 400),
        drawn=st.sampled_from([0.3, 1.0]),
    )
    def publish(self, slot: int, least_w: float, added_w: float, drawn: float) -> None:
        coordinator = self.coordinators[slot]
        if coordinator is None or coordinator.read is None:
            return
        coordinator.kept, coordinator.read = coordinator.read, None
        share = coordinator.kept.shares.get(FEED, (1.0,) * SLOT_COUNT)[slot]
        status = drawing(drawn * share * LIMIT_W)
        power = SlotPower(
            coordinator.kept.version,
            {FEED: line(least_w, least_w + added_w, weight=added_w)},
            {FEED: status},
        )
        self.rows[slot] = KnownSlot(power, is_served=True, is_of_holder=True)

    @rule(slot=slot)
    def die(self, slot: int) -> None:
        coordinator = self.coordinators[slot]
        if coordinator is not None and coordinator.kept.version >= 0:
            self.coordinators[slot] = None
            self.rows[slot] = replace(self.rows[slot], is_served=False, is_of_holder=False)
            share = coordinator.kept.shares.get(FEED, (0.0,) * SLOT_COUNT)[slot]
            self.dead_kept[slot] = share

    @precondition(lambda self: self.coordinators[0] is not None)
    @rule()
    def see(self) -> None:
        self.seen = list(self.rows)

    @precondition(lambda self: self.coordinators[0] is not None and self.seen is not None)
    @rule(waited_s=st.sampled_from([1.0, MIN_WINDOW_S]))
    def divide(self, waited_s: float) -> None:
        assert self.seen is not None
        self.now_s += waited_s
        division = self.divider.divide(self.seen, {FEED: LIMIT_W}, self.now_s)
        self.stored, self.seen = division, None

    @rule(slot=slot)
    def go_on(self, slot: int) -> None:
        """All do everything at once, but perhaps one."""
        for other in range(SLOT_COUNT):
            if other != slot or slot == 0:
                self.begin(other)
                row = self.rows[other].power
                if row is not None and FEED in row.curves:
                    least_w = row.curves[FEED].powers_w[0]
                    self.publish(other, least_w, row.curves[FEED].weight, 1.0)
        if self.coordinators[0] is not None:
            self.see()
            self.divide(MIN_WINDOW_S)

    @invariant()
    def shares_add_up_to_1_at_most(self) -> None:
        total = 0.0
        for slot, coordinator in enumerate(self.coordinators):
            gone = 0.0
            if coordinator is None or coordinator.kept.version < 0:
                power = self.rows[slot].power
                gone = min(
                    self.dead_kept.get(slot, 0.0), 0.0 if power is None else power.drawn_w(FEED) / LIMIT_W
                )
            if coordinator is None:
                total += gone
                continue
            possible = [coordinator.kept, coordinator.read]
            known_shares = [d.shares[FEED][slot] for d in possible if d is not None and FEED in d.shares]
            total += max([gone, *known_shares])
        assert total <= 1 + 1e-9


TestShares = Shares.TestCase
