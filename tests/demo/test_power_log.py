"""Evaluation of a site's samples."""

import math

import pytest

from perseus.demo.power_log import PowerLog, Sample, summary


def log_of(*powers_w: float, limit_w: float = math.inf) -> PowerLog:
    """Return a sample a second, from the end of the first, of two jobs with equal power."""
    return PowerLog(
        [
            Sample(
                float(second),
                {"a": power_w / 2, "b": power_w / 2},
                {"a": 1.0, "b": 0.5 + second / 10},
                limit_w,
            )
            for second, power_w in enumerate(powers_w, start=1)
        ]
    )


def test_means_are_of_the_seconds_that_end_within() -> None:
    log = log_of(100.0, 200.0, 300.0, 400.0)
    assert log.mean_w(1.0, 3.0) == 250.0
    assert log.speed("b", 0.0, 2.0) == pytest.approx(0.65)
    assert log.speed("nobody", 0.0, 4.0) is None


def test_the_worst_mean_is_of_a_whole_window() -> None:
    log = log_of(100.0, 100.0, 400.0, 300.0, 100.0)
    assert log.worst_mean_w(0.0, 5.0, window_s=2.0) == 350.0
    assert log.worst_mean_w(0.0, 5.0, window_s=60.0) == 200.0, "the whole span, if it is shorter"


def test_the_worst_mean_is_not_below_that_of_the_whole_span() -> None:
    log = log_of(900.0, 100.0, 100.0, 100.0, 100.0)
    assert log.mean_w(0.6, 5.0) == 260.0
    assert log.worst_mean_w(0.6, 5.0, window_s=3.0) == 260.0, "no window in it has the first sample"


def test_one_second_under_a_limit_is_not_enough() -> None:
    log = log_of(500.0, 300.0, 500.0, 300.0, 290.0, 300.0)
    assert log.under_s(300.0, 0.0) == 4.0
    assert log.under_s(100.0, 0.0) is None


def test_a_summary_without_a_limit_shows_none() -> None:
    (free,) = summary(log_of(100.0, 300.0), [("free", 0.0, 2.0)], ["a"])
    assert free == {
        "name": "free",
        "power_w": 200.0,
        "limit_w": None,
        "worst_ten_second_mean_w": 200.0,
        "speeds": {"a": 1.0},
    }
    (held,) = summary(log_of(100.0, limit_w=150.0), [("held", 0.0, 1.0)], [])
    assert held["limit_w"] == 150.0
