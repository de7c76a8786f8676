"""Whether wall clocks differ: what transit explains does not count, and nothing is said twice."""

import pytest

from perseus.clock_skew import MAX_SKEW_S, SkewWatch, clock_ahead_s


@pytest.mark.parametrize(
    ("reported_s", "ahead_s"), [(99.0, -1.0), (100.0, 0.0), (104.0, 0.0), (105.0, 0.0), (107.5, 2.5)]
)
def test_transit_explains_any_time_between_request_and_response(reported_s: float, ahead_s: float) -> None:
    assert clock_ahead_s(100.0, reported_s, 105.0) == ahead_s


def test_a_clock_about_the_limit_is_noticed_once() -> None:
    watch = SkewWatch()
    skews_s = [0.0, 0.9, -1.1, 1.1, 0.9, -0.6, 0.4, 0.9, 1.1]
    changes = [watch.take(skew_s * MAX_SKEW_S) for skew_s in skews_s]
    assert [skew_s for skew_s, changed in zip(skews_s, changes, strict=True) if changed] == [-1.1, 0.4, 1.1]
    assert (watch.ahead_s, watch.is_large) == (1.1 * MAX_SKEW_S, True)
