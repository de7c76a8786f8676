"""The margin with which plans keep their iteration times although measurements are noisy."""

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import (
    MAX_CONFIDENCE,
    Frontier,
    Pipeline,
    SolverError,
    replay,
    solve,
    with_margin,
)
from perseus.solver import one_forward_one_backward as one_f_one_b
from perseus.solver.bounds import MIN_TIME_S
from tests.solver.pipelines import little_search, pipelines, published_pipeline, remeasured, small_pipeline

_ROUNDED = 1 + 1e-9


def reported(pipeline: Pipeline, share: float, common_share: float = 0.0) -> Pipeline:
    """The same figures, with standard errors."""
    return remeasured(
        pipeline,
        lambda m: replace(m, time_se_s=share * m.time_s, time_common_se_s=common_share * m.time_s),
    )


def drawn(
    pipeline: Pipeline, share: float, random: np.random.Generator, common_share: float = 0.0
) -> Pipeline:
    """A possible truth: all computations of a kind share one error, and all may have a part in common."""
    common = common_share * random.standard_normal() if common_share else 0.0
    own_share = math.sqrt(share**2 - common_share**2)
    # The same figures are taken for the same measurement.
    factors = {
        some: 1 + common + own_share * random.standard_normal()
        for some in dict.fromkeys(pipeline.profiles.values())
    }
    return replace(
        pipeline,
        profiles={
            key: tuple(replace(m, time_s=max(m.time_s * factors[some], MIN_TIME_S)) for m in some)
            for key, some in pipeline.profiles.items()
        },
    )


def kept_shares(frontier: Frontier, truths: list[Pipeline]) -> list[float]:
    """Of each of the frontier's plans, the share of the truths in which it keeps its time."""
    shares = []
    for plan in frontier.plans():
        times_s = [replay(each, plan.clocks_mhz).iteration_time_s for each in truths]
        shares.append(float(np.mean(np.array(times_s) <= _ROUNDED * plan.iteration_time_s)))
    return shares


def test_every_plan_that_is_given_out_keeps_its_time() -> None:
    """Searched plans fill slack that roundings leave, so that more paths may be late."""
    published = published_pipeline("a100-sxm", 4)
    pipeline = Pipeline(
        one_f_one_b(4, 4),
        {key: some[::3] for key, some in published.profiles.items() if key[0] < 4},
        published.blocking_power_w[:4],
    )
    random = np.random.default_rng(5)
    frontier = solve(reported(pipeline, 0.01), point_count=4, confidence=0.9)
    assert min(kept_shares(frontier, [drawn(pipeline, 0.01, random) for _ in range(300)])) > 0.87


@pytest.mark.parametrize("confidence", [0.95, MAX_CONFIDENCE])
def test_an_error_in_common_needs_a_larger_margin_than_errors_that_average_out(confidence: float) -> None:
    both = (reported(small_pipeline(), 0.01, common_share) for common_share in (0.0, 0.01))
    margins = [solve(each, point_count=3, confidence=confidence).margin for each in both]
    counts = [margin.error_count for margin in margins if margin is not None]
    # In common, all times are longer by the same share: as by the normal distribution, and draws are limited.
    least = NormalDist().inv_cdf(confidence)
    assert least <= counts[1] < 1.2 * least
    assert counts[0] < counts[1] - 0.2


def test_a_noisy_path_that_is_a_little_shorter_than_an_exact_one_may_be_late() -> None:
    """A small margin does not change the iteration's length, although the noisy path may exceed it."""
    pipeline = small_pipeline()
    fixed = {
        key: tuple(replace(m, time_se_s=0.2 * m.time_s) for m in some) if key[0] == 0 else some
        for key, some in pipeline.profiles.items()
    }
    frontier = solve(replace(pipeline, profiles=fixed), point_count=3, confidence=0.9)
    random, truths = np.random.default_rng(1), []
    for _ in range(300):
        truth = drawn(pipeline, 0.2, random)
        truths.append(
            replace(truth, profiles={**truth.profiles, **{key: fixed[key] for key in fixed if key[0] == 1}})
        )
    assert min(kept_shares(frontier, truths)) > 0.86


def test_without_standard_errors_there_is_no_margin() -> None:
    pipeline = small_pipeline()
    assert with_margin(pipeline, 0.95) == (pipeline, None)
    frontier = solve(pipeline, point_count=4, confidence=0.95)
    assert frontier.margin is None
    assert frontier.margin_energy_share == 0.0
    assert frontier.t_min_s == solve(pipeline, point_count=4).t_min_s


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


def test_a_margin_is_added_once_and_includes_the_cost_of_waiting_for_its_end() -> None:
    pipeline = reported(small_pipeline(), 0.01)
    padded, _ = with_margin(pipeline, 0.95)
    assert with_margin(padded, 0.95) == (padded, None)
    for (stage, chunk, kind), some in padded.profiles.items():
        for before, after in zip(pipeline.profiles[stage, chunk, kind], some, strict=True):
            waited_j = pipeline.blocking_power_w[stage] * (after.time_s - before.time_s)
            assert waited_j > 0
            assert after.energy_j == pytest.approx(before.energy_j + waited_j)


@given(
    pipeline=pipelines(),
    share=st.floats(1e-4, 3.0),
    common_part=st.floats(0.0, 1.0),
    confidence=st.floats(0.5, 1.0, exclude_max=True) | st.sampled_from([0.9999, 1 - 1e-12]),
)
def test_no_limit_lowers_what_a_margin_promises(
    pipeline: Pipeline, share: float, common_part: float, confidence: float
) -> None:
    common_share, random = common_part * share, np.random.default_rng(3)
    with little_search():
        frontier = solve(reported(pipeline, share, common_share), point_count=3, confidence=confidence)
    promised = frontier.margin.confidence if frontier.margin else 0.0
    truths = [drawn(pipeline, share, random, common_share) for _ in range(100)]
    deviation = math.sqrt(promised * (1 - promised) / len(truths))
    assert promised == min(confidence, MAX_CONFIDENCE)
    assert min(kept_shares(frontier, truths)) >= promised - 5 * deviation - 0.03


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_errors_out_of_all_proportion_are_refused(confidence: float) -> None:
    with pytest.raises(SolverError, match="time_se_s: expected standard errors"):
        solve(reported(small_pipeline(), 1e6), point_count=3, confidence=confidence)
