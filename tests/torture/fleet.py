"""`make torture-fleet`: end coordinators that share a PostgreSQL database in every way, and check for losses.

python -m tests.torture.fleet [COUNT] [--seed SEED]

Each of two coordinators serves a slot with six jobs, and a third stands by; each has a way of its own to the
database. The agents of five jobs are those of `benchmarks.load`, one process for each slot, which record all
messages: no acknowledged batch may be lost or counted twice, no version of clocks used twice, no message may
come with an older lease epoch than an earlier one, and no pipeline compute an iteration under offers of two
holders. The sixth job's agent is `perseus agent`, with emulated GPUs, on which real processes train: no GPU
may be at a foreign clock for longer than the lease of its rank once every coordinator is gone. A job under
its plan should keep it.
"""

import argparse
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count as numbers
from itertools import islice
from pathlib import Path

import grpc
import psycopg
from sqlalchemy.engine import make_url

from benchmarks.coordinator_load import report_problems
from benchmarks.load.control import Agents, GeneratorError, raise_file_limit
from perseus.demo.cluster import Cluster
from perseus.demo.processes import Coordinator
from perseus.demo.security import Security
from perseus.demo.workload import Workload
from perseus.emulation.gpu import EmulatedGpu
from perseus.job_id import slot_of
from perseus.v1 import job_pb2, job_service_pb2, rank_pb2
from perseus.v1.job_service_pb2_grpc import JobServiceStub
from tests.processes import MEMBER_LEASE_S, Fleet, tails
from tests.service.storage import postgresql
from tests.small_jobs import small_job, start_jobs
from tests.torture.coordinator import FLAGS, STAGES, check_by_command
from tests.torture.cut import Cut, way_to

SLOTS = 2
LOADED = [
    list(islice((job for job in map(str, numbers()) if slot_of(job, SLOTS) == slot), 5))
    for slot in range(SLOTS)
]
"""By slot, the jobs of the load. In the first of each a straggler comes and goes, so its plan changes."""
TRAINED = (small_job("third", 0.7, 1.0), small_job("first", 0.7, 1.0))
"""By slot, the job with the product's own agent."""

RANK_LEASE_S = 20.0
PERIOD_S = 1.0
_LIMIT_S = 120.0
_FREEZE_S = MEMBER_LEASE_S * 1.25
_MAX_DELAY_S = 2.0
_POLL_S = 0.05
_CALL_TIMEOUT_S = 10.0
_CLOCKS_LIMIT_S = RANK_LEASE_S + MEMBER_LEASE_S
"""A coordinator that is cut off from the database may serve for almost its own lease."""

KINDS = {
    "kill": 35,
    "kill and restart": 10,
    "kill a standby": 5,
    "freeze": 10,
    "freeze in a transaction": 10,
    "leave": 10,
    "kill PostgreSQL": 5,
    "cut off": 3,
}
"""How often what happens: among it 50 times SIGKILL, and 20 freezes beyond the lease."""
COUNT = sum(KINDS.values())

_IN_TRANSACTION = """
SELECT 1 FROM pg_stat_activity JOIN slots ON application_name = 'perseus ' || holder
WHERE number = %s AND backend_xid IS NOT NULL AND state = ANY(%s)"""
"""Whether a slot's holder has a transaction open that has locked the slot's row."""


@dataclass(slots=True)
class Outcome:
    """The result of all rounds.

    Attributes:
        failover_s: by kind, from the end of a coordinator until all its agents were served by another.
        end_statuses: of coordinators that ended by themselves.
        counts: how often each kind happened; a freeze that missed the transaction is a plain one.
        planned_count, kept_count: how many jobs were under their plan when it happened to their coordinator,
            and how many of them were offered nothing else.
    """

    failover_s: dict[str, list[float]] = field(default_factory=dict)
    end_statuses: Counter[int | None] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    planned_count: int = 0
    kept_count: int = 0
    batch_count: int = 0
    version_count: int = 0
    stock_after_s: float = 0.0
    """From the loss of every coordinator until all GPUs were at stock."""
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Damage:
    """What can be ended or cut off: coordinators, each one's way to the database, and its server."""

    fleet: Fleet
    ways: Sequence[Cut]
    server: postgresql.Server
    database: str


