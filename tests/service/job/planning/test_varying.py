"""Jobs whose computations vary: plans hold in the mean, on an emulation that replays each iteration."""

import numpy as np
import pytest

from benchmarks.varying_work import SHAPES, Array, Training
from perseus.service.domain.commands import SendOffer
from perseus.service.domain.inputs import BudgetTargetSet, PolicySet
from perseus.service.domain.model import JobState, PlannedClocks
from perseus.service.domain.specification import Deadline, OperatingPolicy
from perseus.service.job.iterations.variation_memory import MIN_ITERATIONS
from perseus.solver import Plan
from tests.service.job.clusters import straggler

PIPELINES = SHAPES["2 pipelines of 2 stages"]


def offered(job: Training, pipeline: int = 1) -> Plan:
    clocks = job.machine.run.offers[pipeline].clocks
    assert isinstance(clocks, PlannedClocks)
    return clocks.plan


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
    frontier = job.machine.run.planner.frontier
    assert frontier is not None
    stock_s = frontier.baseline.iteration_time_s
    assert offered(job).iteration_time_s - stock_s == pytest.approx(slower_s, abs=0.01 * stock_s)


def test_after_a_restart_the_plan_stays_until_the_variation_is_known_again() -> None:
    job = trained(0.0, iterations=120)
    before = offered(job)
    job.restart()
    for rank in job.ranks.values():
        job.send(rank.joined())
    for _ in range(MIN_ITERATIONS - 2):
        job.run()
        assert offered(job).clocks_mhz == before.clocks_mhz
    job.run(8)
    assert offered(job).clocks_mhz != before.clocks_mhz, "it is made for the latest iterations"
    assert offered(job).iteration_time_s == pytest.approx(before.iteration_time_s, rel=0.01)


@pytest.mark.usefixtures("stock_beside_plans")
def test_a_disturbance_while_clocks_are_measured_costs_no_more_than_measuring_them_again() -> None:
    """One clock is measured 10 % too slow, and the highest one partly: no plan on that keeps its promise."""

    def disturbed(_rng: np.random.Generator, iterations: int, pipelines: int) -> Array:
        factors = np.ones((iterations, pipelines))
        factors[4:9] = 1.1
        return factors

    job = Training(PIPELINES, 0.0, seed=0, sigma=0.02, disturbance=disturbed)
    job.join_all()
    job.run(200)
    reasons = [event.message for event in job.events()]
    assert any("it is measured anew" in reason for reason in reasons)
    assert job.machine.record.state is JobState.PLANNED
    slowdown = sum(ran.time_s for ran in job.truth[100:]) / sum(ran.stock_s for ran in job.truth[100:]) - 1
    assert slowdown < 0.005


def test_a_power_cut_is_answered_at_once() -> None:
    job = trained(0.0, iterations=120)
    own_s = offered(job).iteration_time_s
    job.waiting = []
    before = len(job.history)
    job.send(BudgetTargetSet(1.15 * own_s, is_urgent=True))
    offers = [command.offer for command in job.history[before:] if isinstance(command, SendOffer)]
    assert len(offers) == len(job.ranks)
    assert all(offer.is_urgent for offer in offers)
    assert 1.02 * own_s < offered(job).iteration_time_s < 1.15 * own_s, "faster, as computations vary"


def test_after_a_restart_a_straggler_is_answered_before_the_variation_is_known() -> None:
    job = trained(0.0, iterations=120)
    own_s = offered(job).iteration_time_s
    job.restart()
    for rank in job.ranks.values():
        job.send(rank.joined())
    job.send(straggler(1.2))
    job.run(4)
    assert offered(job).iteration_time_s > 1.1 * own_s


def test_a_plan_with_a_stage_at_stock_stays_after_a_restart() -> None:
    job = trained(10.0, iterations=0)
    for place, rank in job.ranks.items():
        rank.is_permitted = place.stage == 1
    job.run(150)
    before = offered(job)
    assert not any(planned.clock_mhz for planned in before.stages[0])
    job.restart()
    for rank in job.ranks.values():
        job.send(rank.joined())
    job.run(4)
    assert offered(job).clocks_mhz == before.clocks_mhz


def test_a_deadline_is_kept() -> None:
    job = trained(0.0, iterations=60)
    baseline_s = job.machine.run.baseline.time_s
    allowed_s = 1.08 * baseline_s
    job.send(PolicySet(OperatingPolicy(deadline=Deadline(100, 100 * allowed_s))))
    job.run(20)
    predicted_s = job.machine.run.planner.predicted_time_s()
    assert predicted_s is not None
    assert 1.02 * baseline_s < predicted_s <= allowed_s * (1 + 1e-6)
