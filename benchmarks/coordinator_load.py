"""How many agents one coordinator serves, and what a batch costs it beyond what gRPC costs.

A coordinator in one process, on a core of its own where there are two; agents by the thousand in another
(`benchmarks.load.generator`), each with its own connection and one batch of 20 computations per rank and
second. The same agents load a server that only echoes, in the same run. For one configuration alone:

    python -m benchmarks.coordinator_load --pipelines 256 --ranks-per-agent 1
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import Cell, Column, Table, main
from benchmarks.load.generator import Figures, Task

CONFIGURATIONS = ((32, 1), (128, 1), (256, 1))
"""Pipelines of 4 stages, and ranks per agent."""

_LIMIT_S = 900


def _on_core(number: int) -> list[str]:
    """What pins a command to a core, where there is another for the rest."""
    return ["taskset", "-c", str(number)] if (os.cpu_count() or 1) > 1 else []


@contextmanager
def coordinator(folder: Path) -> Iterator[tuple[str, int]]:
    """Run a coordinator; its address and process."""
    command = [
        *_on_core(0), sys.executable, "-m", "perseus.cli", "coordinator", "--listen", "127.0.0.1:0",
        "--database", str(folder / "jobs.db"), "--lease-s", "60", "--profile-clocks", "2",
        "--guard-tolerance-percent", "1000",
    ]  # fmt: skip
    log = (folder / "coordinator.log").open("w")
    process = subprocess.Popen([*command, "--log-format", "json"], stdout=log, stderr=log)
    try:
        yield _address(folder / "coordinator.log", process), process.pid
    finally:
        process.terminate()
        process.wait(30)


def _address(log: Path, process: "subprocess.Popen[bytes]") -> str:
    while process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("{") and "address" in (found := json.loads(line)):
                return str(found["address"])
    raise RuntimeError(f"the coordinator did not start: {log.read_text()}")


@contextmanager
def echo() -> Iterator[tuple[str, int]]:
    """Run the server that only echoes; its address and process."""
    command = [*_on_core(0), sys.executable, "-m", "benchmarks.load.echo"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.terminate()
        process.wait(30)


def load(task: Task) -> Figures:
    """Load a server from a process of its own."""
    command = [*_on_core(1), sys.executable, "-m", "benchmarks.load.generator", json.dumps(asdict(task))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_LIMIT_S)
    return Figures(**json.loads(done.stdout))


def measure(pipeline_count: int, ranks_per_agent: int) -> tuple[Figures, Figures]:
    """Load a coordinator, and the echo."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with (
        tempfile.TemporaryDirectory(prefix="perseus-load-") as folder,
        coordinator(Path(folder)) as (at, pid),
    ):
        loaded = load(
            Task(at, pid, False, pipeline_count, ranks_per_agent=ranks_per_agent, straggler_count=5)
        )
    with echo() as (at, pid):
        echoed = load(Task(at, pid, True, pipeline_count, ranks_per_agent=ranks_per_agent))
    return loaded, echoed


def run(configurations: tuple[tuple[int, int], ...] = CONFIGURATIONS) -> list[Table]:
    """Measure all configurations."""
    rows: list[tuple[Cell, ...]] = []
    for pipelines, ranks_per_agent in configurations:
        loaded, echoed = measure(pipelines, ranks_per_agent)
        cost, bare = (1e6 * f.server_cpu_s / max(1, f.batch_count) for f in (loaded, echoed))
        answers = sorted(loaded.straggler_answer_s)
        rows.append(
            (
                loaded.rank_count,
                loaded.agent_count,
                loaded.batch_count / loaded.wall_s,
                1e3 * loaded.latency_p50_s,
                1e3 * loaded.latency_p99_s,
                cost,
                cost - bare,
                100 * loaded.server_cpu_s / loaded.wall_s,
                1e3 * answers[-1] if answers else None,
                1e3 * loaded.lateness_p99_s,
            )
        )
    return [
        Table(
            "One job under load",
            (
                Column("ranks"),
                Column("agents"),
                Column("batches/s", ".0f"),
                Column("acknowledged p50 [ms]", ".1f"),
                Column("p99 [ms]", ".1f"),
                Column("CPU per batch [µs]", ".0f"),
                Column("beyond echo [µs]", ".0f"),
                Column("of a core [%]", ".0f"),
                Column("straggler answered, slowest of 5 [ms]", ".0f"),
                Column("generator late p99 [ms]", ".1f"),
            ),
            tuple(rows),
            "Each agent has its own connection; every rank sends one batch of 20 computations a second.",
        )
    ]


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--pipelines", type=int)
    arguments.add_argument("--ranks-per-agent", type=int, default=1)
    given = arguments.parse_args()
    if given.pipelines:
        for table in run(((given.pipelines, given.ranks_per_agent),)):
            for column, cell in zip(table.columns, table.rows[0], strict=True):
                print(f"{column.name:40} {format(cell, column.form) if cell is not None else '–'}")
    else:
        main("coordinator_load", run)
