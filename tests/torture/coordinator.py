"""`make torture-coordinator`: kill a coordinator many times under load, and check for losses.

python -m tests.torture.coordinator COUNT [REPORT] [--malformed COUNT]

Agents load it from another process (`benchmarks.load`), and record all messages that they receive. The
process is killed by SIGKILL at random times: while jobs are measured, profiled and planned, while stragglers
come and go, and while it starts. After that come failing databases, malformed messages and hostile tenants.
"""

import argparse
import asyncio
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.coordinator_load import report_problems
from benchmarks.load.control import Agents, CoordinatorProcess, GeneratorError, raise_file_limit
from tests.service.storage import postgresql
from tests.torture import tenants
from tests.torture.faults import FAULTS, LEASE_S, FaultOutcome, strike_all
from tests.torture.killed_postgresql import KilledServer
from tests.torture.malformed import section, torture_malformed

FLAGS = (
    *("--lease-s", "60", "--guard-tolerance-percent", "1000"),
    *("--baseline-iterations", "3", "--profile-iterations", "2", "--profile-clocks", "2"),
)
STAGES = 4
PERIOD_S = 0.5
RECONNECT_WITHIN_S = 0.3
JOB_EVERY = 10
"""Kills until another job begins."""
JOBS = 2
"""Number of jobs at a time; another one ends the oldest."""

_MAX_DELAY_S = 1.5
_MAX_START_S = 1.2
"""Latest time of a kill during a start."""
_START_KILLS = 0.2
_UNFINISHED_RETURNS = 0.3
"""Share of kills that don't wait for all agents to be back from the previous one."""
_LIMIT_S = 120.0
_HOSTILE_S = 60.0
_POSTGRESQL_SHARE, _SERVER_SHARE = 0.25, 0.1
"""Shares of the number of kills: those repeated on PostgreSQL, and those of its server."""


class DatabaseServer(Protocol):
    """A server that keeps a coordinator's database, and can be killed itself."""

    def kill(self) -> None:
        """SIGKILL to all of it."""

    def start(self) -> None:
        """Start it again, and wait until it answers."""


@dataclass(slots=True)
class Outcome:
    """The result of all kills."""

    kill_count: int = 0
    start_kill_count: int = 0
    server_kill_count: int = 0
    batch_count: int = 0
    return_s: list[float] = field(default_factory=list)
    """From listening until all agents were back and all resent batches were acknowledged."""
    version_count: int = 0
    left_out_count: int = 0
    """Iterations that no report counts, although the previous one ran under the same plans."""
    states: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def torture(
    folder: Path,
    database: str,
    kill_count: int,
    seed: int,
    *,
    pipeline_count: int = 8,
    server: DatabaseServer | None = None,
    server_kill_count: int = 0,
    check_store: Callable[[str], list[str]],
) -> Outcome:
    """Kill the coordinator of a database repeatedly, and compare its state with its messages.

    Args:
        database: the value of `--database`.
        server: its server, which is killed `server_kill_count` times in between.
        check_store: returns the problems of the database, once nobody has it open.
    """
    chance = random.Random(seed)
    outcome = Outcome()
    # Kills that include the server, spread evenly.
    server_kills = {round((n + 0.5) * kill_count / server_kill_count) for n in range(server_kill_count)}
    with CoordinatorProcess(folder, database, FLAGS, is_pinned=False) as coordinator:
        coordinator.start()
        with Agents(coordinator.address) as agents:
            restart_counts: dict[str, int] = {}
            killed_s = 0.0
            for number in range(kill_count):
                if number % JOB_EVERY == 0:
                    if restart_counts:
                        _come_back(coordinator, agents, killed_s, outcome)
                    if len(restart_counts) == JOBS:
                        oldest = next(iter(restart_counts))
                        _settle(agents, {oldest: restart_counts.pop(oldest)}, outcome)
                    restart_counts[_add(agents, number, pipeline_count)] = 0
                _nudge(agents, list(restart_counts), chance)
                time.sleep(chance.uniform(0.0, _MAX_DELAY_S))
                if server is not None and number in server_kills:
                    server.kill()
                    outcome.server_kill_count += 1
                    _end_without_database(coordinator, outcome)
                    server.start()
                killed_s = coordinator.kill()
                outcome.kill_count += 1
                if chance.random() < _START_KILLS:
                    coordinator.launch()
                    time.sleep(chance.uniform(0.0, _MAX_START_S))
                    coordinator.kill()
                    outcome.start_kill_count += 1
                coordinator.start()
                restart_counts = {job_id: count + 1 for job_id, count in restart_counts.items()}
                if chance.random() >= _UNFINISHED_RETURNS:
                    _come_back(coordinator, agents, killed_s, outcome)
            _come_back(coordinator, agents, killed_s, outcome)
            _settle(agents, restart_counts, outcome)
            outcome.problems += agents.ask("findings")["messages"]
        status = coordinator.terminate()
        if status != 0:
            outcome.problems.append(f"SIGTERM: exit status {status}: {coordinator.log.read_text()[-500:]}")
    outcome.problems += check_store(database)
    return outcome


