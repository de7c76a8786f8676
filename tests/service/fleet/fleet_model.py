"""A model of a fleet: members, their database and an agent, in any interleaving, each fault on request.

The database's transactions are what PostgreSQL promises: a renewal changes its row some time before it
commits, a write locks its slot's row from its first statement to its commit, and whoever needs a locked row
has to try again. Hosts' clocks are hours apart, and run at different rates.
"""

from collections import deque
from copy import copy
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
SLOT_COUNT = 2
MEMBER_COUNT = 3


@dataclass(frozen=True)
class Faults:
    """What is broken on purpose.

    Attributes:
        is_unfenced: writes don't check the lease epoch.
        is_deaf: members go on serving after their leases.
        is_trusting: the agent accepts any lease epoch.
    """

    is_unfenced: bool = False
    is_deaf: bool = False
    is_trusting: bool = False


@dataclass
class Transaction:
    """An open transaction that has checked and locked a slot."""

    number: int
    lease_epoch: int
    version: int


class Database:
    """Rows, and the transactions that are open; its clock is the model's time."""

    def __init__(self, faults: Faults) -> None:
        self.now_s = 0.0
        self.expiries_s: dict[str, float] = {}
        self.renewing: dict[str, float] = {}  # by member: the expiry that is not committed yet
        self.slots = [Slot(number, "", 0) for number in range(SLOT_COUNT)]
        self.versions = [0] * SLOT_COUNT
        self.writing: dict[str, Transaction] = {}
        self._faults = faults

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

    def _is_locked(self, number: int) -> bool:
        return any(each.number == number for each in self.writing.values())

    def take(self, member_id: str, number: int, lease_epoch: int) -> int | None:
        """Take a slot as `Take` says; return the new lease epoch."""
        slot = self.slots[number]
        is_free = slot.holder == member_id or slot.holder not in self.expiries_s
        is_valid = self.expiries_s.get(member_id, self.now_s) > self.now_s
        if slot.holder not in self.expiries_s:
            self.writing.pop(slot.holder, None)
        if self._is_locked(number) or slot.lease_epoch != lease_epoch or not (is_free and is_valid):
            return None
        self.slots[number] = Slot(number, member_id, lease_epoch + 1)
        return lease_epoch + 1

    def begin_write(self, member_id: str, number: int, lease_epoch: int, version: int) -> None:
        """Check and lock a slot's row, for a write of its next version."""
        is_ours = self.slots[number] == (number, member_id, lease_epoch)
        if is_ours or self._faults.is_unfenced:
            self.writing[member_id] = Transaction(number, lease_epoch, version)

    def commit_write(self, member_id: str) -> Transaction | None:
        """Commit what a member has begun; return None if the server has ended it."""
        done = self.writing.pop(member_id, None)
        if done is not None:
            slot = self.slots[done.number]
            assert (slot.holder, slot.lease_epoch) == (member_id, done.lease_epoch), (
                f"{member_id} writes slot {done.number} under lease epoch {done.lease_epoch}, after {slot}"
            )
            assert done.version > self.versions[done.number], f"version {done.version} twice"
            self.versions[done.number] = done.version
        return done


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
    served: dict[int, tuple[int, int]] = field(default_factory=dict)  # by slot: lease epoch, version
    offers: deque[tuple[int, int]] = field(default_factory=deque)  # slot, lease epoch

    def clock_s(self, now_s: float) -> float:
        return self.offset_s + self.rate * now_s


class Fleet(RuleBasedStateMachine):
    """Members, a database and an agent; `faults` are planted by subclasses."""

    faults = Faults()

    def __init__(self) -> None:
        super().__init__()
        self.database = Database(self.faults)
        self.accepted = [0] * SLOT_COUNT
        """By slot, the highest lease epoch that the agent has accepted."""
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
                case Serve(number, lease_epoch):
                    host.served[number] = lease_epoch, self.database.versions[number]
                case Stop():
                    if not self.faults.is_deaf:
                        host.served.clear()
                case _:
                    host.requests.append((clock_s, command))

    # ------------------------------------------------------------------ what may happen

    index = st.integers(0, MEMBER_COUNT - 1)
    number = st.integers(0, SLOT_COUNT - 1)

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
                if not self.hosts[other].is_frozen:
                    self.write(other)
                    self.offer(other)
        self.hosts[index].is_frozen = False

    @rule(index=index, number=number)
    def begin_write(self, index: int, number: int) -> None:
        """What was decided in time may reach the database late: no deadline is checked here."""
        host = self.hosts[index]
        if not host.is_frozen and number in host.served and host.member_id not in self.database.writing:
            lease_epoch, version = host.served[number]
            self.database.begin_write(host.member_id, number, lease_epoch, version + 1)

    @rule(index=index)
    def commit_write(self, index: int) -> None:
        """A member commits, and then offers what it has written."""
        host = self.hosts[index]
        if host.is_frozen or (done := self.database.commit_write(host.member_id)) is None:
            return
        if done.number in host.served:
            host.served[done.number] = done.lease_epoch, done.version
        host.offers.append((done.number, done.lease_epoch))

    @rule(index=index)
    def write(self, index: int) -> None:
        """A member writes for all its slots, and nothing comes between."""
        for number in list(self.hosts[index].served):
            self.begin_write(index, number)
            self.commit_write(index)

    @rule(index=index)
    def offer(self, index: int) -> None:
        """An offer reaches the agent, which accepts it or not."""
        if not self.hosts[index].offers:
            return
        number, lease_epoch = self.hosts[index].offers.popleft()
        if lease_epoch >= self.accepted[number] or self.faults.is_trusting:
            assert lease_epoch >= self.accepted[number], f"{lease_epoch} after {self.accepted[number]}"
            self.accepted[number] = lease_epoch

    @precondition(lambda self: self.start_count < 12)
    @rule(index=index, is_orderly=st.booleans())
    def end(self, index: int, is_orderly: bool) -> None:
        """A member leaves, or is killed and another one starts there."""
        host = self.hosts[index]
        if is_orderly:
            if not host.machine.has_ended and not host.is_frozen:
                host.served.clear()
                self.database.writing.pop(host.member_id, None)
                self._handle(host, LeaveRequested())
            return
        self.database.writing.pop(host.member_id, None)
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
                if number in host.served
                and (self.faults.is_deaf or _serves_on(host.machine, host.clock_s(now_s)))
            ]
            assert len(holders) <= 1, f"slot {number} is held by {holders}"
        assert all(len(host.served) <= 1 for host in self.hosts) or self.faults.is_deaf

    def teardown(self) -> None:
        """When nothing goes wrong any more, every slot gets a holder, and each a slot of its own."""
        if not self.hosts or self.faults != Faults():
            return
        for _ in range(8 * RENEWALS_PER_LEASE):
            for index, host in enumerate(self.hosts):
                if host.is_frozen:
                    self.freeze_or_wake(index)
                if host.machine.has_ended and not host.requests:
                    self.hosts[index] = self._start(host.offset_s, host.rate)
                self.commit_write(index)
                self.settle(index)
                self.one_holder()
            self.advance(1 / RENEWALS_PER_LEASE)
        counts = sorted(len(host.served) for host in self.hosts)
        assert counts == [0, 1, 1], f"{counts}: {self.database.slots}"


def _serves_on(machine: Membership, now_s: float) -> bool:
    """Return whether a member would not stop if it looked at its clock now."""
    commands = copy(machine).handle(Ticked(), now_s)
    return machine.held is not None and not any(isinstance(command, Stop) for command in commands)
