"""The gateway's state machine: each message gets one answer, and budgets follow from all accepted ones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus.grid.dsx_flex import budgets, gateway
from perseus.grid.dsx_flex.breaches import Breach, BreachStatus
from perseus.grid.dsx_flex.budgets import MAX_BUDGETS, Budget, KnownBudget, Stage
from perseus.grid.dsx_flex.commands import (
    AskForBudgets,
    BudgetAnswered,
    BudgetsListed,
    CoordinatorLost,
    FeedRead,
    FeedsListed,
    ForgetTargets,
    Input,
    KeepTargets,
    TargetsReceived,
    Tick,
    Verdict,
)
from perseus.grid.dsx_flex.gateway import MAX_AHEAD_S, MEMORY_S
from perseus.grid.dsx_flex.values import Constraint, FeedEvent, Piece, TargetSet
from tests.grid.dsx_flex.gateways import (
    NOW_S,
    TRACE,
    Coordinator,
    Driven,
    active,
    alerts,
    message,
    new_gateway,
    reading,
    statuses,
    target,
    uuid4,
    verdicts,
)


@pytest.fixture
def driven() -> Driven:
    return Driven(new_gateway(), Coordinator())


def test_a_target_is_stored_then_requested_and_reported_once_its_budget_is_set(driven: Driven) -> None:
    some = message(1, target(700, NOW_S, NOW_S + 3600))
    commands = driven.gateway.handle(TargetsReceived(some), NOW_S)
    assert [type(each).__name__ for each in commands] == ["KeepTargets", "AskForBudgets", "Answer"]
    (budget,) = driven.gateway.changes(NOW_S).to_set
    assert budget == Budget(budget.budget_id, "hall-a", 700e3, NOW_S, NOW_S + 3600, some.correlation_id)
    (reported,) = statuses(driven.reconcile())
    assert (reported.correlation_id, reported.trace) == (some.correlation_id, TRACE)
    feed = reported.feeds["hall-a"]
    assert feed.event is FeedEvent.TARGET_SET
    ((piece, is_active),) = feed.targets
    assert (piece.correlation_id, is_active) == (some.correlation_id, True)
    assert not feed.is_compliant, "900 kW are more than 700"
    assert driven.reconcile() == []


def test_a_limit_stays_until_its_replacement_is_in_force(driven: Driven) -> None:
    """The coordinator may refuse the replacement, as budgets are limited."""
    driven.receive(message(1, target(700, NOW_S, NOW_S + 3600)))
    (before,) = driven.coordinator.known
    driven.gateway.handle(TargetsReceived(message(2, target(200, NOW_S, NOW_S + 3600))), NOW_S)
    changes = driven.gateway.changes(NOW_S)
    assert [budget.limit_w for budget in changes.to_set] == [200e3]
    assert changes.to_cancel == ()
    driven.reconcile()
    assert driven.coordinator.calls[-1] == f"cancel {before}"
    assert driven.coordinator.limit_w("hall-a", NOW_S) == 200e3


@pytest.mark.parametrize(
    ("some", "verdict"),
    [
        (message(1, target(700, NOW_S - 10, NOW_S)), Verdict.EXPIRED),
        (message(1, target(700), sent_s=NOW_S + MAX_AHEAD_S + 1), Verdict.FUTURE_DATED),
        (message(1, target(700), sent_s=NOW_S - MEMORY_S), Verdict.TOO_OLD),
        (message(1, target(700, feeds=["hall-a"]), target(700, feeds=["cellar"])), Verdict.UNKNOWN_FEED),
        (message(1, target(0)), Verdict.NO_POWER),
    ],
)
def test_a_refused_message_changes_nothing_and_is_reported_under_its_correlation_identifier(
    driven: Driven, some: TargetSet, verdict: Verdict
) -> None:
    commands = driven.receive(some)
    assert verdicts(commands) == [verdict]
    assert not [each for each in commands if isinstance(each, KeepTargets | AskForBudgets)]
    (reported,) = statuses(commands)
    assert (reported.correlation_id, reported.feeds["hall-a"].targets) == (some.correlation_id, ())
    assert reported.feeds["hall-a"].event is FeedEvent.PERIODIC
    assert not reported.is_heartbeat
    assert driven.coordinator.calls == []


def slots(number: int, first: int, count: int, limit_kw: float = 50.0, sender: str = "acme") -> TargetSet:
    """Return a message with targets for consecutive quarters of an hour."""
    times = [(NOW_S + 900 * slot, NOW_S + 900 * (slot + 1)) for slot in range(first, first + count)]
    return message(number, *(target(limit_kw, *each) for each in times), sender=sender)


def test_no_sender_takes_the_budgets_of_another(driven: Driven) -> None:
    for number in range(4):
        driven.receive(slots(number, 64 * number, 64, sender="flood"))
    (reported,) = statuses(driven.receive(message(9, target(20), sender="acme")))
    assert active(reported).count(True) == 2
    assert driven.coordinator.limit_w("hall-a", NOW_S + 1) == 20e3
    kept = [each for each in driven.coordinator.known.values() if each.stage is Stage.CURRENT]
    assert len(kept) <= MAX_BUDGETS // 2 + 1


def test_pieces_that_start_soon_get_budgets_first() -> None:
    driven = Driven(new_gateway(), Coordinator(maximum=10_000))
    for number in range(5):
        commands = driven.receive(slots(number, 64 * (4 - number), 64))
        assert [each.correlation_id for each in statuses(commands)] == [uuid4(1000 + number)]
    coordinator = driven.coordinator
    for quarter in range(0, 5 * 64, 7):
        now_s = NOW_S + 900 * quarter + 1
        driven.reconcile(now_s)
        assert coordinator.limit_w("hall-a", now_s) == 50e3
        current = [
            each
            for each in coordinator.known.values()
            if each.stage is Stage.CURRENT and each.budget.end_s > now_s
        ]
        assert len(current) <= MAX_BUDGETS


def test_early_senders_make_way_for_present_targets(driven: Driven) -> None:
    for number in range(5):
        for part in range(4):
            driven.receive(slots(4 * number + part, 1 + 64 * part, 64, sender=f"early-{number}"))
        limit_kw = 90 - number
        driven.receive(message(100 + number, target(limit_kw), sender=f"late-{number}"))
        assert driven.coordinator.limit_w("hall-a", NOW_S + 1) == limit_kw * 1e3
    current = [each for each in driven.coordinator.known.values() if each.stage is Stage.CURRENT]
    assert len(current) <= MAX_BUDGETS


def test_a_present_target_has_a_budget_on_every_feed() -> None:
    driven = Driven(new_gateway(), Coordinator(), *(reading(f"hall-{number}") for number in range(150)))
    driven.receive(slots(1, 1, 3))
    (*_, reported) = statuses(driven.receive(message(2, target(100), sent_s=NOW_S + 1)))
    assert all(any(active(reported, feed)) for feed in reported.feeds)
    for number in range(150):
        assert driven.coordinator.limit_w(f"hall-{number}", NOW_S + 1) == 100e3


def test_a_limit_that_is_raised_for_a_long_time_is_raised_at_once() -> None:
    driven = Driven(new_gateway(), Coordinator(), *(reading(f"hall-{number}") for number in range(4)))
    driven.receive(message(1, target(100)))
    raising = [(NOW_S + 3600 * hour, NOW_S + 3600 * (hour + 1)) for hour in range(48)]
    some = message(2, *(target(200, *each) for each in raising), sent_s=NOW_S + 1)
    (reported,) = statuses(driven.receive(some, NOW_S + 1))
    for name, feed in reported.feeds.items():
        assert driven.coordinator.limit_w(name, NOW_S + 2) == 200e3
        assert [each.constraint.limit_w for each, is_active in feed.targets if is_active] == [200e3]
    for hour in range(60):
        now_s = NOW_S + 3600 * hour + 2
        driven.reconcile(now_s)
        assert driven.coordinator.limit_w("hall-3", now_s) == (200e3 if hour < 48 else 100e3)


def test_a_senders_targets_and_messages_per_hour_are_limited(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "MAX_TARGETS", 5 * 64)
    monkeypatch.setattr(gateway, "MAX_PER_HOUR", 20)
    flood = [driven.receive(slots(n, 64 * n, 64, sender="flood")) for n in range(6)]
    assert [verdicts(each) for each in flood] == [[Verdict.ACCEPTED]] * 5 + [[Verdict.TOO_MANY]]
    assert verdicts(driven.receive(slots(99, 0, 64))) == [Verdict.ACCEPTED]
    for number in range(20):
        driven.gateway.handle(TargetsReceived(message(1000 + number, target(500), sender="talker")), NOW_S)
    assert verdicts(driven.receive(message(9999, target(500), sender="talker"))) == [Verdict.TOO_MANY]


def test_a_reading_costs_no_more_than_its_feeds_targets(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        driven.receive(slots(number, 64 * number, 64))
    asked_counts, real = [], budgets.in_force

    def in_force(some: Sequence[Piece], known: Mapping[str, KnownBudget], identifier: str) -> set[Piece]:
        asked_counts.append(len(some))
        return real(some, known, identifier)

    monkeypatch.setattr(budgets, "in_force", in_force)
    driven.gateway.handle(Tick(), NOW_S + 1)
    assert 0 < sum(asked_counts) <= 2 * 256


def test_a_target_without_a_budget_is_reported_as_not_active_and_again_once_it_is() -> None:
    driven = Driven(new_gateway(), Coordinator(maximum=0))
    some = message(1, target(700))
    (reported,) = statuses(driven.receive(some))
    assert reported.correlation_id == some.correlation_id
    assert active(reported) == [False]
    assert not reported.feeds["hall-a"].is_compliant
    assert statuses(driven.reconcile(NOW_S + 1)) == [], "it was reported already"
    driven.coordinator.maximum = 256
    (reported,) = statuses(driven.reconcile(NOW_S + 2))
    assert reported.correlation_id == some.correlation_id
    assert reported.feeds["hall-a"].event is FeedEvent.TARGET_SET


def test_a_clock_that_jumps_ahead_and_back_ends_no_target(driven: Driven) -> None:
    driven.receive(message(1, target(700, NOW_S, NOW_S + 6 * 3600)))
    ahead_s = NOW_S + 86400
    driven.gateway.handle(Tick(), ahead_s)
    driven.reconcile(ahead_s)
    assert driven.coordinator.limit_w("hall-a", NOW_S + 9) == 700e3, "the coordinator's clock is right"
    (reported,) = statuses(driven.gateway.handle(Tick(), NOW_S + 4))
    assert active(reported) == [True]
    commands = driven.receive(message(2, target(600), sent_s=NOW_S + 5), NOW_S + 5)
    assert verdicts(commands) == [Verdict.ACCEPTED]
    assert driven.coordinator.limit_w("hall-a", NOW_S + 9) == 600e3


def test_a_duplicate_is_reported_again_and_sets_nothing(driven: Driven) -> None:
    some = message(1, target(700))
    driven.receive(some)
    commands = driven.receive(some, NOW_S + 9)
    assert verdicts(commands) == [Verdict.DUPLICATE]
    assert [each.correlation_id for each in statuses(commands)] == [some.correlation_id]
    assert len(driven.coordinator.calls) == 1


def test_an_older_message_that_arrives_late_does_not_replace_a_newer_one(driven: Driven) -> None:
    driven.receive(message(2, target(600, NOW_S + 5), sent_s=NOW_S + 5), NOW_S + 6)
    commands = driven.receive(message(1, target(800, NOW_S + 5)), NOW_S + 7)
    assert verdicts(commands) == [Verdict.SUPERSEDED]
    assert driven.coordinator.limit_w("hall-a", NOW_S + 8) == 600e3


def test_a_restarted_gateway_requests_no_existing_budget(driven: Driven) -> None:
    kept = [message(1, target(700)), message(2, target(600, NOW_S + 60, NOW_S + 90), sent_s=NOW_S + 1)]
    for some in kept:
        driven.receive(some, NOW_S + 1)
    again = Driven(new_gateway(kept), driven.coordinator, now_s=NOW_S + 2)
    driven.coordinator.calls.clear()
    assert again.reconcile(NOW_S + 2) == []
    assert driven.coordinator.calls == []


def test_budgets_are_requested_when_the_coordinator_is_back(driven: Driven) -> None:
    driven.gateway.handle(CoordinatorLost(), NOW_S)
    some = message(1, target(700))
    assert statuses(driven.receive(some)) == []
    assert driven.coordinator.calls == []
    driven.gateway.handle(FeedsListed((reading(),)), NOW_S + 9)
    driven.gateway.handle(BudgetsListed({}), NOW_S + 9)
    assert [each.correlation_id for each in statuses(driven.reconcile(NOW_S + 9))] == [some.correlation_id]


def test_a_budget_cancelled_by_an_operator_stays_cancelled(driven: Driven) -> None:
    driven.receive(message(1, target(700)))
    (budget_id,) = driven.coordinator.known
    driven.coordinator.cancel(budget_id)
    driven.gateway.handle(BudgetsListed(driven.coordinator.known), NOW_S + 1)
    assert driven.reconcile(NOW_S + 1) == []
    assert driven.coordinator.known[budget_id].stage is Stage.CANCELLED
    (reported,) = statuses(driven.gateway.handle(Tick(), NOW_S + 40))
    assert active(reported) == [False]
    assert not reported.feeds["hall-a"].is_compliant


def test_budgets_of_others_and_of_unknown_messages_are_left_alone() -> None:
    coordinator = Coordinator()
    first = Driven(new_gateway(), coordinator)
    first.receive(message(1, target(700)))
    forgetful = Driven(new_gateway(), coordinator)
    assert forgetful.gateway.changes(NOW_S).to_cancel == ()
    assert forgetful.gateway.changes(NOW_S).unknown == tuple(coordinator.known)


def test_heartbeats_come_unless_something_else_was_published(driven: Driven) -> None:
    assert len(statuses(driven.commands)) == 1
    assert statuses(driven.gateway.handle(Tick(), NOW_S + 29)) == []
    (reported,) = statuses(driven.gateway.handle(Tick(), NOW_S + 30))
    assert reported.is_heartbeat
    driven.gateway.handle(CoordinatorLost(), NOW_S + 31)
    assert driven.gateway.handle(Tick(), NOW_S + 90) == []


def test_ramps_are_reported_from_their_beginning_to_their_end(driven: Driven) -> None:
    some = message(1, target(700, NOW_S, NOW_S + 60))
    driven.receive(some)
    ramping = reading(limit_w=7e5, power_cap_w=8e5, in_transition=True)
    under = replace(ramping, power_cap_w=7e5, in_transition=False, calculated_w=69e4)
    inputs: list[tuple[Input, float]] = [
        (FeedRead(ramping), 1),
        (FeedRead(replace(ramping, power_cap_w=7e5)), 2),
        (FeedRead(under), 8),
        (FeedRead(reading()), 60),
        (Tick(), 61),
    ]
    reported = [each for read, at_s in inputs for each in statuses(driven.gateway.handle(read, NOW_S + at_s))]
    seen = [(each.correlation_id, each.feeds["hall-a"]) for each in reported]
    correlation_id = some.correlation_id
    assert [(of, feed.event, feed.in_flight, feed.is_compliant, feed.since_s) for of, feed in seen] == [
        (correlation_id, FeedEvent.START_RAMP_DOWN, True, False, NOW_S + 1),
        (correlation_id, FeedEvent.END_RAMP_DOWN, False, True, NOW_S + 1),
        (None, FeedEvent.START_RAMP_UP, True, True, NOW_S + 1),
        (None, FeedEvent.END_RAMP_UP, False, True, None),
    ]


def test_a_target_is_reported_before_its_ramp(driven: Driven) -> None:
    """A reading may arrive before the coordinator's answer to the budget."""
    some = message(1, target(700, NOW_S, NOW_S + 60))
    reported = statuses(driven.gateway.handle(TargetsReceived(some), NOW_S))
    ramping = reading(limit_w=7e5, power_cap_w=8e5, in_transition=True)
    reported += statuses(driven.gateway.handle(FeedRead(ramping), NOW_S))
    assert reported == []
    (wanted,) = driven.gateway.changes(NOW_S).to_set
    known = driven.coordinator.set(wanted)
    assert known is not None
    reported += statuses(driven.gateway.handle(BudgetAnswered(known), NOW_S))
    events = [each.feeds["hall-a"].event for each in reported]
    assert [event.value for event in events if event is not None] == ["target_set", "start_ramp_down"]