class _Plaintext(Security):
    """The fleet's coordinators authenticate nobody."""

    def of_agent(self) -> Mapping[str, str]:
        return {}


class ForeignClocks:
    """How long after the loss of every coordinator a GPU was still at a clock other than stock.

    Attributes:
        longest_s: the longest time found.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._lost_s: dict[int, float] = {}

    def lost(self, slot: int, now_s: float) -> None:
        """Note that nobody serves a slot's agents from now on."""
        self._lost_s.setdefault(slot, now_s)

    def served(self, slot: int) -> None:
        """Note that somebody serves them again."""
        self._lost_s.pop(slot, None)

    def take(self, slot: int, is_stock: bool, now_s: float) -> None:
        """Note the clock of a GPU of a slot's job."""
        lost_s = self._lost_s.get(slot)
        if lost_s is not None and not is_stock:
            self.longest_s = max(self.longest_s, now_s - lost_s)


class Training(Cluster):
    """A job that the product's agent serves, and real processes train on emulated GPUs."""

    def __init__(self, folder: Path, workload: Workload, slot: int) -> None:
        super().__init__(workload, folder / workload.job_id, folder / "logs" / workload.job_id)
        self.security = _Plaintext(folder / f"{workload.job_id}-unused")
        self.job_id = workload.job_id
        self.slot = slot
        self.gpu_files = [self.gpu_file(*rank) for rank in workload.ranks]

    def plan(self, address: str) -> dict[int, int] | None:
        """Return the version in force by stage, as a coordinator says; None without a plan, or an answer."""
        with grpc.insecure_channel(address) as channel:
            stub = JobServiceStub(channel)
            request = job_service_pb2.GetJobRequest(job_id=self.job_id)
            try:
                job, ranks = stub.GetJob(request, timeout=_CALL_TIMEOUT_S).job, self._ranks(stub)
            except grpc.RpcError:
                return None
        if job.state != job_pb2.JOB_STATE_PLANNED or not all(each.in_force_version for each in ranks):
            return None
        return {each.coordinates.stage: each.in_force_version for each in ranks}

    def is_back(self, address: str) -> bool:
        """Whether a coordinator serves all its ranks."""
        with grpc.insecure_channel(address) as channel:
            try:
                ranks = self._ranks(JobServiceStub(channel))
            except grpc.RpcError:
                return False
        return {each.state for each in ranks} == {rank_pb2.RANK_STATE_CONNECTED}

    def _ranks(self, stub: JobServiceStub) -> Sequence[rank_pb2.Rank]:
        request = job_service_pb2.ListRanksRequest(job_id=self.job_id)
        return stub.ListRanks(request, timeout=_CALL_TIMEOUT_S).ranks


@contextmanager
def watched(trainings: Sequence[Training]) -> Iterator[ForeignClocks]:
    """Look at all GPUs' clocks during the block."""
    found = ForeignClocks()
    is_over = threading.Event()
    gpus = [(each.slot, EmulatedGpu(file)) for each in trainings for file in each.gpu_files]

    def look() -> None:
        while not is_over.wait(_POLL_S):
            for slot, gpu in gpus:
                found.take(slot, gpu.sm_clock_mhz() == gpu.model.highest_clock_mhz, time.monotonic())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()
        for _, gpu in gpus:
            gpu.close()


