"""Whether a coordinator's memory, files, threads and database stay constant while jobs come and go.

One job stays, and small ones begin and end beside it all the time. The process is sampled every few seconds,
and a
line is fitted to the samples after the warm-up:

    python -m benchmarks.soak --minutes 20 --ranks 1024
"""

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.coordinator_load import STAGES
from benchmarks.harness import Cell, Column, Table, main, print_upright
from benchmarks.load.control import LOAD_FLAGS, Agents, CoordinatorProcess, raise_file_limit

MINUTES = 20.0
RANKS = 1024

_FLAGS = (*LOAD_FLAGS, "--keep-finished-count", "100")
"""Number of ended jobs that are kept: it is reached within the warm-up."""

_SMALL_PIPELINES = 4
_STAYING_SHARE = 0.5
_SAMPLE_S = 2.0
_WARM_UP_SHARE = 0.3
_REST_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The process's resources at one time."""

    time_s: float
    resident_mb: float
    file_count: int
    thread_count: int
    database_mb: float
    log_mb: float


def sample(pid: int, database: Path) -> Sample:
    """Sample a process and its database."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    log = database.with_name(database.name + "-wal")
    return Sample(
        time.monotonic(),
        int(status["VmRSS"].split()[0]) / 1024,
        len(list(Path(f"/proc/{pid}/fd").iterdir())),
        int(status["Threads"]),
        database.stat().st_size / 2**20,
        log.stat().st_size / 2**20 if log.exists() else 0.0,
    )


def soak(minutes: float, rank_count: int) -> tuple[list[Sample], int, list[str]]:
    """Load a coordinator for some minutes. Return the samples, the number of ended jobs, and any errors."""
    staying = max(1, round(_STAYING_SHARE * rank_count / STAGES))
    small_count = max(1, round((1 - _STAYING_SHARE) * rank_count / STAGES / _SMALL_PIPELINES))
    samples: list[Sample] = []
    live: list[str] = []
    ended = 0
    with tempfile.TemporaryDirectory(prefix="perseus-soak-") as name:
        database = Path(name) / "jobs.db"
        with CoordinatorProcess(Path(name), str(database), _FLAGS) as coordinator:
            coordinator.start()
            with Agents(coordinator.address) as agents:
                agents.ask("add", job_id="staying", pipeline_count=staying)
                ends_s = time.monotonic() + 60 * minutes
                next_sample_s = time.monotonic()
                while time.monotonic() < ends_s:
                    if len(live) >= small_count:
                        agents.ask("rest", limit_s=_REST_LIMIT_S, job_id=live[0])
                        agents.ask("finish", job_id=live.pop(0))
                        ended += 1
                    live.append(f"small-{ended + len(live)}")
                    agents.ask("add", job_id=live[-1], pipeline_count=_SMALL_PIPELINES)
                    if time.monotonic() >= next_sample_s:
                        samples.append(sample(coordinator.pid, database))
                        print(samples[-1], flush=True)
                        next_sample_s = time.monotonic() + _SAMPLE_S
                    time.sleep(0.5)
                found = agents.ask("findings")["messages"]
    return samples, ended, found


def slope_per_hour(times_s: list[float], values: list[float]) -> float:
    """Return the slope per hour of a line through the values."""
    return float(3600 * np.polyfit(times_s, values, 1)[0])


def run(minutes: float = MINUTES, rank_count: int = RANKS) -> list[Table]:
    """Run one soak."""
    raise_file_limit()
    samples, ended_count, found = soak(minutes, rank_count)
    after = samples[round(_WARM_UP_SHARE * len(samples)) :]
    times_s = [each.time_s for each in after]
    rows: list[tuple[Cell, ...]] = []
    for name, attribute in (
        ("resident memory [MB]", "resident_mb"),
        ("open files", "file_count"),
        ("threads", "thread_count"),
        ("database [MB]", "database_mb"),
        ("its log [MB]", "log_mb"),
    ):
        values = [float(getattr(each, attribute)) for each in after]
        half = len(values) // 2
        rows.append(
            (
                name,
                values[0],
                values[-1],
                max(values),
                float(np.mean(values[half:]) - np.mean(values[:half])),
                slope_per_hour(times_s, values),
            )
        )
    return [
        Table(
            f"{minutes:g} minutes of {rank_count} ranks, {ended_count} jobs ended",
            (
                Column("held"),
                Column("after warm-up", ".1f"),
                Column("at the end", ".1f"),
                Column("maximum", ".1f"),
                Column("second half above the first", ".2f"),
                Column("rise per hour", ".1f"),
            ),
            tuple(rows),
            "Half of the ranks are in a job that stays, the others in jobs of "
            f"{_SMALL_PIPELINES * STAGES} that begin and end; a connection each, 1 Hz. The first "
            f"{100 * _WARM_UP_SHARE:.0f} % is warm-up. Lost, retracted or refused: "
            f"{'; '.join(found) or 'nothing'}.",
        )
    ]


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--minutes", type=float)
    arguments.add_argument("--ranks", type=int, default=RANKS)
    given = arguments.parse_args()
    if given.minutes:
        print_upright(run(given.minutes, given.ranks))
    else:
        main("soak", run)
