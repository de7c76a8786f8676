"""The guard and the drift watch by themselves."""

from collections.abc import Iterable
from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from perseus.service.domain.measured import JobIteration
from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.job.planning.drift import BLOCK, Drift, DriftWatch
from perseus.service.job.planning.guard import Guard, PredictionViolation
from perseus.service.job.rules import Rules
from perseus.solver import Kind, Measurement, Pipeline, one_forward_one_backward
from tests.service.service_fakes import CLOCKS_MHZ, energy_j, estimate, time_s

PREDICTED_S = 1.0
SCHEDULE = one_forward_one_backward(2, 8)
SHAPE = Parallelism(3, 2, 1)
KINDS = (Kind.FORWARD, Kind.BACKWARD)
MEASURED = {(stage, mhz) for stage in range(2) for mhz in CLOCKS_MHZ}
PROBLEM = Pipeline(
    SCHEDULE,
    {
        (stage, 0, kind): tuple(
            Measurement(mhz, time_s(stage, kind, mhz), energy_j(stage, kind, mhz)) for mhz in CLOCKS_MHZ
        )
        for stage in range(2)
        for kind in KINDS
    },
    (60.0, 60.0),
)


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


def test_a_prediction_is_violated_by_the_median_of_five() -> None:
    assert violated_at([1.0] * 5 + [1.02] * 5) == [7]
    assert violated_at([1.02] * 5) == [4]
    assert violated_at([1.02] * 4) == []
    assert violated_at([1.009] * 20) == []
    assert violated_at([1.0, 1.5, 1.0, 1.5, 1.0] * 4) == []


def violated_by_gaps(gaps: list[tuple[float, float]], baseline_gap_time_s: float | None = 0.2) -> list[int]:
    """Take gaps as (time, part explained by low clocks), between iterations within their prediction."""
    guard = knowing(0.0)
    return [
        number
        for number, (gap_s, slowed_s) in enumerate(gaps)
        if guard.judge(
            replace(iteration(number, 1.0), gap_time_s=gap_s, gap_slowed_time_s=slowed_s),
            PREDICTED_S,
            0.9,
            baseline_gap_time_s,
        )
        is not None
    ]


def test_an_evaluation_at_stock_violates_no_prediction() -> None:
    assert violated_by_gaps([(0.2, 0.008), (5.0, 0.008)] * 20) == []
    assert violated_by_gaps([(5.0, 0.0)] * 20) == []


def test_time_that_low_clocks_add_to_gaps_counts() -> None:
    assert violated_by_gaps([(0.23, 0.05)] * 5) == [4]
    assert violated_by_gaps([(0.5, 0.02)] * 5) == [4]
    assert violated_by_gaps([(0.23, 0.005)] * 20) == [], "low clocks explain at most this part"
    assert violated_by_gaps([(0.205, 0.05)] * 20) == [], "the gap exceeds the usual one by this in total"
    assert violated_by_gaps([(0.5, 0.05)] * 20, None) == [], "the usual gap at stock is unknown"


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


def watch(scales: dict[tuple[int, int], float], count: int = 16) -> DriftWatch:
    """Return a watch with every rank at 1200 MHz, its times scaled by (pipeline, stage)."""
    found = DriftWatch(SHAPE)
    for place in SHAPE.all_coordinates():
        reported = estimate(SCHEDULE.orders[place.stage], 1, 3, 1200)
        scale = scales.get((place.pipeline, place.stage), 1.0)
        samples = tuple(
            replace(sample, time_s=sample.time_s * scale, computation_count=count)
            for sample in reported.samples
        )
        found.take_estimate(Coordinates(place.pipeline, place.stage, 0), replace(reported, samples=samples))
    return found


def check(found: DriftWatch) -> Drift | None:
    return found.check(PROBLEM, MEASURED, ignored=())


def test_a_difference_on_all_pipelines_is_drift_and_on_one_is_not() -> None:
    assert check(watch({})) is None
    assert check(watch({(0, 1): 1.3})) is None
    drift = check(watch({(pipeline, 1): 1.05 for pipeline in range(3)}))
    assert drift is not None
    assert drift.worst[:2] == (1, 1200)
    assert abs(drift.worst_ratio - 1.05) < 1e-9
    assert len(drift.times_s) == 4


def test_an_interpolated_clock_has_a_tighter_tolerance() -> None:
    slightly = {(pipeline, 1): 1.015 for pipeline in range(3)}
    assert check(watch(slightly)) is None
    assert watch(slightly).check(PROBLEM, MEASURED - {(1, 1200)}, ignored=()) is not None


def test_too_few_computations_do_not_count() -> None:
    assert check(watch({(pipeline, 1): 2.0 for pipeline in range(3)}, count=4)) is None


def test_a_check_is_due_after_every_block_under_the_same_plans() -> None:
    found = DriftWatch(SHAPE)
    due = [n for n in range(2 * BLOCK) if found.is_due((1, 1))]
    assert due == [BLOCK - 1, 2 * BLOCK - 1]
    assert not any(found.is_due((n, n)) for n in range(3 * BLOCK))
