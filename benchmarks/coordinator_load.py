"""The number of agents that one coordinator can serve, and its cost per batch beyond that of gRPC.

The coordinator runs in one process, on its own core if there are two. Another process
(`benchmarks.load.generator`) runs thousands of agents, each with its own connection and one batch of 20
computations per rank and second. A third process checks the coordinator's health 50 times a second. In the
same
run, as many agents load a server that only echoes. For one configuration, or for the largest that holds:

    python -m benchmarks.coordinator_load --pipelines 256 --ranks-per-agent 1
    python -m benchmarks.coordinator_load --search

How far that is from the edge, as a ratio to the echo's, and what happens beyond it:

    python -m benchmarks.coordinator_load --pipelines 1024 --ranks-per-agent 8 --edge
    python -m benchmarks.coordinator_load --pipelines 1024 --ranks-per-agent 8 --overload-s 120
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Cell, Column, Table, main, print_upright
from benchmarks.load.control import (
    LOAD_FLAGS,
    Agents,
    CoordinatorProcess,
    GeneratorError,
    LagProbe,
    echo,
    quantile,
    raise_file_limit,
)

MEASURED_S = 20.0
STAGES = 4

_SETTLE_S = 3.0
_CATCH_UP_LIMIT_S = 90.0
_CAUGHT_UP_SHARE = 0.25
"""Largest share of a second's batches that may wait for an acknowledgement."""
_QUIET_S = 3.0
_PLAN_LIMIT_S = 120.0
_REST_LIMIT_S = 120.0
_HOLDS_P99_S = 1.0
_HOLDS_SHARE = 0.99
_SEARCH_TRIES = 3
_EDGE_P99_S = 0.3
_EDGE_STEP = 1.2
_EDGE_STEPS_BELOW = 5
"""Steps below a batch a second from each rank: while profiling, a coordinator holds less."""
_EDGE_MEASURED_S = 6.0
_EDGE_MAX_STEPS = 16
_OVERLOAD = 1.5
_OVERLOAD_MEASURED_S = 10.0
_RECOVERY_LIMIT_S = 60.0
_PROFILING_FLAGS = ("--lease-s", "60", "--profile-clocks", "3", "--profile-iterations", "1000")


@dataclass(frozen=True, slots=True)
class Configuration:
    """Size of the jobs, with 4 stages a pipeline; `straggler_count`: straggler reports to time."""

    pipeline_count: int
    ranks_per_agent: int = 1
    job_count: int = 1
    straggler_count: int = 5
    microbatch_count: int = 10
    measured_s: float = MEASURED_S


CONFIGURATIONS = (
    Configuration(256),
    Configuration(1024),
    Configuration(1024, ranks_per_agent=8),
    Configuration(256, job_count=4, straggler_count=10),
)


@dataclass(slots=True)
class Outcome:
    """The result of a configuration. `figures` is None if its jobs were never planned.

    `behind_s`: time after planning until acknowledgements had caught up; None if they never did.
    """

    figures: dict[str, Any] | None = None
    bare: dict[str, Any] | None = None
    lag_s: list[float] = field(default_factory=list)
    offer_s: list[float] = field(default_factory=list)
    behind_s: float | None = None
    unoffered_count: int = 0
    problems: list[str] = field(default_factory=list)
    late_offer_count: int = 0
    thinned_count: int = 0

    @property
    def holds(self) -> bool:
        """Whether everything was answered in time."""
        figures = self.figures
        return (
            figures is not None
            and not self.problems
            and figures["latency_p99_s"] < _HOLDS_P99_S
            and figures["acknowledged_count"] >= _HOLDS_SHARE * figures["batch_count"]
        )


