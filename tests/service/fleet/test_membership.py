"""The state machine of a fleet's member: exact commands, and a model of whole fleets."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from perseus.service.domain.members import Member, Slot
from perseus.service.fleet.membership import (
    Depart,
    Expired,
    LeaveRequested,
    Membership,
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
OURS = Slot(0, "a", 1)
UNRENEWED = Stop("it was not renewed for 20 s")


def holding(slot: Slot = OURS) -> Membership:
    machine = Membership("a", LEASE_S, 0.0)
    machine.handle(Taken(slot.number, slot.lease_epoch), 0.0)
    return machine


def test_renews_often_and_one_at_a_time() -> None:
    machine = Membership("a", LEASE_S, 0.0)
    assert machine.handle(Ticked(), 0.0) == [Renew()]
    assert machine.handle(Ticked(), 5.0) == []
    assert machine.handle(RenewalFailed(), 5.0) == [Renew()]
    assert machine.handle(Renewed(5.0, ALONE, []), 6.0) == []
    assert machine.handle(Ticked(), 7.9) == []
    assert machine.handle(Ticked(), 8.0) == [Renew()]


@pytest.mark.parametrize("slot", [Slot(1, "", 0), Slot(1, "gone", 7)])
def test_it_takes_one_slot_that_is_free_or_of_a_member_that_is_gone(slot: Slot) -> None:
    machine = Membership("a", LEASE_S, 0.0)
    slots = [Slot(0, "b", 2), slot, Slot(2, "", 0)]
    found = Renewed(0.0, BOTH, slots)
    assert machine.handle(found, 0.0) == [Take(1, slot.lease_epoch)]
    assert machine.handle(found, 0.1) == [], "it is being taken"
    assert machine.handle(Taken(1, None), 0.1) == []
    assert machine.handle(found, 0.2) == [Take(1, slot.lease_epoch)]
    assert machine.handle(Taken(1, 8), 0.3) == [Serve(1, 8)]
    slots[1] = Slot(1, "a", 8)
    assert machine.handle(Renewed(0.4, BOTH, slots), 0.4) == [], "one that serves takes no other"
    assert machine.held == slots[1]


def test_members_that_look_for_a_slot_at_the_same_time_try_others() -> None:
    slots = [Slot(0, "", 0), Slot(1, "", 0)]
    found = Renewed(0.0, BOTH, slots)
    assert Membership("a", LEASE_S, 0.0).handle(found, 0.0) == [Take(0, 0)]
    assert Membership("b", LEASE_S, 0.0).handle(found, 0.0) == [Take(1, 0)]


def test_a_slot_that_was_taken_with_an_unknown_outcome_is_taken_anew() -> None:
    machine = Membership("a", LEASE_S, 0.0)
    assert machine.handle(Renewed(0.0, BOTH, [Slot(0, "", 2), Slot(1, "a", 3)]), 0.0) == [Take(1, 3)]


def test_without_a_free_slot_it_stands_by() -> None:
    slots = [Slot(0, "b", 1), Slot(1, "c", 1)]
    members = [*BOTH, Member("c", "c:1")]
    assert Membership("a", LEASE_S, 0.0).handle(Renewed(1.0, members, slots), 1.0) == []


def test_it_stops_at_two_thirds_of_its_lease_counted_from_when_it_asked() -> None:
    machine = holding()
    machine.handle(Renewed(5.0, ALONE, [OURS]), 12.0)
    assert UNRENEWED not in machine.handle(Ticked(), 24.9)
    assert machine.handle(Ticked(), 25.0) == [UNRENEWED]
    assert machine.has_ended
    assert machine.handle(Renewed(26.0, ALONE, []), 26.0) == []


@pytest.mark.parametrize("sent_s", [5.0, 19.0])
def test_an_answer_after_a_freeze_stops_it(sent_s: float) -> None:
    """Even if the renewal was sent late: another may have taken over before it took effect."""
    assert holding().handle(Renewed(sent_s, ALONE, [OURS]), 25.0) == [UNRENEWED]


def test_an_expired_lease_is_never_renewed() -> None:
    machine = holding()
    assert machine.handle(Expired(), 1.0) == [Stop("it had expired before it was renewed")]
    assert machine.has_ended


@pytest.mark.parametrize("found", [Slot(0, "b", 2), Slot(0, "a", 2), Slot(0, "", 1)])
def test_one_that_has_lost_its_slot_stops(found: Slot) -> None:
    machine = holding()
    assert machine.handle(Renewed(1.0, BOTH, [found]), 1.0) == [Stop("its slot has been taken since")]
    assert machine.held is None


def test_one_that_has_taken_a_second_slot_unknowingly_stops_and_so_frees_it() -> None:
    stopped = holding().handle(Renewed(1.0, ALONE, [OURS, Slot(1, "a", 1)]), 1.0)
    assert stopped == [Stop("it has a second slot")]


def test_leaving_departs_at_once_even_while_a_slot_is_being_taken() -> None:
    assert holding().handle(LeaveRequested(), 1.0) == [Depart()]
    machine = Membership("a", LEASE_S, 0.0)
    assert machine.handle(Renewed(0.0, ALONE, [Slot(0, "", 0)]), 0.0) == [Take(0, 0)]
    assert machine.handle(LeaveRequested(), 0.1) == [Depart()]
    assert machine.handle(Taken(0, 1), 0.2) == []


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