class Jobs:
    """The jobs of one slot: their agents, and what is known of their plans."""

    def __init__(self, slot: int, agents: Agents, trained: Training, clocks: ForeignClocks) -> None:
        self.agents = agents
        self.trained = trained
        self._slot = slot
        self._clocks = clocks

    def add(self, target: str) -> None:
        """Start all jobs."""
        for job_id in LOADED[self._slot]:
            self.find()
            self.agents.ask(
                "add",
                job_id=job_id,
                slot=self._slot,
                pipeline_count=2,
                stage_count=STAGES,
                ranks_per_agent=STAGES,
                microbatch_count=4,
                period_s=PERIOD_S,
                reconnect_within_s=0.3,
            )
        start_jobs([self.trained], target)

    def find(self) -> None:
        """Find the coordinator that serves them."""
        self.agents.ask("find", job_id=LOADED[self._slot][0], limit_s=_LIMIT_S)

    def plans(self, address: str) -> Mapping[str, object]:
        """Return what tells the plans in force from others, by job: the versions that ranks were offered."""
        self.find()
        found: dict[str, object] = {
            job_id: self.agents.ask("counts", job_id=job_id)["versions"]
            for job_id in LOADED[self._slot][1:]
            if self.agents.ask("state", job_id=job_id) == "JOB_STATE_PLANNED"
        }
        if (plan := self.trained.plan(address)) is not None:
            found[self.trained.job_id] = plan
        return found

    def lose(self, since_s: float) -> None:
        """Note that their coordinator is gone."""
        self._clocks.lost(self._slot, since_s)

    def come_back(self, fleet: Fleet, since_s: float) -> float:
        """Wait until all agents are served; return the seconds that the load's took."""
        back_s: float = self.agents.ask("back", since_s=since_s, limit_s=_LIMIT_S)["joined_s"]
        ends_s = time.monotonic() + _LIMIT_S
        while not self.trained.is_back(fleet.holder(self._slot).address):
            assert time.monotonic() < ends_s, f"{self.trained.job_id} is not served again"
            time.sleep(0.1)
        self._clocks.served(self._slot)
        return back_s

    def settle(self, count: int, outcome: Outcome) -> None:
        """Wait until the load's jobs are planned, compare all messages, and end the jobs."""
        self.find()
        for job_id in LOADED[self._slot]:
            try:
                self.agents.ask("planned", job_id=job_id, limit_s=2 * _LIMIT_S)
            except GeneratorError as error:
                outcome.problems.append(str(error))
            self.agents.ask("rest", job_id=job_id, limit_s=_LIMIT_S)
            outcome.problems += report_problems(self.agents, job_id, count)
            counts = self.agents.ask("counts", job_id=job_id)
            outcome.batch_count += counts["acknowledged"]
            outcome.version_count += counts["versions"]
            self.agents.ask("finish", job_id=job_id)
        outcome.problems += self.agents.ask("findings")["messages"]


def torture(folder: Path, count: int, seed: int, *, kinds: Sequence[str] = ()) -> Outcome:
    """End coordinators `count` times, in `KINDS`' shares or by these kinds, and check all messages."""
    chance, outcome = random.Random(seed), Outcome()
    kinds = kinds or shuffled(count, chance)
    with postgresql.running() as server, ExitStack() as stack:
        database = server.new_database()
        ways = [stack.enter_context(way_to(server.socket)) for _ in range(SLOTS + 1)]
        url = make_url(database)
        urls = [url.set(host="127.0.0.1", port=way.port, query={}).render_as_string() for way in ways]
        flags = (*FLAGS, f"--lease-s={RANK_LEASE_S}", "--profile-accuracy-percent=2")
        fleet = stack.enter_context(Fleet(folder, urls, *flags))
        fleet.start()
        damage = Damage(fleet, ways, server, database)
        trainings = [
            stack.enter_context(Training(folder, workload, slot)) for slot, workload in enumerate(TRAINED)
        ]
        clocks = stack.enter_context(watched(trainings))
        with ExitStack() as loads:
            jobs = [
                Jobs(slot, loads.enter_context(Agents(fleet.addresses)), trainings[slot], clocks)
                for slot in range(SLOTS)
            ]
            for each in jobs:
                each.add(fleet.addresses)
            for slot, own in enumerate(trainings):
                _until_locked(own, fleet, slot)
            for number, kind in enumerate(kinds):
                slot = chance.randrange(SLOTS)
                print(f"{number}: {kind}, slot {slot}", flush=True)
                fleet.start()
                jobs[slot].find()
                factor = chance.choice((0.0, chance.uniform(1.1, 1.6)))
                jobs[slot].agents.ask("slow", job_id=LOADED[slot][0], factor=factor)
                time.sleep(chance.uniform(0.0, _MAX_DELAY_S))
                _strike(damage, jobs, slot, kind, chance, outcome)
            for each in jobs:
                each.settle(count, outcome)
        _lose_all(fleet, trainings, clocks, outcome)
        for own in trainings:
            own.stop_training()
        for coordinator in fleet.coordinators:
            if (status := coordinator.terminate()) != 0:
                text = coordinator.log.read_text()[-500:]
                outcome.problems.append(f"SIGTERM: exit status {status}: {text}")
        outcome.problems += check_by_command(database)
    return outcome


