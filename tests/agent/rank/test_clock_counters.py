import pytest

from perseus.agent.rank.clock_counters import ClockCounters
from tests.agent.clocks.test_keeper import LATENCY_S, Bench


def test_a_computation_at_its_clock() -> None:
    counters = ClockCounters()
    counters.add(1000, [(1000, 2.0)], 5.0)
    assert counters == ClockCounters(computation_count=1, computation_time_s=3.0, on_clock_time_s=3.0)


def test_a_lower_clock_that_comes_late_costs_time_on_clock_only() -> None:
    counters = ClockCounters()
    counters.add(1000, [(1400, 2.0), (1000, 3.0), (1200, 4.5)], 5.0)
    assert counters == ClockCounters(computation_count=1, computation_time_s=3.0, on_clock_time_s=1.5)


def test_a_raise_that_comes_late_is_counted_and_stock_is_the_highest_clock() -> None:
    counters = ClockCounters()
    counters.add(1400, [(1000, 2.0), (1400, 2.5)], 5.0)
    counters.add(None, [(1400, 5.0), (None, 5.5)], 6.0)
    counters.add(1400, [(None, 6.0)], 7.0)
    assert counters == ClockCounters(
        computation_count=3,
        late_raise_count=2,
        missed_count=1,
        computation_time_s=5.0,
        on_clock_time_s=3.0,
    )


def test_the_statistics_have_the_keepers_predictions() -> None:
    bench = Bench((1000, 1400), (0.050, 0.100))
    bench.compute(0, 0.043)
    bench.begin(1)
    clocks = ClockCounters().statistics(3, bench.keeper)
    found = (clocks.margin_s, clocks.prediction_error_s, clocks.set_latency_s, clocks.set_latency_count)
    assert found == pytest.approx((0.007, 0.0, LATENCY_S, 64))
