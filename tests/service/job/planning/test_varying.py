"""Jobs whose computations vary: plans hold in the mean, on an emulation that replays each iteration."""

import pytest

from benchmarks.varying_work import SHAPES, Training
from perseus.service.domain.model import JobState, PlannedClocks
from perseus.service.job.iterations.variation_memory import MIN_ITERATIONS

PIPELINES = SHAPES["2 pipelines of 2 stages"]


def trained(budget_percent: float, sigma: float = 0.1, iterations: int = 250) -> Training:
    job = Training(PIPELINES, budget_percent, seed=1, sigma=sigma)
    job.join_all()
    job.run(iterations)
    return job


@pytest.mark.usefixtures("stock_beside_plans")
@pytest.mark.parametrize("budget_percent", [0.0, 10.0])
def test_varying_microbatches_slow_no_job(budget_percent: float) -> None:
    """Plans on mean times are 3 % slower than promised."""
    job = trained(budget_percent)
    planned = [ran for ran in job.truth[60:] if ran.is_planned]
    assert len(planned) > 100
    slowdown = sum(ran.time_s for ran in planned) / sum(ran.stock_s for ran in planned) - 1
    saved = 1 - sum(ran.energy_j for ran in planned) / sum(ran.stock_j for ran in planned)
    assert slowdown < budget_percent / 100 + 0.01
    assert saved > 0.03
    assert job.machine.record.state is JobState.PLANNED


def test_the_plan_predicts_by_how_much_iterations_that_vary_are_slower() -> None:
    job = trained(10.0)
    planned = [ran for ran in job.truth[60:] if ran.is_planned]
    slower_s = sum(ran.time_s - ran.stock_s for ran in planned) / len(planned)
    clocks, frontier = job.machine.run.offers[0].clocks, job.machine.run.planner.frontier
    assert isinstance(clocks, PlannedClocks)
    assert frontier is not None
    stock_s = frontier.baseline.iteration_time_s
    assert clocks.plan.iteration_time_s - stock_s == pytest.approx(slower_s, abs=0.01 * stock_s)


def test_after_a_restart_the_plan_stays_until_the_variation_is_known_again() -> None:
    job = trained(0.0, iterations=120)
    before = job.machine.run.offers[0].clocks
    assert isinstance(before, PlannedClocks)
    job.restart()
    for rank in job.ranks.values():
        job.send(rank.joined())
    for _ in range(MIN_ITERATIONS):
        job.run()
        clocks = job.machine.run.offers[0].clocks
        assert isinstance(clocks, PlannedClocks)
        assert clocks.plan.clocks_mhz == before.plan.clocks_mhz
    job.run(MIN_ITERATIONS)
    after = job.machine.run.offers[0].clocks
    assert isinstance(after, PlannedClocks)
    assert after.plan.clocks_mhz != before.plan.clocks_mhz, "it is made for the latest iterations"
    assert after.plan.iteration_time_s == pytest.approx(before.plan.iteration_time_s, rel=0.01)
