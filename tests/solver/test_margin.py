"""The margin with which plans keep their iteration times although measurements are noisy."""

from dataclasses import replace

import numpy as np
import pytest

from perseus.solver import Pipeline, SolverError, plan_at, replay, solve, with_margin
from perseus.solver.plan import fastest_clock_plan
from tests.solver.pipelines import small_pipeline


def reported(pipeline: Pipeline, share: float) -> Pipeline:
    """The same figures, with standard errors."""
    return replace(
        pipeline,
        profiles={
            key: tuple(replace(m, time_se_s=share * m.time_s) for m in some)
            for key, some in pipeline.profiles.items()
        },
    )


def drawn(pipeline: Pipeline, share: float, random: np.random.Generator) -> Pipeline:
    """A possible truth: all computations of a kind share one error."""
    return replace(
        pipeline,
        profiles={
            key: tuple(replace(m, time_s=m.time_s * factor) for m in some)
            for key, some in pipeline.profiles.items()
            for factor in [1 + share * random.standard_normal()]
        },
    )


def test_without_standard_errors_there_is_no_margin() -> None:
    pipeline = small_pipeline()
    assert with_margin(pipeline, 0.95) == (pipeline, None)
    frontier = solve(pipeline, point_count=4, confidence=0.95)
    assert frontier.margin is None
    assert frontier.margin_energy_share == 0.0
    assert frontier.t_min_s == solve(pipeline, point_count=4).t_min_s


@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_plans_keep_their_times_with_the_requested_confidence(confidence: float, factor: float) -> None:
    share, pipeline = 0.01, small_pipeline()
    padded, margin = with_margin(reported(pipeline, share), confidence)
    assert margin is not None
    plan = plan_at(padded, factor * fastest_clock_plan(padded).iteration_time_s)
    random = np.random.default_rng(1)
    times_s = [replay(drawn(pipeline, share, random), plan.clocks_mhz).iteration_time_s for _ in range(400)]
    kept = np.mean(np.array(times_s) <= plan.iteration_time_s)
    assert kept >= confidence - 0.06


def test_more_confidence_takes_more_and_costs_more() -> None:
    pipeline = reported(small_pipeline(), 0.01)
    frontiers = [solve(pipeline, point_count=4, confidence=each) for each in (0.6, 0.8, 0.95, 0.99)]
    margins = [frontier.margin for frontier in frontiers]
    shares = [margin.time_share for margin in margins if margin is not None]
    prices = [frontier.margin_energy_share for frontier in frontiers]
    assert len(shares) == 4
    assert shares == sorted(shares)
    assert prices == sorted(prices)
    assert 0 < shares[0] < shares[-1] < 0.04


def test_a_margin_is_added_once() -> None:
    padded, _ = with_margin(reported(small_pipeline(), 0.01), 0.95)
    assert with_margin(padded, 0.95) == (padded, None)


def test_plans_include_the_cost_of_waiting_for_the_end_of_the_margin() -> None:
    pipeline = reported(small_pipeline(), 0.01)
    padded, _ = with_margin(pipeline, 0.95)
    for (stage, chunk, kind), some in padded.profiles.items():
        for before, after in zip(pipeline.profiles[stage, chunk, kind], some, strict=True):
            waited_j = pipeline.blocking_power_w[stage] * (after.time_s - before.time_s)
            assert waited_j > 0
            assert after.energy_j == pytest.approx(before.energy_j + waited_j)


@pytest.mark.parametrize("confidence", [0.4, 1.0, float("nan")])
def test_a_confidence_is_a_probability(confidence: float) -> None:
    with pytest.raises(SolverError, match="confidence: expected a probability"):
        with_margin(small_pipeline(), confidence)
