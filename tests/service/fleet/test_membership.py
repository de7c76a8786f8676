"""The state machine of a fleet's member: exact commands, and a model of whole fleets.

The model has members and their database, in any interleaving. A renewal changes its row some time before it
commits, as with PostgreSQL. What fences writes is tested with the store. Hosts' clocks are hours apart, and
run at different rates.
"""

from collections import deque
from copy import copy
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from perseus.service.domain.members import Member, Slot
from perseus.service.fleet.membership import (
    RENEWALS_PER_LEASE,
    Command,
    Depart,
    Event,
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

LEASE_S = 30.0
ALONE = [Member("a", "a:1")]
BOTH = [Member("a", "a:1"), Member("b", "b:1")]
OURS = Slot(0, "a", 1)
UNRENEWED = Stop("it was not renewed for 20 s")

Step = tuple[Event, float, list[Command]]
TAKEN: list[Step] = [(Taken(0, 1), 0.0, [Serve(0, 1)])]
"""It holds a slot."""

C = Member("c", "c:1")
FREE = [Slot(0, "b", 2), Slot(1, "", 0), Slot(2, "", 0)]
GONE = [Slot(0, "b", 2), Slot(1, "gone", 7), Slot(2, "", 0)]
LOST = Stop("its slot has been taken since")

SCENARIOS: dict[str, list[Step]] = {
    "it renews often and one at a time": [
        (Ticked(), 0.0, [Renew()]),
        (Ticked(), 5.0, []),
        (RenewalFailed(), 5.0, [Renew()]),
        (Renewed(5.0, ALONE, []), 6.0, []),
        (Ticked(), 7.9, []),
        (Ticked(), 8.0, [Renew()]),
    ],
    "it takes one slot that is free, one at a time": [
        (Renewed(0.0, BOTH, FREE), 0.0, [Take(1, 0)]),
        (Renewed(0.0, BOTH, FREE), 0.1, []),
        (Taken(1, None), 0.1, []),
        (Renewed(0.0, BOTH, FREE), 0.2, [Take(1, 0)]),
        (Taken(1, 8), 0.3, [Serve(1, 8)]),
        (Renewed(0.4, BOTH, [Slot(0, "", 2), Slot(1, "a", 8)]), 0.4, []),
    ],
    "it takes one of a member that is gone": [(Renewed(0.0, BOTH, GONE), 0.0, [Take(1, 7)])],
    "it takes a slot anew that was taken with an unknown outcome": [
        (Renewed(0.0, BOTH, [Slot(0, "", 2), Slot(1, "a", 3)]), 0.0, [Take(1, 3)])
    ],
    "it stands by without a free slot": [
        (Renewed(1.0, [*BOTH, C], [Slot(0, "b", 1), Slot(1, "c", 1)]), 1.0, [])
    ],
    "it stops at two thirds of its lease, counted from when it asked": [
        *TAKEN,
        (Renewed(5.0, ALONE, [OURS]), 12.0, []),
        (Ticked(), 24.9, [Renew()]),
        (Ticked(), 25.0, [UNRENEWED]),
        (Renewed(26.0, ALONE, []), 26.0, []),
    ],
    "an answer after a freeze stops it": [*TAKEN, (Renewed(5.0, ALONE, [OURS]), 25.0, [UNRENEWED])],
    # Another may have taken over before it took effect.
    "so it does if the renewal was sent late": [*TAKEN, (Renewed(19.0, ALONE, [OURS]), 25.0, [UNRENEWED])],
    "an answer to an earlier renewal counts from that": [
        *TAKEN,
        (Renewed(5.0, ALONE, [OURS]), 6.0, []),
        (Renewed(3.0, ALONE, [OURS]), 24.0, [UNRENEWED]),
    ],
    "an expired lease is never renewed": [
        *TAKEN,
        (Expired(), 1.0, [Stop("it had expired before it was renewed")]),
        (Ticked(), 9.0, []),
    ],
    "it stops when another has its slot": [*TAKEN, (Renewed(1.0, BOTH, [Slot(0, "b", 2)]), 1.0, [LOST])],
    "it stops when its slot has another epoch": [
        *TAKEN,
        (Renewed(1.0, BOTH, [Slot(0, "a", 2)]), 1.0, [LOST]),
    ],
    "it stops when its slot is free": [*TAKEN, (Renewed(1.0, BOTH, [Slot(0, "", 1)]), 1.0, [LOST])],
    "it stops, and so frees it, with a second slot that it has taken unknowingly": [
        *TAKEN,
        (Renewed(1.0, ALONE, [OURS, Slot(1, "a", 1)]), 1.0, [Stop("it has a second slot")]),
    ],
    "leaving departs at once": [*TAKEN, (LeaveRequested(), 1.0, [Depart()])],
    "so it does while a slot is being taken": [
        (Renewed(0.0, ALONE, [Slot(0, "", 0)]), 0.0, [Take(0, 0)]),
        (LeaveRequested(), 0.1, [Depart()]),
        (Taken(0, 1), 0.2, []),
    ],
}


@pytest.mark.parametrize("steps", SCENARIOS.values(), ids=SCENARIOS)
def test_a_member_answers_each_event_with_exact_commands(steps: list[Step]) -> None:
    machine = Membership("a", LEASE_S, 0.0)
    served = None
    for event, now_s, commands in steps:
        assert machine.handle(event, now_s) == commands
        for command in commands:
            if isinstance(command, Serve):
                served = Slot(command.number, "a", command.lease_epoch)
            if isinstance(command, Stop):
                served = None
        assert machine.held == served
    assert machine.has_ended == any(isinstance(each, Stop | Depart) for _, _, own in steps for each in own)


def test_members_that_look_for_a_slot_at_the_same_time_try_others() -> None:
    found = Renewed(0.0, BOTH, [Slot(0, "", 0), Slot(1, "", 0)])
    assert Membership("a", LEASE_S, 0.0).handle(found, 0.0) == [Take(0, 0)]
    assert Membership("b", LEASE_S, 0.0).handle(found, 0.0) == [Take(1, 0)]


# ---------------------------------------------------------------------- the model

SLOT_COUNT = 2
MEMBER_COUNT = 3


class Database:
    """Rows, and the renewals that are open; its clock is the model's time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.expiries_s: dict[str, float] = {}
        self.renewing: dict[str, float] = {}  # by member: the expiry that is not committed yet
        self.slots = [Slot(number, "", 0) for number in range(SLOT_COUNT)]

    def begin_renewal(self, member_id: str) -> bool:
        """Change the row of a member whose lease has not expired."""
        if self.expiries_s.get(member_id, self.now_s) <= self.now_s:
            return False
        self.renewing[member_id] = self.now_s + LEASE_S
        return True

    def commit_renewal(self, member_id: str) -> tuple[list[Member], list[Slot]]:
        """Commit that; then delete expired members, and return all rows."""
        self.expiries_s[member_id] = self.renewing.pop(member_id)
        self.evict()
        return [Member(each, "") for each in self.expiries_s], list(self.slots)

    def evict(self) -> None:
        """Delete the expired members but those whose rows are locked."""
        for each, expiry_s in list(self.expiries_s.items()):
            if expiry_s <= self.now_s and each not in self.renewing:
                del self.expiries_s[each]

    def take(self, member_id: str, number: int, lease_epoch: int) -> int | None:
        """Take a slot as `Take` says; return the new lease epoch."""
        slot = self.slots[number]
        is_free = slot.holder == member_id or slot.holder not in self.expiries_s
        is_valid = self.expiries_s.get(member_id, self.now_s) > self.now_s
        if slot.lease_epoch != lease_epoch or not (is_free and is_valid):
            return None
        self.slots[number] = Slot(number, member_id, lease_epoch + 1)
        return lease_epoch + 1


@dataclass
class Host:
    """One member's process, on a host with its own clock."""

    member_id: str
    offset_s: float
    rate: float
    machine: Membership
    is_frozen: bool = False
    # (when it was sent on its own clock, what); the first may be half done by the database.
    requests: deque[tuple[float, Command]] = field(default_factory=deque)
    answer: Event | None = None
    served: set[int] = field(default_factory=set)  # slots

    def clock_s(self, now_s: float) -> float:
        return self.offset_s + self.rate * now_s


class Fleet(RuleBasedStateMachine):
    """Members and a database."""

    def __init__(self) -> None:
        super().__init__()
        self.database = Database()
        self.hosts: list[Host] = []
        self.start_count = 0

    @initialize(
        clocks=st.lists(
            st.tuples(st.floats(-1e5, 1e5), st.sampled_from([0.8, 1.0, 1.25])),
            min_size=MEMBER_COUNT,
            max_size=MEMBER_COUNT,
        )
    )
    def start_all(self, clocks: list[tuple[float, float]]) -> None:
        for offset_s, rate in clocks:
            self.hosts.append(self._start(offset_s, rate))

    def _start(self, offset_s: float, rate: float) -> Host:
        self.start_count += 1
        member_id = f"member-{self.start_count}"
        self.database.expiries_s[member_id] = self.database.now_s + LEASE_S
        joined_s = offset_s + rate * self.database.now_s
        host = Host(member_id, offset_s, rate, Membership(member_id, LEASE_S, joined_s))
        self._handle(host, Ticked())
        return host

    def _handle(self, host: Host, event: Event) -> None:
        clock_s = host.clock_s(self.database.now_s)
        for command in host.machine.handle(event, clock_s):
            match command:
                case Serve(number, _):
                    host.served.add(number)
                case Stop():
                    host.served.clear()
                case _:
                    host.requests.append((clock_s, command))

    # ------------------------------------------------------------------ what may happen

    index = st.integers(0, MEMBER_COUNT - 1)

    @rule(share=st.sampled_from([0.02, 0.11, 0.3, 0.6, 1.1]))
    def advance(self, share: float) -> None:
        self.database.now_s += share * LEASE_S
        for host in self.hosts:
            if not host.is_frozen:
                self._handle(host, Ticked())

    @rule(index=index)
    def reach_database(self, index: int) -> None:
        """The database does the next step of a member's first request, frozen or not."""
        host, database = self.hosts[index], self.database
        if not host.requests or host.answer is not None:
            return
        (sent_s, command), me = host.requests[0], host.member_id
        match command:
            case Renew():
                if me not in database.renewing:
                    if database.begin_renewal(me):
                        return  # it commits later
                    host.answer = Expired()
                else:
                    host.answer = Renewed(sent_s, *database.commit_renewal(me))
            case Take(number, lease_epoch):
                host.answer = Taken(number, database.take(me, number, lease_epoch))
            case Depart():
                database.expiries_s.pop(me, None)
        host.requests.popleft()

    @rule(index=index, is_lost=st.booleans())
    def answer(self, index: int, is_lost: bool) -> None:
        """A member gets an answer, or knows only that it is lost."""
        host = self.hosts[index]
        if host.is_frozen or host.answer is None:
            return
        event, host.answer = host.answer, None
        if is_lost:
            match event:
                case Renewed():
                    event = RenewalFailed()
                case Taken(number):
                    event = Taken(number, None)
                case _:
                    pass
        self._handle(host, event)

    @rule(index=index)
    def settle(self, index: int) -> None:
        """A member and the database do at once whatever they have to do with each other."""
        host = self.hosts[index]
        while not host.is_frozen and (host.requests or host.answer is not None):
            self.reach_database(index)
            self.answer(index, is_lost=False)

    @rule(index=index)
    def freeze_or_wake(self, index: int) -> None:
        """Whoever wakes goes on where it was; it looks at its clock when time has passed."""
        self.hosts[index].is_frozen = not self.hosts[index].is_frozen

    @rule(index=index)
    def oversleep(self, index: int) -> None:
        """A member freezes for longer than its lease, while the others go on."""
        self.hosts[index].is_frozen = True
        for _ in range(RENEWALS_PER_LEASE + 3):
            self.advance(1 / RENEWALS_PER_LEASE)
            for other in range(MEMBER_COUNT):
                self.settle(other)
        self.hosts[index].is_frozen = False

    @precondition(lambda self: self.start_count < 12)
    @rule(index=index, is_orderly=st.booleans())
    def end(self, index: int, is_orderly: bool) -> None:
        """A member leaves, or is killed and another one starts there."""
        host = self.hosts[index]
        if is_orderly:
            if not host.machine.has_ended and not host.is_frozen:
                host.served.clear()
                self._handle(host, LeaveRequested())
            return
        self.database.renewing.pop(host.member_id, None)
        self.hosts[index] = self._start(host.offset_s, host.rate)

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def one_holder(self) -> None:
        now_s = self.database.now_s
        for number in range(SLOT_COUNT):
            holders = [
                host.member_id
                for host in self.hosts
                if number in host.served and _serves_on(host.machine, host.clock_s(now_s))
            ]
            assert len(holders) <= 1, f"slot {number} is held by {holders}"
        assert all(len(host.served) <= 1 for host in self.hosts)

    def teardown(self) -> None:
        """When nothing goes wrong any more, every slot gets a holder, and each a slot of its own."""
        if not self.hosts:
            return
        for _ in range(8 * RENEWALS_PER_LEASE):
            for index, host in enumerate(self.hosts):
                if host.is_frozen:
                    self.freeze_or_wake(index)
                if host.machine.has_ended and not host.requests:
                    self.hosts[index] = self._start(host.offset_s, host.rate)
                self.settle(index)
                self.one_holder()
            self.advance(1 / RENEWALS_PER_LEASE)
        counts = sorted(len(host.served) for host in self.hosts)
        assert counts == [0, 1, 1], f"{counts}: {self.database.slots}"


def _serves_on(machine: Membership, now_s: float) -> bool:
    """Return whether a member would not stop if it looked at its clock now."""
    commands = copy(machine).handle(Ticked(), now_s)
    return machine.held is not None and not any(isinstance(command, Stop) for command in commands)


TestFleet = pytest.mark.slow("thousands of interleavings")(Fleet.TestCase)
TestFleet.settings = settings(Fleet.TestCase.settings, max_examples=400, stateful_step_count=80)
