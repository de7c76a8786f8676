"""A job's measured power: at present, and relative to its plans."""

import numpy as np
import pytest

from perseus.service.fleet.power.meter import JobMeter, PredictionError


def test_the_ratio_is_of_whole_iterations() -> None:
    meter = JobMeter()
    for second in range(1, 8):  # 2 s at 300 W and 2 s at 100 W in turn
        swing_w = 300.0 if (second - 1) % 4 < 2 else 100.0
        meter.take(float(second), 1.0, {"a": swing_w}, 200.0, 4.0)
    assert meter.ratio == pytest.approx(1.0), "not of a whole iteration and the high part of another"


def test_power_rises_count_at_once_and_falls_slowly() -> None:
    meter = JobMeter()
    for second in range(1, 11):
        meter.take(float(second), 1.0, {"a": 100.0}, None, 1.0)
    for second in range(11, 14):
        meter.take(float(second), 1.0, {"a": 200.0}, None, 1.0)
    assert meter.recent_w() == {"a": 200.0}
    for second in range(14, 17):
        meter.take(float(second), 1.0, {"a": 100.0}, None, 1.0)
    assert meter.recent_w() == {"a": pytest.approx(130.0)}


def test_past_power_can_be_dropped() -> None:
    meter = JobMeter()
    for second in range(1, 11):
        assert meter.is_recent_known == (second > 3)
        meter.take(float(second), 1.0, {"a": 100.0}, None, 1.0)
    meter.forget_recent()
    assert not meter.is_recent_known
    assert meter.recent_w() == {}


@pytest.mark.parametrize(("change", "counts"), [(0.01, True), (0.3, False)])
def test_a_ratio_counts_under_similar_plans(change: float, counts: bool) -> None:
    meter = JobMeter()
    for second in range(1, 301):
        meter.take(float(second), 1.0, {"a": 110.0}, 100.0, 1.0)
    assert meter.ratio == pytest.approx(1.1)
    meter.changed(300.0, 5.0, change)
    for second in range(301, 331):
        meter.take(float(second), 1.0, {"a": 100.0}, 100.0, 1.0)
    assert meter.ratio == pytest.approx(1.085 if counts else 1.0, abs=0.01)


@pytest.mark.parametrize("noise", [0.002, 0.02])
def test_the_deviation_of_a_window_is_learned(noise: float) -> None:
    random = np.random.default_rng(0)
    error = PredictionError(0.002)
    for _ in range(3600):
        error.take(1.0, 1000 * (1 + noise * random.standard_normal()), 1000.0, 60.0)
    assert error.deviation == pytest.approx(noise / 60**0.5, rel=0.25)


def test_power_that_follows_no_plan_is_no_noise() -> None:
    error = PredictionError(0.002)
    for _ in range(3600):
        error.take(1.0, 2000.0, 1000.0, 60.0)
    assert error.deviation == 0.004