def _add(agents: Agents, number: int, pipeline_count: int) -> str:
    job_id = f"torture-{number}"
    agents.ask(
        "add",
        job_id=job_id,
        pipeline_count=pipeline_count,
        stage_count=STAGES,
        microbatch_count=4,
        period_s=PERIOD_S,
        reconnect_within_s=RECONNECT_WITHIN_S,
    )
    return job_id


def _nudge(agents: Agents, job_ids: Sequence[str], chance: random.Random) -> None:
    """Let a straggler come or go, so that plans change."""
    factor = chance.choice((0.0, chance.uniform(1.1, 1.6), chance.uniform(1.1, 1.6)))
    agents.ask("straggler", job_id=chance.choice(job_ids), factor=factor)


def _come_back(coordinator: CoordinatorProcess, agents: Agents, killed_s: float, outcome: Outcome) -> None:
    begun_s = time.monotonic()
    try:
        agents.ask("back", since_s=killed_s, limit_s=_LIMIT_S)
    except GeneratorError as error:
        raise AssertionError(f"{error}; the coordinator: {coordinator.standing()}") from None
    outcome.return_s.append(time.monotonic() - begun_s)


def _end_without_database(coordinator: CoordinatorProcess, outcome: Outcome) -> None:
    """Accept that a coordinator without its server ends by itself with a failure, or waits for the server."""
    deadline_s = time.monotonic() + 2.0
    while coordinator.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.02)
    if coordinator.poll() is not None and "Traceback" in coordinator.log.read_text():
        outcome.problems.append(f"a traceback: {coordinator.log.read_text()[-1000:]}")


def _settle(agents: Agents, restart_counts: Mapping[str, int], outcome: Outcome) -> None:
    """Wait until jobs are planned, compare everything with the messages, and end the jobs."""
    for job_id, restart_count in restart_counts.items():
        agents.ask("straggler", job_id=job_id, factor=0.0)  # stock is not measured while one is known
        try:
            agents.ask("planned", job_id=job_id, limit_s=_LIMIT_S)
        except GeneratorError as error:
            outcome.problems.append(f"{job_id}: {error}")
        outcome.states.append(agents.ask("state", job_id=job_id))
        agents.ask("rest", job_id=job_id, limit_s=_LIMIT_S)
        outcome.problems += report_problems(agents, job_id, restart_count)
        account = agents.ask("account", job_id=job_id)
        outcome.left_out_count += account["expected_count"] - account["counted_count"]
        counts = agents.ask("counts", job_id=job_id)
        outcome.batch_count += counts["acknowledged"]
        outcome.version_count += counts["versions"]
        agents.ask("finish", job_id=job_id)


def check_by_command(database: str) -> list[str]:
    """Return the findings of the coordinator's own check of a database."""
    command = [sys.executable, "-m", "perseus.cli", "coordinator", "--check-store", "--database", database]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    return [] if done.returncode == 0 else [f"store check: {done.stdout}{done.stderr}"]


def torture_sqlite(folder: Path, kill_count: int, seed: int) -> Outcome:
    """Kill a coordinator with a database in a file."""
    return torture(folder, str(folder / "jobs.db"), kill_count, seed, check_store=check_by_command)


def torture_postgresql(folder: Path, kill_count: int, server_kill_count: int, seed: int) -> Outcome:
    """Kill a coordinator whose database is on a server, and the server too."""
    with postgresql.running() as server:
        return torture(
            folder,
            server.new_database(),
            kill_count,
            seed,
            server=KilledServer(server),
            server_kill_count=server_kill_count,
            check_store=check_by_command,
        )


_COLUMNS = (
    *("database", "kills under load", "while it started", "of the server", "batches acknowledged"),
    *(
        "versions offered to ranks",
        "left out",
        "all agents back, median",
        "at most",
        "lost, doubled or reversed",
    ),
)


