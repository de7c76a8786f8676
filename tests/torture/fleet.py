"""`make torture-fleet`: end coordinators that share a PostgreSQL database in every way, and check for losses.

python -m tests.torture.fleet COUNT [--seed SEED]

Each of two coordinators serves a slot of jobs, with one job in it, and a third stands by; each has a way of
its own to the database. The agents of `benchmarks.load` record all messages: no acknowledged batch may be
lost or counted twice, no version of clocks used twice, no message may come with an older lease epoch than an
earlier one, and no pipeline compute an iteration under offers of two holders. A job under its plan should
keep it.
"""

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count as numbers
from pathlib import Path

from sqlalchemy.engine import make_url

from benchmarks.coordinator_load import report_problems
from benchmarks.load.control import Agents, CoordinatorProcess, GeneratorError, raise_file_limit
from perseus.job_id import slot_of
from tests.event_log import logged
from tests.ports import free_port
from tests.service.storage import postgresql
from tests.torture.coordinator import FLAGS, STAGES, check_by_command
from tests.torture.cut import way_to
from tests.torture.killed_postgresql import KilledServer

COORDINATORS = 3
SLOTS = 2
JOBS = [next(job for job in map(str, numbers()) if slot_of(job, SLOTS) == slot) for slot in range(SLOTS)]
"""A job of each slot."""

MEMBER_LEASE_S = 3.0
PERIOD_S = 0.5
_LIMIT_S = 60.0
_FREEZE_S = MEMBER_LEASE_S * 1.5
_MAX_DELAY_S = 2.0

KINDS = {
    "kill": 10,
    "kill and restart": 3,
    "freeze": 4,
    "leave": 4,
    "kill a standby": 2,
    "cut off": 2,
    "kill PostgreSQL": 1,
}
"""How one of those that serve ends, with weights; and what else may happen."""


@dataclass(slots=True)
class Outcome:
    """The result of all rounds.

    Attributes:
        failover_s: by kind, from the end of a coordinator until all its agents were served by another.
        end_statuses: of coordinators that ended by themselves.
        planned_count, kept_count: how many jobs were under their plan when it happened to their coordinator,
            and how many of them were offered nothing else.
    """

    failover_s: dict[str, list[float]] = field(default_factory=dict)
    end_statuses: Counter[int | None] = field(default_factory=Counter)
    planned_count: int = 0
    kept_count: int = 0
    batch_count: int = 0
    version_count: int = 0
    problems: list[str] = field(default_factory=list)


class Fleet:
    """Coordinators on one database."""

    def __init__(self, folder: Path, server: postgresql.Server, database: str, stack: ExitStack) -> None:
        flags = (*FLAGS, "--member-lease-s", str(MEMBER_LEASE_S), "--slots", str(SLOTS))
        self.coordinators = []
        self.ways = []
        for number in range(COORDINATORS):
            (own := folder / str(number)).mkdir()
            self.ways.append(stack.enter_context(way_to(server.socket)))
            url = make_url(database).set(host="127.0.0.1", port=self.ways[-1].port, query={})
            process = CoordinatorProcess(own, url.render_as_string(), flags, is_pinned=False)
            process.address = f"127.0.0.1:{free_port()}"
            self.coordinators.append(stack.enter_context(process))

    @property
    def target(self) -> str:
        return ",".join(each.address for each in self.coordinators)

    def launch_ended(self) -> None:
        """Start all that don't run."""
        for each in self.coordinators:
            if each.start_count == 0 or each.poll() is not None:
                each.launch()

    def wait_for_all(self) -> None:
        """Wait until all serve or stand by, and every slot is served."""
        ends_s = time.monotonic() + _LIMIT_S
        for each in self.coordinators:
            while not (each.is_listening() or '"standing by"' in each.log.read_text()):
                assert time.monotonic() < ends_s, each.log.read_text()[-1000:]
                time.sleep(0.02)
        for slot in range(SLOTS):
            self.holder(slot)

    def holder(self, slot: int, but: CoordinatorProcess | None = None) -> CoordinatorProcess:
        """Wait until one that runs serves a slot, other than `but`; return it."""
        ends_s = time.monotonic() + _LIMIT_S
        while time.monotonic() < ends_s:
            for each in self.coordinators:
                if (
                    each is not but
                    and each.start_count
                    and each.poll() is None
                    and each.is_listening()
                    and logged(each.log, "took over the jobs")["slot"] == slot
                ):
                    return each
            time.sleep(0.02)
        logs = [each.log.read_text()[-1000:] for each in self.coordinators]
        raise AssertionError(f"expected a coordinator that serves slot {slot}, found {logs}")


