"""Profiling keeps its budget and states why it makes no progress, whatever the agents report.

Iterations take the time of the clocks that are really in force. Their cost beyond stock is added up here, not
taken from reports.
"""

import enum
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.inputs import TelemetryArrived, Tick
from perseus.service.domain.model import HoldClocks, JobState
from perseus.service.domain.specification import Coordinates
from perseus.service.job.profiling.profiler import HOLD_LIMIT
from perseus.service.job.progress import NO_PROGRESS_ITERATIONS, NO_PROGRESS_TIMEOUT_S
from perseus.service.job.rules import Rules
from tests.service.service_fakes import CLOCKS_MHZ, Cluster, FakeRank, make_spec

STOCK_S = 0.8
BUDGET_S = 20.0
ITERATIONS = 2
PLACES = list(make_spec().parallelism.all_coordinates())


def iteration_time_s(clock_mhz: int) -> float:
    """At the lowest clock five times as long as at the highest, which is also that of stock."""
    below = (CLOCKS_MHZ[0] - (clock_mhz or CLOCKS_MHZ[0])) / (CLOCKS_MHZ[0] - CLOCKS_MHZ[-1])
    return STOCK_S * (1 + 4 * below)


SLOWEST_S = iteration_time_s(CLOCKS_MHZ[-1])
ROUND_S = HOLD_LIMIT * ITERATIONS * (SLOWEST_S - STOCK_S)
NO_PROGRESS_S = 2 * max(NO_PROGRESS_TIMEOUT_S, (NO_PROGRESS_ITERATIONS + ITERATIONS) * SLOWEST_S)
"""After this time without a step a job needs a reason; a reason may take its timeout twice."""


class Conduct(enum.Enum):
    """How a rank treats its telemetry."""

    HONEST = "reports everything"
    NO_ESTIMATE = "sends no estimates"
    NO_ENERGY = "reports that computations cost nothing"
    IRREGULAR = "reports irregular iterations"
    OTHER_VERSION = "reports versions that were never offered"
    REPEATING = "repeats the same iteration"
    SILENT = "reports nothing"


class Misbehaving(Cluster):
    """A cluster whose ranks may report anything, but follow offers."""

    def __init__(self) -> None:
        rules = Rules(baseline_iterations=2, profile_iterations=ITERATIONS, profile_budget_extra_s=BUDGET_S)
        super().__init__(make_spec(), rules.model_copy(update={"lease_s": 1e9}))
        self.conduct = dict.fromkeys(PLACES, Conduct.HONEST)
        self.extra_s = 0.0
        self.stuck_s = 0.0
        self.mark: object = None

    def run(self) -> None:
        """Run an iteration, and add up its cost under held clocks while profiling."""
        for rank in self.ranks.values():
            in_force = rank.begin()
            if in_force is not None:
                self.send(in_force)
        clocks = [rank.in_force.clocks for rank in self.ranks.values()]
        held_mhz = [mhz for some in clocks if isinstance(some, HoldClocks) for mhz in some.clocks_mhz]
        duration_s = max(map(iteration_time_s, held_mhz), default=STOCK_S)
        if self.machine.record.state is JobState.PROFILING:
            self.extra_s += duration_s - STOCK_S
        self.pass_time(duration_s)
        for rank in self.ranks.values():
            self.report(rank, duration_s)
        self.check_stall(duration_s)

    def run_until(self, state: JobState) -> None:
        while self.machine.record.state is not state:
            self.run()

    def pass_time(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + 1.0)
            self.send(Tick())

    def report(self, rank: FakeRank, duration_s: float) -> None:
        event, conduct = rank.end(duration_s), self.conduct[rank.place]
        batch, rows = event.batch, event.batch.iterations
        match conduct:
            case Conduct.NO_ESTIMATE:
                batch = batch._replace(energy=None)
            case Conduct.NO_ENERGY if batch.energy is not None:
                samples = tuple(replace(sample, energy_j=0.0) for sample in batch.energy.samples)
                batch = batch._replace(energy=replace(batch.energy, samples=samples))
            case Conduct.IRREGULAR:
                rows = rows._replace(is_regular=[False])
            case Conduct.OTHER_VERSION:
                rows = rows._replace(plan_version=[4711])
            case Conduct.REPEATING:
                rows = rows._replace(iteration=[0])
                again = [0] * len(batch.computations.iteration)
                batch = batch._replace(computations=batch.computations._replace(iteration=again))
        if conduct is not Conduct.SILENT:
            reported = batch._replace(iterations=rows)
            self.send(TelemetryArrived(rank.place, rank.instance_id, reported))

    def check_stall(self, duration_s: float) -> None:
        """Check that a state without progress has a reason; renewed progress counts as a step."""
        machine = self.machine
        is_stalled = machine.run.progress.stall is not None
        mark = machine.record.state, machine.run.profiler.profiles, machine.record.given_up_clocks, is_stalled
        has_use = machine.record.state not in (JobState.PLANNED, JobState.STOCK, JobState.FINISHED)
        self.stuck_s = self.stuck_s + duration_s if mark == self.mark and has_use else 0.0
        self.mark = mark
        if self.stuck_s > NO_PROGRESS_S:
            assert is_stalled, f"no stall is announced after {self.stuck_s} s in {machine.record.state}"


conducts = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(PLACES), st.sampled_from(Conduct), max_size=4),
        st.integers(1, 40),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow("each of hundreds of emulated iterations is handled second by second")
@given(phases=conducts, honest_at_first=st.booleans())
def test_the_extra_time_stays_within_its_budget_for_any_reports(
    phases: list[tuple[dict[Coordinates, Conduct], int]], honest_at_first: bool
) -> None:
    cluster = Misbehaving()
    cluster.join_all()
    if honest_at_first:
        cluster.run_until(JobState.PROFILING)
    for conduct, count in phases:
        cluster.conduct = dict.fromkeys(PLACES, Conduct.HONEST) | conduct
        for _ in range(count):
            cluster.run()
    assert cluster.extra_s <= BUDGET_S + ROUND_S
    cost = cluster.machine.run.profiler.cost
    assert cost.extra_time_s <= BUDGET_S + ROUND_S


def test_unreported_iterations_count_as_well() -> None:
    cluster = Misbehaving()
    cluster.join_all()
    while not cluster.machine.run.profiler.profiles:
        cluster.run()
    for number in range(100):
        cluster.conduct[PLACES[-1]] = Conduct.SILENT if number % 2 else Conduct.NO_ESTIMATE
        cluster.run()
    cluster.expect(JobState.STOCK)
    assert cluster.machine.run.profiler.cost.extra_time_s == pytest.approx(cluster.extra_s)
    assert cluster.extra_s <= BUDGET_S + 3 * (SLOWEST_S - STOCK_S)
