"""A signal's forecast: its source's, otherwise our own; none once the signal is stale."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.signals import HOUR_S, SignalKind
from perseus.service.fleet.signals.history import FORECAST_H, MAX_HOURS, SignalHistory
from perseus.service.fleet.signals.series import Signal

BEGIN_S = 1_000_000 * HOUR_S


def signal(
    values: list[float], begin_s: float = BEGIN_S, step_s: float = HOUR_S, stale_s: float = 3 * HOUR_S
) -> Signal:
    times_s = tuple(begin_s + step_s * index for index in range(len(values)))
    return Signal(SignalKind.CARBON, times_s, tuple(values), step_s, stale_s)


def history_of(*signals: Signal, now_s: float = BEGIN_S) -> SignalHistory:
    history = SignalHistory()
    for each in signals:
        history.take(each, now_s)
    return history


def test_the_sources_forecast_counts_first_and_then_our_own() -> None:
    day = [100.0 + hour for hour in range(24)]
    reported = [500.0, 600.0]
    found = history_of(signal([*day, *reported])).forecast_at(BEGIN_S + 24.5 * HOUR_S)
    assert found is not None
    assert found.hour_s == HOUR_S
    assert found.values[:2].tolist() == reported
    # As on the last known day.
    assert found.values[2:26].tolist() == [*day[2:], *day[:2]]
    assert len(found.values) == FORECAST_H


def test_values_per_second_are_forecast_per_second_and_repeat() -> None:
    history = history_of(signal([100.0, 500.0, 100.0, 500.0], step_s=10.0, stale_s=5.0))
    found = history.forecast_at(BEGIN_S + 12.0)
    assert found is not None
    assert (found.hour_s, found.values.tolist()) == (10.0, [500.0, 100.0, 500.0])


def test_the_last_value_stays_valid_for_a_while_and_then_the_signal_is_unknown() -> None:
    history = history_of(signal([100.0, 200.0]))
    last = history.forecast_at(BEGIN_S + 4.9 * HOUR_S)
    assert last is not None
    assert history.value_at(BEGIN_S + 4.9 * HOUR_S) == 200.0
    assert history.forecast_at(BEGIN_S + 5 * HOUR_S) is None
    assert SignalHistory().forecast_at(BEGIN_S) is None


def test_new_values_replace_their_forecast() -> None:
    history = history_of(signal([100.0, 200.0, 300.0]), signal([250.0, 350.0], BEGIN_S + HOUR_S))
    assert [history.value_at(BEGIN_S + hour * HOUR_S) for hour in range(3)] == [100.0, 250.0, 350.0]
    assert history.version == 2


def test_an_hour_has_the_mean_of_its_valid_values() -> None:
    history = history_of(signal([100.0, 300.0, 200.0], step_s=1800.0, stale_s=0.0))
    hour = int(BEGIN_S // HOUR_S)
    assert history.mean_in_hour(hour) == pytest.approx(200.0)
    assert history.mean_in_hour(hour + 1) == pytest.approx(200.0)
    assert history.mean_in_hour(hour + 2) is None
    assert SignalHistory().mean_in_hour(hour) is None


def test_the_forecasts_length_is_bounded() -> None:
    found = history_of(signal([1.0] * 20_000, step_s=1.0)).forecast_at(BEGIN_S + 1.0)
    assert found is not None
    assert len(found.values) == MAX_HOURS


@given(
    st.lists(st.floats(0, 1000), min_size=1, max_size=60),
    st.sampled_from([60.0, 900.0, 1800.0, HOUR_S]),
    st.floats(0, 100),
)
def test_there_is_a_forecast_as_long_as_a_value_is_valid(
    values: list[float], step_s: float, later_h: float
) -> None:
    history = history_of(signal(values, step_s=step_s))
    now_s = BEGIN_S + later_h * HOUR_S
    found = history.forecast_at(now_s)
    assert (found is None) == (history.value_at(now_s) is None)
    if found is not None:
        assert np.isfinite(found.values).all()
        assert min(values) - 1e-6 <= found.values.min() <= found.values.max() <= max(values) + 1e-6
