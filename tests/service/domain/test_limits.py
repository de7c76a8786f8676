"""Limits of one principal: the rate of messages, and the size of a single input."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.limits import Limits, TokenBucket
from tests.service.service_fakes import make_spec

ARRIVALS = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.integers(1, 40)), min_size=1, max_size=60
)  # seconds since the previous one, and the number of messages
RATES = st.floats(0.5, 5000.0)


@given(RATES, ARRIVALS)
def test_no_interval_exceeds_the_rate_plus_one_burst(rate: float, arrivals: list[tuple[float, int]]) -> None:
    bucket, now_s = TokenBucket(rate), 100.0
    passed: list[tuple[float, int]] = []
    for pause_s, count in arrivals:
        now_s += pause_s
        wait_s = bucket.take(now_s, count)
        assert wait_s >= 0.0
        passed.append((now_s + wait_s, count))
    times = [time_s for time_s, _ in passed]
    assert all(before <= after + 1e-9 for before, after in pairwise(times)), "in order"
    for first in range(len(passed)):
        total = 0
        for last in range(first, len(passed)):
            total += passed[last][1]
            # The first of an interval may have waited for earlier ones: it counts from when it was due.
            allowed = rate * (times[last] - times[first] + 1.0) + passed[first][1]
            assert total <= allowed * (1 + 1e-9) + 1e-6


@given(st.floats(40.0, 5000.0), ARRIVALS)
def test_messages_within_the_rate_never_wait(rate: float, arrivals: list[tuple[float, int]]) -> None:
    """Arrivals at one moment are no more than a burst here."""
    bucket, now_s = TokenBucket(rate), 0.0
    for pause_s, count in arrivals:
        now_s += pause_s + count / rate
        assert bucket.take(now_s, count) <= 1e-9


@given(RATES, st.integers(1, 200))
def test_a_burst_passes_at_once_and_later_messages_at_the_rate(rate: float, more: int) -> None:
    bucket = TokenBucket(rate)
    burst = math.floor(rate)
    if burst:
        assert bucket.take(5.0, burst) == pytest.approx(0.0, abs=1e-9)
    waits_s = [bucket.take(5.0) for _ in range(more)]
    for number, wait_s in enumerate(waits_s, burst + 1):
        assert wait_s == pytest.approx(max(0.0, number / rate - 1.0), abs=1e-6)


def test_the_error_for_a_too_large_input_names_its_field() -> None:
    limits = Limits(limit_ranks=8, limit_computations=100, limit_batch_rows=10)
    limits.check_job(make_spec(pipelines=4, stages=2, microbatches=25))
    with pytest.raises(InvalidFieldError, match=r"parallelism: expected at most 8 ranks.*found 10"):
        limits.check_job(make_spec(pipelines=5, stages=2, microbatches=1))
    with pytest.raises(InvalidFieldError, match=r"schedule: expected at most 100 computations.*found 104"):
        limits.check_job(make_spec(pipelines=1, stages=2, microbatches=26))
    limits.check_rows(10)
    with pytest.raises(InvalidFieldError, match=r"computations\.iteration: expected at most 10 of them"):
        limits.check_rows(11)
