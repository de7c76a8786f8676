import pytest

from perseus.agent.rank.clock_counters import ClockCounters
from tests.agent.clocks.test_keeper import LATENCY_S, Bench


@pytest.mark.parametrize(
    ("planned_mhz", "clocks", "late_count", "missed_count", "on_clock_s"),
    [
        pytest.param(1000, [(1000, 2.0)], 0, 0, 3.0, id="at its clock"),
        pytest.param(1000, [(1400, 2.0), (1000, 3.0), (1200, 4.5)], 0, 0, 1.5, id="a lower clock comes late"),
        pytest.param(1400, [(1000, 2.0), (1400, 2.5)], 1, 0, 2.5, id="a raise comes late"),
        pytest.param(None, [(1400, 2.0), (None, 2.5)], 1, 0, 2.5, id="stock is the highest clock"),
        pytest.param(1400, [(None, 2.0)], 0, 1, 0.0, id="never at its clock"),
    ],
)
def test_a_computation_is_counted(
    planned_mhz: int | None,
    clocks: list[tuple[int | None, float]],
    late_count: int,
    missed_count: int,
    on_clock_s: float,
) -> None:
    counters = ClockCounters()
    counters.add(planned_mhz, clocks, 5.0)
    assert counters == ClockCounters(0, 1, late_count, missed_count, 3.0, on_clock_s)


def test_the_statistics_have_the_keepers_predictions() -> None:
    bench = Bench((1000, 1400), (0.050, 0.100))
    bench.compute(0, 0.043)
    bench.begin(1)
    clocks = ClockCounters().statistics(3, bench.keeper)
    found = (clocks.margin_s, clocks.prediction_error_s, clocks.set_latency_s, clocks.set_latency_count)
    assert found == pytest.approx((0.007, 0.0, LATENCY_S, 64))