def breaching(judged_kw: float) -> FeedRead:
    return FeedRead(
        reading(
            limit_w=7e5, power_cap_w=7e5, judged_w=judged_kw * 1e3, is_compliant=False, to_pause=("gpt3",)
        )
    )


def test_a_breach_is_active_then_escalated_then_resolved_under_one_identifier(driven: Driven) -> None:
    driven.receive(message(1, target(700)))
    readings = [
        (710, 0),
        *((730, second) for second in (1, 2, 3, 4, 6)),
        (740, 30),
        (850, 31),
        (850, 99),
        (690, 100),
    ]
    reported = []
    for judged_kw, second in readings:  # 1.4 % above is no breach
        for each in alerts(driven.gateway.handle(breaching(judged_kw), NOW_S + second)):
            found = each.breach
            assert found.breach_id == uuid4(5000)
            figures = (found.is_critical, found.measured_w, found.resolved_s)
            reported.append((second, found.status, *figures, each.to_pause))
    assert reported == [
        (6, BreachStatus.ACTIVE, False, 730e3, None, ("gpt3",)),
        (31, BreachStatus.ESCALATED, True, 850e3, None, ("gpt3",)),
        (100, BreachStatus.RESOLVED, True, 690e3, NOW_S + 100, ()),
    ]


