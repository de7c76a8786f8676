"""`make torture-coordinator`: kill a coordinator many times under load, and check for losses.

python -m tests.torture.coordinator COUNT [REPORT] [--malformed COUNT]

Agents load it from another process (`benchmarks.load`), and record all messages that they receive. The
process is killed by SIGKILL at random times: while jobs are measured, profiled and planned, while stragglers
come and go, and while it starts. After that come malformed messages.
"""

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.coordinator_load import report_problems
from benchmarks.load.control import Agents, GeneratorError, raise_file_limit
from perseus.demo.processes import Coordinator
from tests.processes import tails
from tests.service.storage import postgresql
from tests.torture.malformed import publish_malformed, torture_malformed
from tests.torture.report import last_run, publish

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
_POSTGRESQL_SHARE, _SERVER_SHARE = 0.25, 0.1
"""Shares of the number of kills: those repeated on PostgreSQL, and those of its server."""


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
    server: postgresql.Server | None = None,
    server_kill_count: int = 0,
) -> Outcome:
    """Kill the coordinator of a database repeatedly, and compare its state with its messages.

    Args:
        database: the value of `--database`.
        server: its server, which is killed `server_kill_count` times in between.
    """
    chance = random.Random(seed)
    outcome = Outcome()
    # Kills that include the server, spread evenly.
    server_kills = {round((n + 0.5) * kill_count / server_kill_count) for n in range(server_kill_count)}
    with Coordinator(folder, database, *FLAGS) as coordinator:
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
                    restart_counts[_add(agents, number)] = 0
                _nudge(agents, list(restart_counts), chance)
                time.sleep(chance.uniform(0.0, _MAX_DELAY_S))
                if server is not None and number in server_kills:
                    server.kill()
                    outcome.server_kill_count += 1
                    _end_without_database(coordinator, outcome)
                    server.start_again()
                killed_s = time.monotonic()
                coordinator.kill()
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
    outcome.problems += check_by_command(database)
    return outcome


def _add(agents: Agents, number: int) -> str:
    job_id = f"torture-{number}"
    agents.ask(
        "add",
        job_id=job_id,
        pipeline_count=8,
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


def _come_back(coordinator: Coordinator, agents: Agents, killed_s: float, outcome: Outcome) -> None:
    begun_s = time.monotonic()
    try:
        agents.ask("back", since_s=killed_s, limit_s=_LIMIT_S)
    except GeneratorError as error:
        raise AssertionError(f"{error}; the coordinator: {tails(coordinator.log.parent)}") from None
    outcome.return_s.append(time.monotonic() - begun_s)


def _end_without_database(coordinator: Coordinator, outcome: Outcome) -> None:
    """Accept that a coordinator without its server ends by itself with a failure, or waits for the server."""
    with suppress(subprocess.TimeoutExpired):
        coordinator.wait(2.0)
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


_COLUMNS = (
    *("database", "kills under load", "while it started", "of the server", "batches acknowledged"),
    *("versions offered to ranks", "left out", "all agents back, median", "at most"),
    "lost, doubled or reversed",
)


def _row(name: str, outcome: Outcome) -> tuple[object, ...]:
    return (
        *(name, outcome.kill_count, outcome.start_kill_count, outcome.server_kill_count),
        *(outcome.batch_count, outcome.version_count, outcome.left_out_count),
        *(f"{statistics.median(outcome.return_s):.2f} s", f"{max(outcome.return_s):.2f} s"),
        "; ".join(outcome.problems) or "none",
    )


def main(count: int, page: Path | None, seed: int, malformed_count: int) -> None:
    """Kill the coordinator, and write the report."""
    print(f"seed {seed}", flush=True)
    raise_file_limit()
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="perseus-") as folder:
        outcomes = {"SQLite": torture(Path(folder), f"{folder}/jobs.db", count, seed)}
        if postgresql.MISSING:
            print(postgresql.MISSING)
        else:
            (own := Path(folder) / "postgresql").mkdir()
            kill_count, server_kill_count = round(count * _POSTGRESQL_SHARE), round(count * _SERVER_SHARE)
            with postgresql.running() as server:
                outcomes["PostgreSQL"] = torture(
                    own, server.new_database(), kill_count, seed, server, server_kill_count
                )
        heading = "# Kills and malformed messages: the coordinator"
        rows = [_row(name, outcome) for name, outcome in outcomes.items()]
        publish(page, heading, _COLUMNS, rows, last_run(time.monotonic() - begun_s, seed))
        problems = [outcome.problems for outcome in outcomes.values()]
        if malformed_count:
            (own := Path(folder) / "malformed").mkdir()
            malformed = torture_malformed(own, malformed_count, seed)
            publish_malformed(page, malformed, seed)
            problems.append(malformed.problems)
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
