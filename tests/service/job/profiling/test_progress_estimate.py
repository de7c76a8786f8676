"""The upper bound for the end of profiling."""

import math

import pytest

from perseus.service.domain.profiling import ProfilingBudget, ProfilingCost, ProfilingProgress
from perseus.service.job.profiling.progress_estimate import ProgressEstimate

NO_LIMIT = ProfilingBudget(extra_time_s=math.inf)


def cost(time_s: float, *, iterations: int = 1, extra_s: float = 0.0, extra_j: float = 0.0) -> ProfilingCost:
    return ProfilingCost(iterations, time_s, extra_s, 1.0, extra_j)


def test_there_is_no_estimate_before_a_round_has_ended() -> None:
    estimate = ProgressEstimate(NO_LIMIT)
    estimate.begin_round(cost(0.0), 0, 12)
    assert estimate.progress(cost(5.0)) == ProfilingProgress(0, 12, None)


def test_remaining_rounds_are_estimated_from_finished_ones() -> None:
    estimate = ProgressEstimate(NO_LIMIT)
    estimate.begin_round(cost(100.0), 4, 12)  # resumed, say: earlier rounds do not count
    estimate.end_round(cost(110.0))
    estimate.begin_round(cost(110.0), 5, 12)
    assert estimate.progress(cost(110.0)) == ProfilingProgress(5, 12, 70.0)
    assert estimate.progress(cost(114.0)).remaining_s == 66.0
    assert estimate.progress(cost(200.0)).remaining_s == 0.0, "it takes longer than estimated"
    estimate.end_round(cost(130.0))
    estimate.begin_round(cost(130.0), 6, 12)
    assert estimate.progress(cost(130.0)).remaining_s == 6 * 15.0
    estimate.restart()
    assert estimate.progress(cost(130.0)).remaining_s is None


@pytest.mark.parametrize(
    ("budget", "remaining_s"),
    [
        (ProfilingBudget(time_s=25.0, extra_time_s=math.inf), 15.0),
        (ProfilingBudget(iteration_count=40, extra_time_s=math.inf), 30.0),
        (ProfilingBudget(extra_time_s=3.0), 5.0),
        (ProfilingBudget(extra_time_s=math.inf, extra_energy_j=10.0), 15.0),
        (ProfilingBudget(extra_time_s=0.5), 0.0),
        (ProfilingBudget(extra_time_s=1e6), 110.0),
    ],
)
def test_a_budget_may_end_profiling_earlier(budget: ProfilingBudget, remaining_s: float) -> None:
    estimate = ProgressEstimate(budget)
    estimate.begin_round(cost(0.0), 0, 12)
    ended = cost(10.0, iterations=10, extra_s=2.0, extra_j=4.0)
    estimate.end_round(ended)
    estimate.begin_round(ended, 1, 12)
    assert estimate.progress(ended).remaining_s == pytest.approx(remaining_s)
