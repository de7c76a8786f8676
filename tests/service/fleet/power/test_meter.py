"""A job's measured power: at present, and relative to its plans."""

import pytest

from perseus.service.fleet.power.meter import JobMeter


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