def shuffled(count: int, chance: random.Random) -> list[str]:
    """Return so many kinds in `KINDS`' shares."""
    all_kinds = [kind for kind, often in KINDS.items() for _ in range(often)]
    kinds = [all_kinds[int((number + 0.5) * COUNT / count)] for number in range(count)]
    chance.shuffle(kinds)
    return kinds


def _until_locked(trained: Training, fleet: Fleet, slot: int) -> None:
    """Wait until a training is under its plan."""
    ends_s = time.monotonic() + 2 * _LIMIT_S
    while not (trained.is_back(address := fleet.holder(slot).address) and trained.plan(address)):
        assert time.monotonic() < ends_s, f"{trained.job_id} has no plan"
        time.sleep(0.5)


def _lose_all(fleet: Fleet, trainings: Sequence[Training], clocks: ForeignClocks, outcome: Outcome) -> None:
    """Kill all coordinators at once for longer than a rank's lease, and start them again."""
    fleet.start()
    since_s = time.monotonic()
    for each in fleet.coordinators:
        each.kill()
    for own in trainings:
        clocks.lost(own.slot, since_s)
    time.sleep(_CLOCKS_LIMIT_S + 1.0)
    outcome.stock_after_s = clocks.longest_s
    if not 0.0 < clocks.longest_s <= _CLOCKS_LIMIT_S:
        outcome.problems.append(
            f"GPUs at foreign clocks: expected for at most {_CLOCKS_LIMIT_S:g} s after the loss of every "
            f"coordinator, found {clocks.longest_s:.1f} s"
        )
    fleet.start()