def _fault_rows(outcomes: Iterable[FaultOutcome]) -> str:
    rows = []
    for each in outcomes:
        message = each.lines[-1].replace("|", "/") if FAULTS[each.name].has_to_end and each.lines else "–"
        message = re.sub(r"/\S+/(?=jobs\.db)", "", message)  # the folder is irrelevant
        ended = "–" if each.status is None else str(each.status)
        problems = "; ".join(each.problems) or "none"
        rows.append(f"| {each.name} | {ended} | {message} | {each.stock_after_s:.1f} s | {problems} |")
    return "\n".join(rows)


def report(outcomes: dict[str, Outcome], faults: Iterable[FaultOutcome], seed: int, took_s: float) -> str:
    """Return the figures as a page."""
    rows = [
        f"| {name} | {each.kill_count} | {each.start_kill_count} | {each.server_kill_count} | "
        f"{each.batch_count} | {each.version_count} | {each.left_out_count} | "
        f"{statistics.median(each.return_s):.2f} s | {max(each.return_s):.2f} s | "
        f"{'; '.join(each.problems) or 'none'} |"
        for name, each in outcomes.items()
    ]
    today, cores = time.strftime("%Y-%m-%d"), os.cpu_count()
    return f"""# Kills, failing databases and attacks: the coordinator

`make torture-coordinator` kills a coordinator under load by SIGKILL at random times and restarts it on the
same database. Every {JOB_EVERY} kills a job of {8 * STAGES} ranks starts and the older of two jobs ends.
Each rank is an agent of its own that reports {1 / PERIOD_S:g} iterations a second. Stragglers come and go,
so plans change. The agents record all messages and fail the run if they find

- an acknowledged batch that is not stored: the test compares Welcome, and the iterations and joules in the
  report, with what was sent;
- a batch counted twice;
- a plan version whose clocks changed, or that is lower than an earlier one;
- another epoch, a refusal, a job that is not planned at the end, or a failed integrity check.

The report leaves out the first iteration under its plans. If a restart follows it, the report leaves out the
next one as well, because the database does not store the plans of the iteration before it. The table counts
these as "left out".

| {" | ".join(_COLUMNS)} |
{"|---" * len(_COLUMNS)}|
{chr(10).join(rows)}

## When the database fails

The same load and a real agent with an emulated GPU, with the database on a small disk of its own. The
coordinator must end with a clear error, or announce by a new epoch that state was lost. The agent must keep
its plan until its lease ends ({LEASE_S:g} s here). Acknowledged data must be there after the fault is
repaired.

| fault | exit status | last line | GPU unlocked after | problems |
|---|---|---|---|---|
{_fault_rows(faults)}

Last run: {today}, {took_s / 60:.0f} minutes, {cores} cores, Python {platform.python_version()}, seed {seed}.
"""


def main(count: int, path: Path | None, seed: int, malformed_count: int) -> None:
    """Kill the coordinator, and write the report."""
    print(f"seed {seed}", flush=True)
    raise_file_limit()
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="perseus-") as folder:
        outcomes = {"SQLite": torture_sqlite(Path(folder), count, seed)}
        if postgresql.MISSING:
            print(postgresql.MISSING)
        else:
            (own := Path(folder) / "postgresql").mkdir()
            outcomes["PostgreSQL"] = torture_postgresql(
                own, round(count * _POSTGRESQL_SHARE), round(count * _SERVER_SHARE), seed
            )
        faults = strike_all(Path(folder))
        took_s = time.monotonic() - begun_s
        (own := Path(folder) / "malformed").mkdir()
        malformed = torture_malformed(own, malformed_count, seed) if malformed_count else None
        hostile = asyncio.run(tenants.torture_tenants(Path(folder), _HOSTILE_S))
    text = f"{report(outcomes, faults, seed, took_s)}\n{tenants.section(hostile, _HOSTILE_S)}"
    if malformed is not None:
        text += f"\n{section(malformed, seed)}"
    print(text)
    if path is not None:
        path.write_text(text)
    problems = [hostile.problems, *(each.problems for each in outcomes.values())]
    problems += [each.problems for each in faults]
    problems += [malformed.problems] if malformed is not None else []
    if any(problems):
        raise SystemExit(1)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("count", type=int)
    arguments.add_argument("report", type=Path, nargs="?")
    arguments.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments.add_argument("--malformed", type=int, default=0)
    given = arguments.parse_args()
    main(given.count, given.report, given.seed, given.malformed)
