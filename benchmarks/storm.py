"""Restart of a killed coordinator: all its agents return within a second.

SIGKILL under load, then a start on the same database and port. Every agent tries to connect after random
delays of at most a second, joins, and resends every unacknowledged batch. `--pipelines 1024` for one size
alone.
"""

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.coordinator_load import STAGES, catch_up, problems
from benchmarks.harness import Cell, Column, Table, main, print_upright
from benchmarks.load.control import (
    Agents,
    CoordinatorProcess,
    GeneratorError,
    LagProbe,
    quantile,
    raise_file_limit,
)

PIPELINES = (256, 1024)

_PLAN_LIMIT_S = 180.0
_BACK_LIMIT_S = 180.0
_REST_LIMIT_S = 120.0
_FIRST_S = 1.0
_WATCHED_S = 10.0
"""How long the lag is measured after all are back."""


def storm(pipeline_count: int, ranks_per_agent: int = 1) -> tuple[Cell, ...]:
    """Kill and restart once with a number of pipelines of 4 stages; return a row of the table."""
    try:
        return _storm(pipeline_count, ranks_per_agent)
    except GeneratorError as error:
        return (pipeline_count * STAGES // ranks_per_agent, *(None,) * 7, str(error))


def _storm(pipeline_count: int, ranks_per_agent: int) -> tuple[Cell, ...]:
    with tempfile.TemporaryDirectory(prefix="perseus-storm-") as name:
        folder = Path(name)
        with CoordinatorProcess(folder, str(folder / "jobs.db")) as coordinator:
            coordinator.start()
            with Agents(coordinator.address) as agents, LagProbe(coordinator.address) as lag:
                agents.ask(
                    "add",
                    job_id="storm",
                    pipeline_count=pipeline_count,
                    stage_count=STAGES,
                    ranks_per_agent=ranks_per_agent,
                )
                agents.ask("planned", job_id="storm", limit_s=_PLAN_LIMIT_S)
                if catch_up(agents, ["storm"]) is None:
                    raise GeneratorError("batches are not acknowledged as fast as they come")
                killed_s = time.monotonic()
                coordinator.kill()
                coordinator.start()
                listening_s = time.monotonic()
                back = agents.ask("back", since_s=killed_s, limit_s=_BACK_LIMIT_S)
                time.sleep(_WATCHED_S)
                checks = lag.between(listening_s, time.monotonic())
                agents.ask("rest", limit_s=_REST_LIMIT_S)
                found = problems(agents, {"storm": 1})
    down_s = listening_s - killed_s
    first = [took_s for begun_s, took_s in checks if took_s and begun_s < listening_s + _FIRST_S]
    later = [took_s for begun_s, took_s in checks if took_s and begun_s >= listening_s + _FIRST_S]
    failed_count = sum(took_s is None and begun_s >= listening_s + _FIRST_S for begun_s, took_s in checks)
    if failed_count:
        found.append(f"{failed_count} health checks failed after the first second")
    return (
        pipeline_count * STAGES // ranks_per_agent,
        down_s,
        *(back[name] - down_s for name in ("connected_s", "welcomed_s", "joined_s", "resent_s")),
        1e3 * quantile(first, 1.0),
        1e3 * quantile(later, 1.0),
        "; ".join(found)[:300] or "nothing",
    )


def run(pipeline_counts: tuple[int, ...] = PIPELINES, ranks_per_agent: int = 1) -> list[Table]:
    """Run one storm of each size."""
    raise_file_limit()
    return [
        Table(
            "All agents at once",
            (
                Column("agents"),
                Column("killed to listening [s]", ".1f"),
                Column("then all connected [s]", ".1f"),
                Column("welcomed [s]", ".1f"),
                Column("joined [s]", ".1f"),
                Column("resent, acknowledged [s]", ".1f"),
                Column("slowest health check, first second [ms]", ".0f"),
                Column("after it [ms]", ".0f"),
                Column("lost, doubled"),
            ),
            tuple(storm(count, ranks_per_agent) for count in pipeline_counts),
            f"{ranks_per_agent} to an agent, 1 Hz, one job under its plan; seconds count from listening.",
        )
    ]


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--pipelines", type=int)
    arguments.add_argument("--ranks-per-agent", type=int, default=1)
    given = arguments.parse_args()
    if given.pipelines:
        print_upright(run((given.pipelines,), given.ranks_per_agent))
    else:
        main("storm", run)