def test_a_breach_that_lasts_is_escalated_and_one_whose_target_ends_is_over(driven: Driven) -> None:
    driven.receive(message(1, target(700, NOW_S, NOW_S + 100)))
    reported = []
    for second in range(120):
        reported += alerts(driven.gateway.handle(breaching(730), NOW_S + second))
    states = [BreachStatus.ACTIVE, BreachStatus.ESCALATED, BreachStatus.RESOLVED]
    assert [(each.breach.status, each.breach.is_critical) for each in reported] == [
        (s, False) for s in states
    ]
    assert [each.breach.detected_s - NOW_S for each in reported] == [5, 5, 5]
    assert reported[-1].breach.resolved_s == NOW_S + 100


def test_nothing_is_a_breach_on_the_way_down(driven: Driven) -> None:
    driven.receive(message(1, target(700)))
    down = reading(limit_w=7e5, power_cap_w=7e5, judged_w=None, in_transition=True)
    for second in range(60):
        assert alerts(driven.gateway.handle(FeedRead(down), NOW_S + second)) == []


def test_an_open_breach_is_published_again_after_a_restart() -> None:
    some = message(1, target(700))
    coordinator = Coordinator()
    Driven(new_gateway(), coordinator).receive(some)
    breach = Breach(
        uuid4(77),
        "hall-a",
        some.correlation_id,
        Constraint(700, "kilowatt"),
        best_effort=False,
        detected_s=NOW_S - 5,
        status=BreachStatus.ACTIVE,
        is_critical=False,
        measured_w=720e3,
    )
    again = Driven(new_gateway([some], open_breaches=[breach]), coordinator)
    reported = alerts(again.commands) + alerts(again.gateway.handle(breaching(730), NOW_S))
    assert [each.breach for each in reported] == [breach]
    (over,) = alerts(again.gateway.handle(breaching(690), NOW_S + 1))
    assert (over.breach.breach_id, over.breach.status) == (uuid4(77), BreachStatus.RESOLVED)


