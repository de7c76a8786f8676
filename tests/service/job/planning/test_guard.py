"""The guard and its evidence: violated predictions, irregular iterations, drift, and changed work."""

from collections.abc import Iterable
from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from perseus.service.domain.measured import JobIteration, Timeline
from perseus.service.domain.model import JobState
from perseus.service.domain.specification import Parallelism
from perseus.service.job.planning.drift import BLOCK, DriftWatch, changed_work
from perseus.service.job.planning.guard import Guard, PredictionViolation
from perseus.service.job.planning.irregular import IrregularWatch
from perseus.service.job.rules import Rules
from perseus.solver import Kind, Measurement, Pipeline, one_forward_one_backward
from perseus.v1 import event_pb2
from tests.service.job.clusters import TruthfulCluster
from tests.service.service_fakes import CLOCKS_MHZ, batch, energy_j, estimate, time_s

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


def test_other_plans_and_irregular_iterations_do_not_count() -> None:
    guard = knowing(0.0)
    for number in range(40):
        mixed = iteration(number, 1.1, version=number // 4)
        assert guard.judge(mixed, PREDICTED_S, 0.9) is None
        assert guard.judge(replace(mixed, is_regular=False), PREDICTED_S, 0.9) is None


# ---------------------------------------------------------------------- irregular iterations


def judged(watch: IrregularWatch, times_s: list[float], regular_every: int = 0) -> list[int]:
    """Return the iterations at which the plans are withdrawn."""
    return [
        number
        for number, time_s in enumerate(times_s)
        if watch.judge(
            iteration(number, time_s, is_regular=bool(regular_every) and number % regular_every == 0),
            PREDICTED_S,
        )
        is not None
    ]


def test_plans_are_withdrawn_if_most_of_the_latest_iterations_are_irregular_and_slow() -> None:
    assert judged(IrregularWatch(Rules()), [1.02] * 5) == [4]
    assert judged(IrregularWatch(Rules()), [1.005] * 20) == []
    assert judged(IrregularWatch(Rules()), [0.5] * 20) == [], "shorter ones do no harm"
    assert judged(IrregularWatch(Rules()), [5.0] * 20, regular_every=2)[:1] == [5]
    watch = IrregularWatch(Rules())
    assert [watch.judge(iteration(n, 5.0, is_regular=n % 3 > 0), PREDICTED_S) for n in range(20)] == [
        None
    ] * 20


def test_iterations_that_take_as_long_at_stock_keep_the_plans() -> None:
    watch = IrregularWatch(Rules())
    for number in range(6):
        watch.take_stock(iteration(number, 1.5, version=0, is_regular=False))
        watch.take_stock(iteration(number, 0.9, version=0))
    watch.restart()
    assert judged(watch, [1.5] * 20) == []
    assert judged(watch, [1.6] * 5) != []


def test_iterations_under_other_plans_do_not_count() -> None:
    watch = IrregularWatch(Rules())
    assert all(
        watch.judge(iteration(n, 5.0, version=n // 4, is_regular=False), PREDICTED_S) is None
        for n in range(40)
    )


def test_iterations_that_are_as_irregular_at_stock_withdraw_plans_only_once() -> None:
    cluster = TruthfulCluster().plan()
    t_min_s = cluster.job().t_min_s
    cluster.iterate(25, 3.0, is_regular=False)
    cluster.expect(JobState.BASELINE)
    cluster.run_until(JobState.PLANNED)
    assert cluster.job().t_min_s == t_min_s, "nothing was measured or solved anew"
    assert cluster.announced(event_pb2.PredictionViolated) == []
    cluster.run(3)
    cluster.iterate(20, 3.0, is_regular=False)
    cluster.expect(JobState.PLANNED)


# ---------------------------------------------------------------------- drift, and changed work


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


def watch(scales: dict[tuple[int, int], float], count: int = 16) -> DriftWatch:
    """Return a watch with every rank at 1200 MHz, its times scaled by (pipeline, stage)."""
    drift_watch = DriftWatch(SHAPE)
    for place in SHAPE.all_coordinates():
        reported = estimate(SCHEDULE.orders[place.stage], 1, 3, 1200)
        scale = scales.get((place.pipeline, place.stage), 1.0)
        samples = tuple(
            replace(sample, time_s=sample.time_s * scale, computation_count=count)
            for sample in reported.samples
        )
        drift_watch.take_estimate(place, replace(reported, samples=samples))
    return drift_watch


def everywhere(scale: float) -> dict[tuple[int, int], float]:
    return {(pipeline, 1): scale for pipeline in range(3)}


@pytest.mark.parametrize(
    ("drift_watch", "measured", "ratio"),
    [
        pytest.param(watch({}), MEASURED, None, id="none"),
        pytest.param(watch({(0, 1): 1.3}), MEASURED, None, id="on one pipeline"),
        pytest.param(watch(everywhere(1.05)), MEASURED, 1.05, id="on all pipelines"),
        pytest.param(watch(everywhere(1.015)), MEASURED, None, id="a little"),
        pytest.param(watch(everywhere(1.015)), MEASURED - {(1, 1200)}, 1.015, id="at an interpolated clock"),
        pytest.param(watch(everywhere(2.0), count=4), MEASURED, None, id="of too few computations"),
    ],
)
def test_a_difference_on_all_pipelines_is_drift(
    drift_watch: DriftWatch, measured: set[tuple[int, int]], ratio: float | None
) -> None:
    drift = drift_watch.check(PROBLEM, measured, ignored=())
    assert (drift is None) == (ratio is None)
    if drift is not None:
        assert drift.worst[:2] == (1, 1200)
        assert drift.worst_ratio == pytest.approx(ratio)
        assert len(drift.times_s) == 4


def test_a_check_is_due_after_every_block_under_the_same_plans() -> None:
    found = DriftWatch(SHAPE)
    due = [n for n in range(2 * BLOCK) if found.is_due((1, 1))]
    assert due == [BLOCK - 1, 2 * BLOCK - 1]
    assert not any(found.is_due((n, n)) for n in range(3 * BLOCK))


# ---------------------------------------------------------------------- changed work


def timeline(*ratios: float) -> Timeline:
    """Return an iteration at the highest clock whose stages take so much longer than planned."""
    stages = []
    for ratio, order in zip(ratios, SCHEDULE.orders, strict=True):
        columns = batch(1, [7], 1, 1.0, order=order, clock_mhz=1400).computations
        times_s = [ratio * time_s(each.stage, each.kind, 1400) for each in order]
        stages.append(columns._replace(duration_s=times_s))
    return Timeline(7, 1.0, tuple(stages))


def test_slowness_of_every_pipeline_is_changed_work() -> None:
    changed = changed_work(PROBLEM, [timeline(1.0, 2.0), timeline(1.0, 1.9)])
    assert changed is not None
    assert changed == pytest.approx((1, 1.9))


@pytest.mark.parametrize("pipeline_count", [2, 3, 8])
def test_slowness_of_one_pipeline_is_a_straggler(pipeline_count: int) -> None:
    others = [timeline(1.0, 1.0)] * (pipeline_count - 1)
    assert changed_work(PROBLEM, [timeline(1.2, 1.5), *others]) is None


def test_without_timelines_no_change_is_found() -> None:
    assert changed_work(PROBLEM, []) is None
