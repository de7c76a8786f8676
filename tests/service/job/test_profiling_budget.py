"""Profiling keeps its budget and states why it makes no progress, whatever the agents report.

Iterations take the time of the clocks that are really in force. Their cost beyond stock is added up here, not
taken from reports.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.model import HoldClocks, JobState
from perseus.service.domain.specification import Coordinates
from perseus.service.job.profiling.profiler import HOLD_LIMIT
from perseus.service.job.progress import NO_PROGRESS_ITERATIONS, NO_PROGRESS_TIMEOUT_S
from perseus.service.job.rules import Rules
from tests.service.job.troubled_cluster import SPOILS, Spoil, TroubledCluster, without_estimate
from tests.service.service_fakes import CLOCKS_MHZ, make_spec

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


class CostlyCluster(TroubledCluster):
    """A cluster whose cost of profiling is added up; `stuck_s` is the time since the last step."""

    def __init__(self) -> None:
        rules = Rules(baseline_iterations=2, profile_iterations=ITERATIONS, profile_budget_extra_s=BUDGET_S)
        super().__init__(rules.model_copy(update={"lease_s": 1e9}))
        self.join_all()
        self.extra_s = 0.0
        self.stuck_s = 0.0
        self.mark: object = None

    def iteration_time_s(self) -> float:
        clocks = [rank.in_force.clocks for rank in self.ranks.values()]
        held_mhz = [mhz for some in clocks if isinstance(some, HoldClocks) for mhz in some.clocks_mhz]
        duration_s = max(map(iteration_time_s, held_mhz), default=STOCK_S)
        if self.machine.record.state is JobState.PROFILING:
            self.extra_s += duration_s - STOCK_S
        return duration_s

    def run(self, count: int = 1) -> None:
        for _ in range(count):
            begun_s = self.now_s
            super().run()
            self.check_stall(self.now_s - begun_s)

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


phases = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(PLACES), st.sampled_from([*SPOILS, None]), max_size=4),
        st.integers(1, 40),
    ),
    min_size=1,
    max_size=6,
)
"""How some ranks spoil their reports (None: they send none), and for how many iterations."""


@pytest.mark.slow("each of hundreds of emulated iterations is handled second by second")
@given(phases=phases, honest_at_first=st.booleans())
def test_the_extra_time_stays_within_its_budget_for_any_reports(
    phases: list[tuple[dict[Coordinates, Spoil | None], int]], honest_at_first: bool
) -> None:
    cluster = CostlyCluster()
    if honest_at_first:
        cluster.run_until(JobState.PROFILING)
    for spoiling, count in phases:
        cluster.spoiling = {place: spoil for place, spoil in spoiling.items() if spoil is not None}
        cluster.silent = spoiling.keys() - cluster.spoiling.keys()
        cluster.run(count)
    assert cluster.extra_s <= BUDGET_S + ROUND_S
    assert cluster.machine.run.profiler.cost.extra_time_s <= BUDGET_S + ROUND_S


def test_unreported_iterations_count_as_well() -> None:
    cluster = CostlyCluster()
    while not cluster.machine.run.profiler.profiles:
        cluster.run()
    cluster.spoiling[PLACES[-1]] = without_estimate
    for number in range(100):
        cluster.silent = PLACES[-1:] if number % 2 else ()
        cluster.run()
    cluster.expect(JobState.STOCK)
    assert cluster.machine.run.profiler.cost.extra_time_s == pytest.approx(cluster.extra_s)
    assert cluster.extra_s <= BUDGET_S + 3 * (SLOWEST_S - STOCK_S)
