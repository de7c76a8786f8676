"""A whole pipeline under the real session in simulated time: latency costs joules, never seconds."""

from statistics import fmean

import pytest

from benchmarks.clock_latency import SETTLING_ITERATIONS, compare, job, pipeline, stage_clocks
from benchmarks.training_simulation import Machine, train
from perseus import solver


@pytest.mark.parametrize("forward_s", [0.020, 0.050])
@pytest.mark.parametrize("latency_s", [0.010, 0.020])
def test_a_plan_is_no_slower_with_latency(forward_s: float, latency_s: float) -> None:
    each = job(forward_s, microbatch_count=8)
    problem = pipeline(each)
    plan = solver.plan_at(problem, solver.fastest_clock_plan(problem).iteration_time_s)
    replayed = solver.replay_with_latency(problem, plan, latency_s)
    at_once = solver.replay_with_latency(problem, plan, 0.0)
    found = compare(each, stage_clocks(plan), latency_s, seeds=range(2))
    assert found.slowdown <= 0.002
    # Close to the cost of perfect predictions.
    assert found.extra_energy <= replayed.energy_j / at_once.energy_j - 1 + 0.007
    assert found.on_clock_share >= replayed.share_on_clock - 0.07


def test_on_an_ideal_machine_nothing_is_lost_but_the_latency() -> None:
    each = job(0.050, microbatch_count=8)
    problem = pipeline(each)
    plan = solver.plan_at(problem, solver.fastest_clock_plan(problem).iteration_time_s)
    ideal = Machine(0.0, 0.0, 0.0, 0.0)
    found = compare(each, stage_clocks(plan), 0.010, seeds=[0], machine=ideal)
    replayed = solver.replay_with_latency(problem, plan, 0.010)
    assert found.slowdown == pytest.approx(0.0, abs=1e-4)
    assert found.on_clock_share == pytest.approx(replayed.share_on_clock, abs=0.01)


def test_a_temporarily_slow_gpu_loses_no_time_to_its_clocks() -> None:
    """Predictions are wrong for some iterations; soon, raises that were late come earlier."""
    each = job(0.050, microbatch_count=8)
    problem = pipeline(each)
    plan = solver.plan_at(problem, solver.fastest_clock_plan(problem).iteration_time_s)
    slowdowns = [1.0] * 8 + [1.2] * 8 + [1.0] * 12
    clocks_mhz = stage_clocks(plan)
    late, at_once = (
        train(
            each, clocks_mhz, latency_s=latency_s, iteration_count=len(slowdowns), seed=1, slowdowns=slowdowns
        )
        for latency_s in (0.020, None)
    )
    ratios = [a / b for a, b in zip(late.iteration_times_s, at_once.iteration_times_s, strict=True)]
    assert max(ratios[SETTLING_ITERATIONS:]) <= 1.01
    assert fmean(ratios[SETTLING_ITERATIONS:]) <= 1.002
