"""Drift: where computations differ from their profile, and whether a stage's work itself has changed."""

from dataclasses import replace

import pytest

from perseus.service.domain.measured import Timeline
from perseus.service.domain.specification import Parallelism
from perseus.service.job.planning.drift import BLOCK, DriftWatch, changed_work
from perseus.solver import Kind, Measurement, Pipeline, one_forward_one_backward
from tests.service.service_fakes import CLOCKS_MHZ, batch, energy_j, estimate, time_s

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