def _strike(
    damage: Damage,
    jobs: Sequence[Jobs],
    slot: int,
    kind: str,
    chance: random.Random,
    outcome: Outcome,
) -> None:
    fleet = damage.fleet
    holders = [fleet.holder(each) for each in range(SLOTS)]
    holder = holders[slot]
    if kind == "kill a standby":
        outcome.counts[kind] += 1
        chance.choice([each for each in fleet.coordinators if each not in holders]).kill()
        return
    struck = range(SLOTS) if kind == "kill PostgreSQL" else [slot]
    before = {each: jobs[each].plans(holders[each].address) for each in struck}
    if kind == "freeze in a transaction" and not _stop_in_transaction(holder, slot, damage.database):
        kind = "freeze"
    outcome.counts[kind] += 1
    since_s = time.monotonic()
    for each in struck:
        jobs[each].lose(since_s)
    match kind:
        case "kill":
            holder.kill()
            fleet.holder(slot, but=holder)
        case "kill and restart":
            holder.kill()
            holder.launch()
        case "leave":
            if (status := holder.terminate()) != 0:
                outcome.problems.append(f"SIGTERM: exit status {status}: {holder.log.read_text()[-500:]}")
            fleet.holder(slot, but=holder)
        case "freeze" | "freeze in a transaction":
            holder.signal(signal.SIGSTOP)
            _outlast_lease(jobs[slot].agents, chance)
            fleet.holder(slot, but=holder)
            holder.signal(signal.SIGCONT)
            outcome.end_statuses[holder.wait()] += 1
        case "cut off":
            way = damage.ways[fleet.coordinators.index(holder)]
            way.cut()
            _outlast_lease(jobs[slot].agents, chance)
            fleet.holder(slot, but=holder)
            way.mend()
            outcome.end_statuses[holder.wait()] += 1
        case "kill PostgreSQL":
            damage.server.kill()
            for coordinator in holders:
                outcome.end_statuses[coordinator.wait()] += 1
            damage.server.start_again()
            fleet.start()
    try:
        for each in struck:
            outcome.failover_s.setdefault(kind, []).append(jobs[each].come_back(fleet, since_s))
            after = jobs[each].plans(fleet.holder(each).address)
            outcome.planned_count += len(before[each])
            for job_id, plan in before[each].items():
                if after.get(job_id) == plan:
                    outcome.kept_count += 1
                else:
                    print(f"  job {job_id}: plan {plan}, then {after.get(job_id)}", flush=True)
    except GeneratorError as error:
        raise AssertionError(f"{kind}: {error}; {tails(fleet.coordinators[0].log.parents[1])}") from None


def _stop_in_transaction(holder: Coordinator, slot: int, database: str) -> bool:
    """Stop a coordinator between its first statement and its commit; return whether that succeeded."""
    ends_s = time.monotonic() + _LIMIT_S / 6

    def is_inside(*states: str) -> bool:
        return connection.execute(_IN_TRANSACTION, (slot, list(states))).fetchone() is not None

    with psycopg.connect(database, autocommit=True) as connection:
        while time.monotonic() < ends_s:
            if is_inside("active", "idle in transaction"):
                holder.signal(signal.SIGSTOP)
                time.sleep(0.05)  # what the server has already read is done
                if is_inside("idle in transaction"):
                    return True
                holder.signal(signal.SIGCONT)
    return False


def _outlast_lease(agents: Agents, chance: random.Random) -> None:
    """Wait until the lease of a coordinator that does nothing is over, and let its agents leave it."""
    ends_s = time.monotonic() + _FREEZE_S + chance.uniform(0.0, MEMBER_LEASE_S / 2)
    while time.monotonic() < ends_s:
        agents.ask("leave_silent")
        time.sleep(0.1)


def main(count: int, seed: int) -> None:
    """Run it, and print the figures."""
    print(f"seed {seed}", flush=True)
    raise_file_limit()
    with tempfile.TemporaryDirectory(prefix="perseus-") as folder:
        outcome = torture(Path(folder), count, seed)
    print(f"{outcome.counts.total()} rounds: {dict(outcome.counts)}")
    for kind, times_s in outcome.failover_s.items():
        median_s, most_s = statistics.median(times_s), max(times_s)
        print(
            f"{kind}: {len(times_s)}, all agents served again after {median_s:.1f} s, at most {most_s:.1f} s"
        )
    print(f"{outcome.batch_count} batches acknowledged, {outcome.version_count} versions offered to ranks")
    print(f"{outcome.kept_count} of {outcome.planned_count} plans kept")
    print(f"GPUs at stock {outcome.stock_after_s:.1f} s after every coordinator was killed, at most")
    print(f"ended by themselves, by exit status: {dict(outcome.end_statuses)}")
    print("; ".join(outcome.problems) or "nothing lost, doubled or reversed")
    if outcome.problems:
        raise SystemExit(1)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("count", type=int, nargs="?", default=COUNT)
    arguments.add_argument("--seed", type=int, default=random.randrange(2**32))
    given = arguments.parse_args()
    main(given.count, given.seed)
