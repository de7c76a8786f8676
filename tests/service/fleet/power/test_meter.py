"""What a job's measured watts say: of now, and against its plans."""

import pytest

from perseus.service.fleet.power.meter import JobMeter


def test_the_ratio_is_of_whole_iterations() -> None:
    meter = JobMeter()
    for second in range(1, 8):  # 2 s at 300 W, 2 s at 100 W, over and over
        swing_w = 300.0 if (second - 1) % 4 < 2 else 100.0
        meter.take(float(second), 1.0, {"a": swing_w}, 200.0, 4.0)
    assert meter.ratio == pytest.approx(1.0), "and not of a whole one and the high part of another"


def test_the_latest_seconds_count_at_once_where_they_are_more_and_slowly_where_less() -> None:
    meter = JobMeter()
    for second in range(1, 11):
        meter.take(float(second), 1.0, {"a": 100.0}, None, 1.0)
    for second in range(11, 14):
        meter.take(float(second), 1.0, {"a": 200.0}, None, 1.0)
    assert meter.recent_w() == {"a": 200.0}
    for second in range(14, 17):
        meter.take(float(second), 1.0, {"a": 100.0}, None, 1.0)
    assert meter.recent_w() == {"a": pytest.approx(130.0)}


def test_what_was_drawn_before_can_be_forgotten() -> None:
    meter = JobMeter()
    for second in range(1, 11):
        assert meter.is_recent_known == (second > 3)
        meter.take(float(second), 1.0, {"a": 100.0}, None, 1.0)
    meter.forget_recent()
    assert not meter.is_recent_known
    assert meter.recent_w() == {}
