"""The guard by itself: which iteration times violate a prediction."""

from collections.abc import Iterable
from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from perseus.service.domain.measured import JobIteration
from perseus.service.job.planning.guard import Guard, PredictionViolation
from perseus.service.job.rules import Rules

PREDICTED_S = 1.0


def iteration(number: int, seconds: float, version: int = 1, is_regular: bool = True) -> JobIteration:
    return JobIteration(number, (version, version), is_regular, seconds, (50.0, 50.0))


def knowing(noise: float, seed: int = 0) -> Guard:
    """Return a guard that has learned the noise of iteration times at stock."""
    guard = Guard(Rules())
    for jump in noise * np.random.default_rng(seed).standard_normal(60):
        guard.learn(iteration(0, 0.9 * float(np.exp(jump)), version=0))
    return guard


def judge(guard: Guard, number: int, seconds: float) -> PredictionViolation | None:
    guard.learn(iteration(number, seconds))
    return guard.judge(iteration(number, seconds), PREDICTED_S, 0.9)


def violated_at(times_s: Iterable[float], guard: Guard | None = None) -> list[int]:
    guard = guard or knowing(0.0)
    return [n for n, s in enumerate(times_s) if judge(guard, n, s) is not None]


@pytest.mark.parametrize("noise", [0.005, 0.03, 0.145])
def test_noise_alone_violates_no_prediction(noise: float) -> None:
    """The median of five often exceeds 1 % if iterations have a noise of 3 %."""
    rng = np.random.default_rng(1)
    times_s = np.exp(noise * rng.standard_normal(3000)).tolist()
    exceeding = sum(median(times_s[at : at + 5]) > 1.01 for at in range(len(times_s) - 5))
    assert exceeding > 100 or noise < 0.01
    assert violated_at(times_s, knowing(noise)) == []


@pytest.mark.parametrize("noise", [0.005, 0.02])
def test_amid_noise_a_violation_is_reported_once_it_is_certain(noise: float) -> None:
    rng = np.random.default_rng(2)
    found = violated_at((1.08 * np.exp(noise * rng.standard_normal(60))).tolist(), knowing(noise))
    assert found[0] < 20


def test_before_the_noise_is_known_a_few_slow_iterations_violate_no_prediction() -> None:
    assert violated_at([1.02] * 5, Guard(Rules())) == []
    assert violated_at([1.02] * 20, Guard(Rules()))[0] < 15


def test_the_tolerance_covers_the_error_of_the_baseline() -> None:
    assert knowing(0.0).tolerance == 0.01
    assert 0.03 < knowing(0.05).tolerance < 0.09


@pytest.mark.parametrize(
    ("times_s", "violated"),
    [
        ([1.0] * 5 + [1.02] * 5, [7]),
        ([1.02] * 5, [4]),
        ([1.02] * 4, []),
        ([1.009] * 20, []),
        ([1.0, 1.5, 1.0, 1.5, 1.0] * 4, []),
    ],
)
def test_a_prediction_is_violated_by_the_median_of_five(times_s: list[float], violated: list[int]) -> None:
    assert violated_at(times_s) == violated


@pytest.mark.parametrize(
    ("gaps", "usual_gap_s", "violated"),
    [
        pytest.param([(0.2, 0.008), (5.0, 0.008)] * 20, 0.2, [], id="an evaluation now and then"),
        pytest.param([(5.0, 0.0)] * 20, 0.2, [], id="evaluations at stock"),
        pytest.param([(0.23, 0.05)] * 5, 0.2, [4], id="low clocks add to a gap"),
        pytest.param([(0.5, 0.02)] * 5, 0.2, [4], id="low clocks add to a long gap"),
        pytest.param([(0.23, 0.005)] * 20, 0.2, [], id="low clocks explain at most this part"),
        pytest.param([(0.205, 0.05)] * 20, 0.2, [], id="the gap exceeds the usual one by this in total"),
        pytest.param([(0.5, 0.05)] * 20, None, [], id="the usual gap at stock is unknown"),
    ],
)
def test_the_time_that_low_clocks_add_to_gaps_counts(
    gaps: list[tuple[float, float]], usual_gap_s: float | None, violated: list[int]
) -> None:
    """Gaps as (time, part explained by low clocks), between iterations within their prediction."""
    guard = knowing(0.0)
    violating = []
    for number, (gap_s, slowed_s) in enumerate(gaps):
        with_gap = replace(iteration(number, 1.0), gap_time_s=gap_s, gap_slowed_time_s=slowed_s)
        if guard.judge(with_gap, PREDICTED_S, 0.9, usual_gap_s) is not None:
            violating.append(number)
    assert violating == violated


def test_the_details_name_the_times() -> None:
    guard = knowing(0.0)
    found = [judge(guard, n, 1.02 + n / 1000) for n in range(5)]
    assert found[-1] is not None
    assert found[-1].iteration_times_s == (1.02, 1.021, 1.022, 1.023, 1.024)
    assert (found[-1].median_time_s, found[-1].predicted_time_s, found[-1].baseline_time_s) == (
        1.022,
        1.0,
        0.9,
    )


def test_other_plans_and_irregular_iterations_do_not_count() -> None:
    guard = knowing(0.0)
    for number in range(40):
        mixed = iteration(number, 1.1, version=number // 4)
        assert guard.judge(mixed, PREDICTED_S, 0.9) is None
        assert guard.judge(replace(mixed, is_regular=False), PREDICTED_S, 0.9) is None
