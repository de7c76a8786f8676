"""Cost of one batch of telemetry in a job's state machine, by state, for jobs of 4,096 and of 8 ranks.

Every rank reports every iteration once, so work per iteration of the whole job is shared by as many batches
as the job has ranks. `benchmarks.coordinator_load` includes sockets, store and translation.
"""

import time
from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from benchmarks.harness import Cell, Column, Table, main
from perseus.service.domain.commands import Command, Solve, Store
from perseus.service.domain.inputs import FinishRequested, Input, SolveFailed, TelemetryArrived
from perseus.service.domain.model import JobState
from perseus.service.job.rules import Rules
from tests.service.service_fakes import Cluster, make_spec

STAGES = 4
MICROBATCHES = 10
SMALL, LARGE = 8, 4096
"""Ranks."""

_ITERATIONS = 4
"""Iterations measured in each state that lasts."""

_SMALL_JOBS = 32
"""Jobs of 8 ranks: one alone sends too few batches for a measurement."""


class TimedCluster(Cluster):
    """Times the machine for each batch of telemetry, without any checks."""

    def __init__(self, rank_count: int, job_id: str = "job") -> None:
        spec = make_spec(job_id, rank_count // STAGES, STAGES, microbatches=MICROBATCHES)
        super().__init__(spec, Rules(baseline_iterations=3, profile_iterations=3, profile_clocks=2))
        self.seconds: dict[JobState, list[float]] = defaultdict(list)
        self.is_solving_allowed = True
        self.waiting: list[Command] = []

    def handle(self, event: Input) -> list[Command]:
        state = self.machine.record.state
        started_s = time.thread_time()
        commands = self.machine.handle(event, self.now_s, self.now_s)
        if isinstance(event, TelemetryArrived):
            self.seconds[state].append(time.thread_time() - started_s)
        return [command for command in commands if not isinstance(command, Store)]

    def carry_out(self, commands: Iterable[Command]) -> None:
        some = list(commands)
        self.waiting += [command for command in some if isinstance(command, Solve)]
        super().carry_out(command for command in some if not isinstance(command, Solve))
        if self.is_solving_allowed:
            problems, self.waiting = self.waiting, []
            super().carry_out(problems)


def _states(rank_count: int) -> dict[JobState, float]:
    """Return the mean seconds of a batch in each state."""
    cluster = TimedCluster(rank_count)
    first, *others = cluster.ranks.values()
    for rank in others:
        cluster.send(rank.joined())
    for _ in range(_ITERATIONS):
        for rank in others:
            rank.begin()
            cluster.send(rank.end(0.8))
    first.iteration = others[0].iteration
    cluster.send(first.joined())
    cluster.is_solving_allowed = False
    while cluster.machine.record.state is not JobState.SOLVING:
        cluster.iterate()
    cluster.iterate(_ITERATIONS)
    cluster.is_solving_allowed = True
    cluster.carry_out([])
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(_ITERATIONS)
    cluster.send(FinishRequested())
    cluster.iterate(_ITERATIONS)

    failing = TimedCluster(rank_count)
    failing.is_solving_allowed = False
    failing.join_all()
    failing.iterate_until(JobState.SOLVING)
    failing.send(SolveFailed("requested by the benchmark"))
    failing.iterate(_ITERATIONS)
    seconds = {**cluster.seconds, JobState.STOCK: failing.seconds[JobState.STOCK]}
    return {state: _mean_of_iterations(some, rank_count) for state, some in seconds.items()}


def _mean_of_iterations(seconds: list[float], rank_count: int) -> float:
    """Return the median over iterations of the mean over ranks."""
    iterations = [seconds[i : i + rank_count] for i in range(0, len(seconds), rank_count)]
    return median(sum(some) / len(some) for some in iterations)


def run() -> list[Table]:
    """Measure both jobs."""
    jobs = [_states(SMALL) for _ in range(_SMALL_JOBS)]
    small = {state: median(job[state] for job in jobs) for state in jobs[0]}
    large = _states(LARGE)
    rows: list[tuple[Cell, ...]] = [
        (state.value, 1e6 * small[state], 1e6 * large[state], large[state] / small[state])
        for state in JobState
        if state in small
    ]
    return [
        Table(
            "One batch of telemetry in the state machine, by state",
            (
                Column("state"),
                Column(f"{SMALL} ranks [µs]", ".0f"),
                Column(f"{LARGE} ranks [µs]", ".0f"),
                Column("ratio", ".2f"),
            ),
            tuple(rows),
            f"{STAGES} stages, {MICROBATCHES} microbatches: 20 computations and one iteration a batch.",
        )
    ]


if __name__ == "__main__":
    main("batch_cost", run)
