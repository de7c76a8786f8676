"""The state machine of a fleet's member: exact commands, and a model of whole fleets."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from perseus.service.domain.members import Member, Slot
from perseus.service.fleet.membership import (
    Depart,
    Drop,
    Expired,
    HandedOver,
    HandOver,
    LeaveRequested,
    Membership,
    MemberState,
    Renew,
    RenewalFailed,
    Renewed,
    Serve,
    Stop,
    Take,
    Taken,
    Ticked,
)
from tests.service.fleet.fleet_model import Faults, Fleet

LEASE_S = 30.0
ALONE = [Member("a", "a:1")]
BOTH = [Member("a", "a:1"), Member("b", "b:1")]


def holding(*slots: Slot) -> Membership:
    machine = Membership("a", LEASE_S, 0.0)
    for number, _, epoch in slots:
        machine.handle(Taken(number, epoch), 0.0)
    return machine


def test_renews_often_and_one_at_a_time() -> None:
    machine = Membership("a", LEASE_S, 0.0)
    assert machine.handle(Ticked(), 0.0) == [Renew()]
    assert machine.handle(Ticked(), 5.0) == []
    assert machine.handle(RenewalFailed(), 5.0) == [Renew()]
    assert machine.handle(Renewed(5.0, ALONE, []), 6.0) == []
    assert machine.handle(Ticked(), 7.9) == []
    assert machine.handle(Ticked(), 8.0) == [Renew()]


def test_alone_it_takes_all_free_slots_and_those_of_members_that_are_gone() -> None:
    machine = Membership("a", LEASE_S, 0.0)
    slots = [Slot(0, "", 0), Slot(1, "gone", 7)]
    assert machine.handle(Renewed(0.0, ALONE, slots), 0.0) == [Take(0, 0), Take(1, 7)]
    assert machine.handle(Taken(0, 1), 0.1) == [Serve(0, 1)]
    assert machine.handle(Taken(1, None), 0.1) == []
    assert machine.holds(0, 0.1)
    assert not machine.holds(1, 0.1)


def test_a_slot_that_was_taken_with_an_unknown_outcome_is_taken_anew() -> None:
    machine = Membership("a", LEASE_S, 0.0)
    assert machine.handle(Renewed(0.0, BOTH, [Slot(0, "b", 2), Slot(1, "a", 3)]), 0.0) == [Take(1, 3)]


def test_what_exceeds_its_share_is_handed_over_and_nothing_else_moves() -> None:
    slots = [Slot(number, "a", 1) for number in range(3)]
    machine = holding(*slots)
    assert machine.handle(Renewed(1.0, BOTH, slots), 1.0) == [HandOver(2, 1)]
    assert machine.handle(Renewed(2.0, BOTH, slots), 2.0) == []
    assert machine.handle(HandedOver(2), 2.0) == []
    slots[2] = Slot(2, "", 1)
    assert machine.handle(Renewed(3.0, BOTH, slots), 3.0) == []


def test_with_one_slot_the_others_stand_by_whatever_their_names() -> None:
    assert holding(Slot(0, "a", 1)).handle(Renewed(1.0, BOTH, [Slot(0, "a", 1)]), 1.0) == []
    assert Membership("a", LEASE_S, 0.0).handle(Renewed(1.0, BOTH, [Slot(0, "b", 1)]), 1.0) == []


def test_it_stops_at_two_thirds_of_its_lease_counted_from_when_it_asked() -> None:
    machine = holding(Slot(0, "a", 1))
    machine.handle(Renewed(5.0, ALONE, [Slot(0, "a", 1)]), 12.0)
    assert machine.holds(0, 24.9)
    assert not machine.holds(0, 25.0)
    assert machine.handle(Ticked(), 25.0) == [Drop(0), Stop()]
    assert machine.state is MemberState.STOPPED
    assert machine.handle(Renewed(26.0, ALONE, []), 26.0) == []


@pytest.mark.parametrize("sent_s", [5.0, 19.0])
def test_an_answer_after_a_freeze_stops_it(sent_s: float) -> None:
    """Even if the renewal was sent late: another may have taken over before it took effect."""
    machine = holding(Slot(0, "a", 1))
    assert machine.handle(Renewed(sent_s, ALONE, [Slot(0, "a", 1)]), 25.0) == [Drop(0), Stop()]


def test_an_expired_lease_is_never_renewed() -> None:
    machine = holding(Slot(0, "a", 1))
    assert machine.handle(Expired(), 1.0) == [Drop(0), Stop()]
    assert machine.state is MemberState.STOPPED


@pytest.mark.parametrize("found", [Slot(0, "b", 2), Slot(0, "a", 2), Slot(0, "", 1)])
def test_a_slot_that_it_lost_is_dropped(found: Slot) -> None:
    machine = holding(Slot(0, "a", 1))
    assert Drop(0) in machine.handle(Renewed(1.0, BOTH, [found]), 1.0)
    assert not machine.holds(0, 1.0)


def test_leaving_hands_over_everything_and_then_departs() -> None:
    machine = holding(Slot(0, "a", 1), Slot(1, "a", 4))
    assert machine.handle(LeaveRequested(), 1.0) == [HandOver(0, 1), HandOver(1, 4)]
    assert machine.handle(Renewed(2.0, BOTH, [Slot(0, "", 1), Slot(1, "a", 4)]), 2.0) == [Drop(0)]
    assert machine.handle(HandedOver(0), 2.0) == []
    assert machine.handle(HandedOver(1), 2.0) == [Depart()]
    assert machine.state is MemberState.STOPPED


def test_leaving_waits_for_a_slot_that_is_being_taken() -> None:
    machine = Membership("a", LEASE_S, 0.0)
    assert machine.handle(Renewed(0.0, ALONE, [Slot(0, "", 0)]), 0.0) == [Take(0, 0)]
    assert machine.handle(LeaveRequested(), 0.1) == []
    assert machine.handle(Taken(0, 1), 0.2) == [Serve(0, 1), HandOver(0, 1)]
    assert machine.handle(HandedOver(0), 0.3) == [Depart()]


# ---------------------------------------------------------------------- the model

TestFleet = pytest.mark.slow("thousands of interleavings")(Fleet.TestCase)
TestFleet.settings = settings(Fleet.TestCase.settings, max_examples=400, stateful_step_count=80)


@pytest.mark.slow("searches until it finds the fault")
@pytest.mark.parametrize(
    ("faults", "found"),
    [
        (Faults(is_deaf=True), "is held by"),
        (Faults(is_unfenced=True), "writes slot"),
        (Faults(is_trusting=True), "after"),
    ],
)
def test_the_model_finds_planted_faults(faults: Faults, found: str) -> None:
    faulty = type("Faulty", (Fleet,), {"faults": faults})
    search = settings(
        max_examples=5_000,
        stateful_step_count=60,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(AssertionError, match=found):
        run_state_machine_as_test(faulty, settings=search)