def test_a_feed_without_a_capacity_is_not_served() -> None:
    driven = Driven(new_gateway(), Coordinator(), reading(), reading("default", maximum_w=None))
    (reported,) = statuses(driven.commands)
    assert set(reported.feeds) == {"hall-a"}
    commands = driven.receive(message(1, target(700, feeds=["default"])))
    assert verdicts(commands) == [Verdict.UNKNOWN_FEED]


def test_messages_are_forgotten_when_they_have_no_effect_any_more(driven: Driven) -> None:
    open_one = message(1, target(700))
    lifting = message(2, target(None, NOW_S + 5), sent_s=NOW_S + 5)
    short = message(3, target(600, NOW_S + 6, NOW_S + 60), sent_s=NOW_S + 6)
    for some in (open_one, lifting, short):
        driven.receive(some, NOW_S + 6)
    assert driven.gateway.handle(Tick(), NOW_S + MEMORY_S - 1) != []  # a heartbeat
    late_s = NOW_S + MEMORY_S + 10
    assert not any(isinstance(each, ForgetTargets) for each in driven.gateway.handle(Tick(), late_s - 3700))
    for second in range(0, 3700, 100):  # after a jump, the clock is not trusted at once
        driven.gateway.handle(Tick(), late_s - 3700 + second)
    forgotten = [
        event_id
        for second in range(3)
        for each in driven.gateway.handle(Tick(), late_s + second)
        if isinstance(each, ForgetTargets)
        for event_id in each.event_ids
    ]
    assert sorted(forgotten) == [uuid4(1), uuid4(2), uuid4(3)]