def torture(
    folder: Path, count: int, seed: int, *, pipeline_count: int = 4, kinds: Sequence[str] = ()
) -> Outcome:
    """End coordinators `count` times, at random or by these kinds in turn, and check all messages."""
    chance, outcome = random.Random(seed), Outcome()
    with postgresql.running() as server, ExitStack() as stack:
        database = server.new_database()
        fleet = Fleet(folder, server, database, stack)
        fleet.launch_ended()
        fleet.wait_for_all()
        with ExitStack() as loads:
            agents = [loads.enter_context(Agents(fleet.target)) for _ in range(SLOTS)]
            for slot, own in enumerate(agents):
                own.ask("find", job_id=JOBS[slot], limit_s=_LIMIT_S)
                own.ask(
                    "add",
                    job_id=JOBS[slot],
                    slot=slot,
                    pipeline_count=pipeline_count,
                    stage_count=STAGES,
                    microbatch_count=4,
                    period_s=PERIOD_S,
                    reconnect_within_s=0.3,
                )
            for number in range(count):
                time.sleep(chance.uniform(0.0, _MAX_DELAY_S))
                drawn = chance.choices(list(KINDS), list(KINDS.values()))[0]
                kind = kinds[number % len(kinds)] if kinds else drawn
                slot = chance.randrange(SLOTS)
                print(f"{number}: {kind}, slot {slot}", flush=True)
                _strike(fleet, agents, slot, kind, KilledServer(server), chance, outcome)
            for slot, own in enumerate(agents):
                own.ask("find", job_id=JOBS[slot], limit_s=_LIMIT_S)
                _settle(own, JOBS[slot], count, outcome)
        fleet.wait_for_all()
        for each in fleet.coordinators:
            if (status := each.terminate()) != 0:
                outcome.problems.append(f"SIGTERM: exit status {status}: {each.log.read_text()[-500:]}")
        outcome.problems += check_by_command(database)
    return outcome


def _strike(
    fleet: Fleet,
    agents: Sequence[Agents],
    slot: int,
    kind: str,
    server: KilledServer,
    chance: random.Random,
    outcome: Outcome,
) -> None:
    fleet.wait_for_all()
    holders = [fleet.holder(each) for each in range(SLOTS)]
    holder = holders[slot]
    if kind == "kill a standby":
        chance.choice([each for each in fleet.coordinators if each not in holders]).kill()
        fleet.launch_ended()
        return
    before = [_plan(own, JOBS[each]) for each, own in enumerate(agents)]
    since_s = time.monotonic()
    struck = [slot]
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
        case "freeze":
            os.kill(holder.pid, signal.SIGSTOP)
            _outlast_lease(agents[slot], chance)
            fleet.holder(slot, but=holder)
            os.kill(holder.pid, signal.SIGCONT)
            outcome.end_statuses[holder.wait()] += 1
        case "cut off":
            way = fleet.ways[fleet.coordinators.index(holder)]
            way.cut()
            _outlast_lease(agents[slot], chance)
            fleet.holder(slot, but=holder)
            way.mend()
            outcome.end_statuses[holder.wait()] += 1
        case "kill PostgreSQL":
            struck = list(range(SLOTS))
            server.kill()
            for each in holders:
                outcome.end_statuses[each.wait()] += 1
            server.start()
            fleet.launch_ended()
    try:
        for number in struck:
            back = agents[number].ask("back", since_s=since_s, limit_s=_LIMIT_S)
            outcome.failover_s.setdefault(kind, []).append(back["joined_s"])
            if (plan := before[number]) is not None:
                outcome.planned_count += 1
                outcome.kept_count += _plan(agents[number], JOBS[number]) == plan
    except GeneratorError as error:
        states = [each.standing() if each.poll() is None else "ended" for each in fleet.coordinators]
        raise AssertionError(f"{kind}: {error}; {states}") from None
    fleet.launch_ended()


def _outlast_lease(agents: Agents, chance: random.Random) -> None:
    """Wait until the lease of a coordinator that does nothing is over, and let its agents leave it."""
    ends_s = time.monotonic() + _FREEZE_S + chance.uniform(0.0, _FREEZE_S)
    while time.monotonic() < ends_s:
        agents.ask("leave_silent")
        time.sleep(0.1)


def _plan(agents: Agents, job_id: str) -> int | None:
    """Return what tells a job's plan from others: how many versions its ranks were offered; None without."""
    agents.ask("find", job_id=job_id, limit_s=_LIMIT_S)
    if agents.ask("state", job_id=job_id) != "JOB_STATE_PLANNED":
        return None
    found: int = agents.ask("counts", job_id=job_id)["versions"]
    return found


def _settle(agents: Agents, job_id: str, count: int, outcome: Outcome) -> None:
    try:
        agents.ask("planned", job_id=job_id, limit_s=2 * _LIMIT_S)
    except GeneratorError as error:
        outcome.problems.append(str(error))
    agents.ask("rest", job_id=job_id, limit_s=_LIMIT_S)
    outcome.problems += report_problems(agents, job_id, count)
    counts = agents.ask("counts", job_id=job_id)
    outcome.batch_count += counts["acknowledged"]
    outcome.version_count += counts["versions"]
    agents.ask("finish", job_id=job_id)
    outcome.problems += agents.ask("findings")["messages"]


def main(count: int, seed: int) -> None:
    """Run it, and print the figures."""
    print(f"seed {seed}", flush=True)
    raise_file_limit()
    with tempfile.TemporaryDirectory(prefix="perseus-") as folder:
        outcome = torture(Path(folder), count, seed)
    for kind, times_s in outcome.failover_s.items():
        median_s, most_s = statistics.median(times_s), max(times_s)
        print(
            f"{kind}: {len(times_s)}, all agents served again after {median_s:.1f} s, at most {most_s:.1f} s"
        )
    print(f"{outcome.batch_count} batches acknowledged, {outcome.version_count} versions offered to ranks")
    print(f"{outcome.kept_count} of {outcome.planned_count} plans kept")
    print(f"ended by themselves, by exit status: {dict(outcome.end_statuses)}")
    print("; ".join(outcome.problems) or "nothing lost, doubled or reversed")
    if outcome.problems:
        raise SystemExit(1)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("count", type=int)
    arguments.add_argument("--seed", type=int, default=random.randrange(2**32))
    given = arguments.parse_args()
    main(given.count, given.seed)