def measure(wanted: Configuration, *, has_echo: bool = True) -> Outcome:
    """Load a coordinator and the echo server."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="perseus-load-") as name:
        folder = Path(name)
        with CoordinatorProcess(folder, str(folder / "jobs.db")) as coordinator:
            coordinator.start()
            with Agents(coordinator.address) as agents, LagProbe(coordinator.address) as lag:
                try:
                    _load(wanted, coordinator, agents, lag, outcome)
                except GeneratorError as error:
                    outcome.problems.append(str(error))
    if has_echo:
        with echo() as (at, pid), Agents(at) as agents:
            _add(wanted, agents, is_echo=True)
            time.sleep(_SETTLE_S)
            outcome.bare = agents.ask("measure", seconds=min(MEASURED_S, wanted.measured_s), server_pid=pid)
    return outcome


def _load(
    wanted: Configuration,
    coordinator: CoordinatorProcess,
    agents: Agents,
    lag: LagProbe,
    outcome: Outcome,
) -> None:
    job_ids = _add(wanted, agents, is_echo=False)
    for job_id in job_ids:
        agents.ask("planned", job_id=job_id, limit_s=_PLAN_LIMIT_S)
    outcome.behind_s = catch_up(agents, job_ids)
    time.sleep(_SETTLE_S)
    begun_s = time.monotonic()
    outcome.figures = agents.ask("measure", seconds=wanted.measured_s, server_pid=coordinator.pid)
    checks = lag.between(begun_s, time.monotonic())
    outcome.lag_s = [took_s for _, took_s in checks if took_s is not None]
    if len(outcome.lag_s) < len(checks):
        outcome.problems.append(f"{len(checks) - len(outcome.lag_s)} health checks failed")
    for number in range(wanted.straggler_count):
        factor = 1.15 + 0.35 * number / max(1, wanted.straggler_count)
        answer = agents.ask("straggle", job_id=job_ids[0], factor=factor, quiet_s=_QUIET_S)
        outcome.offer_s += answer["offer_s"]
        outcome.late_offer_count += answer["late_count"]
        outcome.unoffered_count += answer["pipeline_count"] - len(answer["offer_s"])
        time.sleep(_SETTLE_S)
        agents.ask("clear", job_id=job_ids[0])
        time.sleep(_SETTLE_S)
    agents.ask("rest", limit_s=_REST_LIMIT_S)
    # What was thinned at the start, while solves took the coordinator's core, is missing in the report.
    thinned = {job_id: agents.ask("thinned", job_id=job_id) for job_id in job_ids}
    outcome.thinned_count = sum(thinned.values())
    outcome.problems += problems(agents, thinned)


def catch_up(agents: Agents, job_ids: list[str]) -> float | None:
    """Wait until batches are acknowledged as they come; return the time, or None if they never are."""
    begun_s = time.monotonic()
    while (took_s := time.monotonic() - begun_s) < _CATCH_UP_LIMIT_S:
        counts = [agents.ask("counts", job_id=job_id) for job_id in job_ids]
        if sum(each["waiting"] for each in counts) <= _CAUGHT_UP_SHARE * sum(
            each["ranks"] for each in counts
        ):
            return took_s
        time.sleep(0.5)
    return None


def problems(agents: Agents, missing_counts: Mapping[str, int]) -> list[str]:
    """Return the coordinator's errors according to paused agents: anything lost, duplicated or retracted.

    Args:
        missing_counts: how many iterations of each job's report may be missing, as `report_problems`.
    """
    found: list[str] = list(agents.ask("findings")["messages"])
    for job_id, missing_count in missing_counts.items():
        found += report_problems(agents, job_id, missing_count)
    return found


def report_problems(agents: Agents, job_id: str, missing_count: int) -> list[str]:
    """Return the differences between a paused job's report and the messages sent.

    `missing_count` iterations may be missing: one per thinned batch, and one per restart, as the report
    leaves out the first one under its plans, and after a restart the next one too.
    """
    found: list[str] = []
    counts = agents.ask("counts", job_id=job_id)
    if counts["waiting"] or counts["acknowledged"] != counts["sent"]:
        found.append(f"{job_id}: not acknowledged: {counts}")
    account = agents.ask("account", job_id=job_id)
    missing = account["expected_count"] - account["counted_count"] + len(account["outside"])
    if not 0 <= missing <= missing_count or account["energy_error"] > 1e-6:
        found.append(f"the report of {job_id} does not agree: {account}")
    return found


def _add(wanted: Configuration, agents: Agents, *, is_echo: bool) -> list[str]:
    job_ids = [f"load-{number}" for number in range(wanted.job_count)]
    for job_id in job_ids:
        agents.ask(
            "add",
            job_id=job_id,
            pipeline_count=wanted.pipeline_count,
            stage_count=STAGES,
            ranks_per_agent=wanted.ranks_per_agent,
            microbatch_count=wanted.microbatch_count,
            is_echo=is_echo,
        )
    return job_ids


def search() -> Table:
    """Find the largest job, a connection per rank, that gets answers in time, by doubling and bisection."""
    rows: list[tuple[Cell, ...]] = []

    def holds(pipeline_count: int) -> bool:
        outcome = measure(Configuration(pipeline_count, straggler_count=0, measured_s=10.0), has_echo=False)
        p99_ms = 1e3 * outcome.figures["latency_p99_s"] if outcome.figures else None
        rows.append((pipeline_count * STAGES, p99_ms, "yes" if outcome.holds else "no"))
        print(rows[-1], *outcome.problems, flush=True)
        return outcome.holds

    highest, lowest_failed = 0, 0
    pipeline_count = 64
    while not lowest_failed and pipeline_count <= 2048:
        if holds(pipeline_count):
            highest = pipeline_count
        else:
            lowest_failed = pipeline_count
        pipeline_count *= 2
    for _ in range(_SEARCH_TRIES if highest and lowest_failed else 0):
        middle = (highest + lowest_failed) // 2
        if holds(middle):
            highest = middle
        else:
            lowest_failed = middle
    return Table(
        f"The most agents of one job that are answered in time: {highest * STAGES}",
        (Column("agents, one rank each"), Column("acknowledged p99 [ms]", ".1f"), Column("holds")),
        tuple(sorted(rows)),
        f"Holds: planned, and acknowledged with a p99 below {_HOLDS_P99_S:g} s.",
    )


def run(configurations: tuple[Configuration, ...] = CONFIGURATIONS) -> list[Table]:
    """Measure all configurations."""
    raise_file_limit()
    rows: list[tuple[Cell, ...]] = []
    for wanted in configurations:
        outcome = measure(wanted)
        print(wanted, *(outcome.problems or ["nothing lost"]), outcome.figures, flush=True)
        rows.append(_row(wanted, outcome))
    return [
        Table(
            "Jobs under load",
            (
                Column("jobs"),
                Column("ranks"),
                Column("agents"),
                Column("behind after planning [s]", ".0f"),
                Column("batches/s", ".0f"),
                Column("acknowledged p50 [ms]", ".1f"),
                Column("p99 [ms]", ".1f"),
                Column("echo p99 [ms]", ".1f"),
                Column("CPU per batch [µs]", ".0f"),
                Column("more than echo [µs]", ".0f"),
                Column("of a core [%]", ".0f"),
                Column("health check p99 [ms]", ".0f"),
                Column("slowest [ms]", ".0f"),
                Column("straggler to offers p99 [ms]", ".0f"),
                Column("pipelines without an offer", ".0f"),
                Column("after their start iteration had begun", ".0f"),
                Column("generator late p99 [ms]", ".1f"),
                Column("thinned"),
                Column("lost, doubled"),
            ),
            tuple(rows),
            "Each agent has its own connection; every rank sends one batch of 20 computations a second "
            "(twice `--microbatches`). "
            "Health checks every 20 ms, from a separate process, measure how long the loop makes callers "
            "wait.",
        )
    ]


def _row(wanted: Configuration, outcome: Outcome) -> tuple[Cell, ...]:
    ranks = wanted.job_count * wanted.pipeline_count * STAGES
    first: tuple[Cell, ...] = (wanted.job_count, ranks, ranks // wanted.ranks_per_agent)
    figures, bare = outcome.figures, outcome.bare
    if figures is None:
        return (*first, *(None,) * 15, "; ".join(outcome.problems))
    cost = 1e6 * figures["server_cpu_s"] / max(1, figures["batch_count"])
    bare_cost = 1e6 * bare["server_cpu_s"] / max(1, bare["batch_count"]) if bare else None
    return (
        *first,
        outcome.behind_s,
        figures["acknowledged_count"] / figures["wall_s"],
        1e3 * figures["latency_p50_s"],
        1e3 * figures["latency_p99_s"],
        1e3 * bare["latency_p99_s"] if bare else None,
        cost,
        cost - bare_cost if bare_cost is not None else None,
        100 * figures["server_cpu_s"] / figures["wall_s"],
        1e3 * quantile(outcome.lag_s, 0.99),
        1e3 * quantile(outcome.lag_s, 1.0),
        1e3 * quantile(outcome.offer_s, 0.99) if outcome.offer_s else None,
        outcome.unoffered_count if outcome.offer_s else None,
        outcome.late_offer_count if outcome.offer_s else None,
        1e3 * figures["lateness_p99_s"],
        outcome.thinned_count,
        "; ".join(outcome.problems)[:200] or "nothing",
    )


def edge(agents: Agents, job_id: str, rank_count: int, server_pid: int, *, is_echo: bool = False) -> float:
    """Return the most batches a second acknowledged, whole, with a p99 below 300 ms; the load stays there."""
    held_per_s = 0.0
    for step in range(_EDGE_MAX_STEPS):
        wanted_per_s = rank_count * _EDGE_STEP ** (step - _EDGE_STEPS_BELOW)
        agents.ask("set_period", job_id=job_id, period_s=rank_count / wanted_per_s)
        # A second try, as other work of the machine may spoil the first.
        before_count = 0 if is_echo else agents.ask("thinned", job_id=job_id)
        tries = (_holds(agents, wanted_per_s, server_pid) for _ in range(2))
        if not any(tries) or (not is_echo and agents.ask("thinned", job_id=job_id) > before_count):
            break
        held_per_s = wanted_per_s
    agents.ask("set_period", job_id=job_id, period_s=rank_count / max(held_per_s, 1.0))
    return held_per_s


def _holds(agents: Agents, wanted_per_s: float, server_pid: int) -> bool:
    time.sleep(_SETTLE_S)
    figures = agents.ask("measure", seconds=_EDGE_MEASURED_S, server_pid=server_pid)
    done_per_s, p99_s = figures["acknowledged_count"] / figures["wall_s"], figures["latency_p99_s"]
    print(f"{done_per_s:.0f} of {wanted_per_s:.0f}/s, p99 {1e3 * p99_s:.0f} ms", flush=True)
    return bool(p99_s < _EDGE_P99_S and done_per_s > 0.95 * wanted_per_s)


def edges(wanted: Configuration) -> Table:
    """Find the edges of the coordinator, with the job under its plan, and of the echo."""
    rank_count = wanted.pipeline_count * STAGES
    with tempfile.TemporaryDirectory(prefix="perseus-load-") as name:
        folder = Path(name)
        with CoordinatorProcess(folder, str(folder / "jobs.db")) as coordinator:
            coordinator.start()
            with Agents(coordinator.address) as agents:
                (job_id,) = _add(wanted, agents, is_echo=False)
                agents.ask("planned", job_id=job_id, limit_s=_PLAN_LIMIT_S)
                catch_up(agents, [job_id])
                held_per_s = edge(agents, job_id, rank_count, coordinator.pid)
    with echo() as (at, pid), Agents(at) as agents:
        (job_id,) = _add(wanted, agents, is_echo=True)
        bare_per_s = edge(agents, job_id, rank_count, pid, is_echo=True)
    return Table(
        "The load at which the p99 of acknowledgements passes 300 ms",
        (
            Column("ranks"),
            Column("agents"),
            Column("coordinator [batches/s]", ".0f"),
            Column("echo [batches/s]", ".0f"),
            Column("echo to coordinator", ".1f"),
            Column("edge to 1 Hz", ".2f"),
        ),
        (
            (
                rank_count,
                rank_count // wanted.ranks_per_agent,
                held_per_s,
                bare_per_s,
                bare_per_s / max(held_per_s, 1.0),
                held_per_s / rank_count,
            ),
        ),
        f"In steps of {_EDGE_STEP:g}; the last that is below.",
    )


def overload(wanted: Configuration, overload_s: float, *, is_profiling: bool) -> Table:
    """Load a coordinator with 1.5 × what it holds, and time its recovery."""
    rank_count = wanted.pipeline_count * STAGES
    rows: list[tuple[Cell, ...]] = []
    flags = _PROFILING_FLAGS if is_profiling else LOAD_FLAGS
    with tempfile.TemporaryDirectory(prefix="perseus-load-") as name:
        folder = Path(name)
        with CoordinatorProcess(folder, str(folder / "jobs.db"), flags) as coordinator:
            coordinator.start()
            with Agents(coordinator.address) as agents, LagProbe(coordinator.address) as lag:
                (job_id,) = _add(wanted, agents, is_echo=False)
                if is_profiling:
                    agents.ask("entered", job_id=job_id, state="JOB_STATE_PROFILING", limit_s=_PLAN_LIMIT_S)
                else:
                    agents.ask("planned", job_id=job_id, limit_s=_PLAN_LIMIT_S)
                catch_up(agents, [job_id])
                held_per_s = edge(agents, job_id, rank_count, coordinator.pid)
                if not held_per_s:
                    raise SystemExit("expected a load that is held, found none")

                def measured(what: str, seconds: float) -> dict[str, Any]:
                    begun_s = time.monotonic()
                    figures: dict[str, Any] = agents.ask(
                        "measure", seconds=seconds, server_pid=coordinator.pid
                    )
                    checks = lag.between(begun_s, time.monotonic())
                    row: tuple[Cell, ...] = (
                        what,
                        figures["batch_count"] / figures["wall_s"],
                        figures["acknowledged_count"] / figures["wall_s"],
                        figures["latency_p50_s"],
                        figures["latency_p99_s"],
                        1e3 * max((took_s for _, took_s in checks if took_s is not None), default=0.0),
                        agents.ask("counts", job_id=job_id)["waiting"],
                        agents.ask("thinned", job_id=job_id),
                    )
                    rows.append(row)
                    print(*row, flush=True)
                    return figures

                measured("before", _OVERLOAD_MEASURED_S)
                agents.ask("set_period", job_id=job_id, period_s=rank_count / (_OVERLOAD * held_per_s))
                ends_s = time.monotonic() + overload_s
                while time.monotonic() < ends_s:
                    measured("overload", _OVERLOAD_MEASURED_S)
                if not is_profiling:
                    answer = agents.ask("straggle", job_id=job_id, factor=1.3, quiet_s=_QUIET_S)
                    print("straggler's offers: p99", quantile(answer["offer_s"], 0.99), flush=True)
                agents.ask("set_period", job_id=job_id, period_s=rank_count / held_per_s)
                begun_s = time.monotonic()
                while time.monotonic() - begun_s < _RECOVERY_LIMIT_S:
                    figures = measured(f"after {time.monotonic() - begun_s:.0f} s", 2.0)
                    if figures["latency_p99_s"] < _EDGE_P99_S:
                        break
    return Table(
        f"{_OVERLOAD:g} × {held_per_s:.0f} batches/s in {'PROFILING' if is_profiling else 'PLANNED'}",
        (
            Column("when"),
            Column("sent [batches/s]", ".0f"),
            Column("acknowledged [batches/s]", ".0f"),
            Column("p50 [s]", ".2f"),
            Column("p99 [s]", ".2f"),
            Column("slowest health check [ms]", ".0f"),
            Column("waiting"),
            Column("thinned"),
        ),
        tuple(rows),
        "",
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--pipelines", type=int)
    arguments.add_argument("--ranks-per-agent", type=int, default=1)
    arguments.add_argument("--jobs", type=int, default=1)
    arguments.add_argument("--microbatches", type=int, default=10, help="half a batch's computations")
    arguments.add_argument("--stragglers", type=int, default=5)
    arguments.add_argument("--seconds", type=float, default=MEASURED_S)
    arguments.add_argument("--search", action="store_true")
    arguments.add_argument("--edge", action="store_true")
    arguments.add_argument("--overload-s", type=float)
    given = arguments.parse_args()
    if given.search:
        raise_file_limit()
        print_upright([search()])
    elif given.pipelines:
        one = Configuration(
            given.pipelines,
            given.ranks_per_agent,
            given.jobs,
            given.stragglers,
            given.microbatches,
            given.seconds,
        )
        raise_file_limit()
        if given.edge:
            print_upright([edges(one)])
        elif given.overload_s:
            for is_profiling in (False, True):
                print_upright([overload(one, given.overload_s, is_profiling=is_profiling)])
        else:
            print_upright(run((one,)))
    else:
        main("coordinator_load", run)