MESSAGES = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(100, 900)),
        st.integers(-5, 40),
        st.one_of(st.none(), st.integers(1, 60)),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=6,
)


def drawn_message(
    number: int, limit: int | None, start: int, lasts: int | None, sender: int = 0
) -> TargetSet:
    end_s = math.inf if lasts is None else NOW_S + start + lasts
    of = target(limit, NOW_S + start, end_s)
    return message(number, of, sent_s=NOW_S + number, sender=f"isv-{sender}")


@settings(deadline=None)
@given(MESSAGES, st.integers(0, 5))
def test_a_refused_budget_raises_no_limit(
    drawn: list[tuple[int | None, int, int | None, int]], maximum: int
) -> None:
    driven = Driven(new_gateway(), Coordinator(maximum))
    wanted = Driven(new_gateway(), Coordinator())
    for number, (limit, start, lasts, _) in enumerate(drawn):
        before_w = [driven.coordinator.limit_w("hall-a", NOW_S + second) for second in range(110)]
        some = drawn_message(number, limit, start, lasts)
        driven.receive(some)
        wanted.receive(some)
        for second, limit_w in enumerate(before_w):
            at_s = NOW_S + second
            max_w = max(limit_w, wanted.coordinator.limit_w("hall-a", at_s))
            assert driven.coordinator.limit_w("hall-a", at_s) <= max_w


