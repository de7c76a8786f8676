"""Claims of GPUs by two slots, with coordinators that end at any time: a GPU runs ranks of one slot."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from perseus.service.domain.gpu_claims import ClaimChanges, Gpu, Place
from perseus.service.domain.specification import Coordinates
from perseus.service.fleet.gpu_claims import GpuClaims

SLOTS = (0, 1)
RANK = Coordinates(0, 0, 0)

slots = st.sampled_from(SLOTS)
gpus = st.sampled_from([("mine", "GPU-0"), ("mine", "GPU-1"), ("theirs", "GPU-0")])
jobs = st.sampled_from(["a", "b"])


class Table:
    """The table, by the rules of `storage.gpu_claims`."""

    def __init__(self) -> None:
        self.rows: dict[Gpu, tuple[int, Place]] = {}

    def change(self, slot: int, changes: ClaimChanges) -> dict[Gpu, tuple[int, Place]]:
        for gpu, place in changes.claimed.items():
            if self.rows.get(gpu, (slot, place))[0] == slot:
                self.rows[gpu] = slot, place
        found = {gpu: self.rows[gpu] for gpu in changes.claimed if gpu in self.rows}
        for gpu in changes.released:
            if gpu in self.rows and self.rows[gpu][0] == slot:
                del self.rows[gpu]
        return found

    def of(self, slot: int) -> dict[Gpu, Place]:
        return {gpu: place for gpu, (owner, place) in self.rows.items() if owner == slot}


class Fleet(RuleBasedStateMachine):
    """Live ranks are known by their job and GPU; every job has one rank for each GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.claims = {slot: GpuClaims(slot, {}) for slot in SLOTS}
        self.live: dict[int, dict[Gpu, str]] = {slot: {} for slot in SLOTS}
        self.wanted: dict[int, dict[Gpu, Place]] = {slot: {} for slot in SLOTS}
        self.answer: dict[int, dict[Gpu, tuple[int, Place]] | None] = dict.fromkeys(SLOTS)

    @rule(slot=slots, gpu=gpus, job=jobs)
    def want(self, slot: int, gpu: Gpu, job: str) -> None:
        self.claims[slot].forget_elsewhere([gpu])
        self.wanted[slot][gpu] = f"{job} of {slot}", RANK
        self.claims[slot].want({gpu: self.wanted[slot][gpu]})

    @rule(slot=slots)
    def write(self, slot: int) -> None:
        if self.answer[slot] is None:
            self.answer[slot] = self.table.change(slot, self.claims[slot].take())

    @rule(slot=slots)
    def hear(self, slot: int) -> None:
        """Take the answer; ranks join whose GPUs are claimed."""
        answer, self.answer[slot] = self.answer[slot], None
        if answer is None:
            return
        self.claims[slot].note(answer)
        for gpu, place in list(self.wanted[slot].items()):
            if self.claims[slot].want({gpu: place}):
                continue
            del self.wanted[slot][gpu]
            if (other := self.claims[slot].elsewhere(gpu)) is not None:
                assert other[0].endswith(f"of {1 - slot}")
            elif gpu not in self.live[slot]:
                self.live[slot][gpu] = place[0]
                self.claims[slot].put(gpu, place)

    @rule(slot=slots, gpu=gpus)
    def leave(self, slot: int, gpu: Gpu) -> None:
        self.live[slot].pop(gpu, None)

    @rule(slot=slots, job=jobs)
    def sweep(self, slot: int, job: str) -> None:
        self.claims[slot].sweep([f"{job} of {slot}"], lambda job_id: self.ranks(slot, job_id))

    def ranks(self, slot: int, job_id: str) -> set[tuple[Coordinates, str]]:
        return {(RANK, gpu[1]) for gpu, job in self.live[slot].items() if job == job_id}

    @rule(slot=slots)
    def take_over(self, slot: int) -> None:
        """Another coordinator takes the slot over, with its live ranks and what was written."""
        self.claims[slot] = GpuClaims(slot, self.table.of(slot))
        self.wanted[slot].clear()
        self.answer[slot] = None

    @invariant()
    def a_gpu_has_ranks_of_one_slot(self) -> None:
        assert not self.live[0].keys() & self.live[1].keys()
        for slot in SLOTS:
            for gpu in self.live[slot]:
                assert self.table.rows[gpu][0] == slot

    @rule()
    def all_leave(self) -> None:
        """Soon after the last rank has left nothing is claimed."""
        for slot in SLOTS:
            self.live[slot].clear()
            self.wanted[slot].clear()
            for _ in range(2):  # an answer may be on its way
                self.write(slot)
                self.hear(slot)
            for job_id in self.claims[slot].job_ids:
                self.sweep(slot, job_id[0])
            self.write(slot)
            self.hear(slot)
        assert self.table.rows == {}


TestFleet = Fleet.TestCase