@settings(deadline=None)
@given(MESSAGES, st.lists(st.booleans(), min_size=12, max_size=12), st.randoms(use_true_random=False))
def test_restarts_and_duplicates_change_no_limit(
    drawn: list[tuple[int | None, int, int | None, int]], restarts: list[bool], random: object
) -> None:
    """With any restarts in between, limits are those of a gateway that was never restarted."""
    history = [drawn_message(number, *each) for number, each in enumerate(drawn)]
    plain = Driven(new_gateway(), Coordinator())
    for some in history:
        plain.receive(some, NOW_S)

    arriving = [*history, *history]
    random.shuffle(arriving)  # type: ignore[attr-defined]
    coordinator, kept = Coordinator(), list[TargetSet]()
    driven = Driven(new_gateway(), coordinator)
    for some, is_restarted in zip(arriving, restarts, strict=False):
        commands = driven.gateway.handle(TargetsReceived(some), NOW_S)
        kept += [each.some for each in commands if isinstance(each, KeepTargets)]
        if is_restarted:  # before any request
            driven = Driven(new_gateway(kept), coordinator)
        driven.reconcile(NOW_S)
    assert len({some.event_id for some in kept}) == len(kept)
    known = {some.event_id for some in kept}
    missing = [some for some in history if some.event_id not in known]
    for some in missing:
        assert Verdict.EXPIRED in verdicts(plain.receive(some, NOW_S))
    for second in range(110):
        at_s = NOW_S + second
        assert coordinator.limit_w("hall-a", at_s) == plain.coordinator.limit_w("hall-a", at_s)
