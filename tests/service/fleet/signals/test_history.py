"""Which value of a signal is valid, and until when; its forecast: its source's, otherwise our own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.errors import InvalidFieldError
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


# ---------------------------------------------------------------------- a signal by itself

CARBON = Signal(SignalKind.CARBON, (0.0, HOUR_S, 3 * HOUR_S), (10.0, 20.0, 40.0), HOUR_S, stale_s=HOUR_S)


@pytest.mark.parametrize(
    ("hours", "value"),
    [(0, 10.0), (0.9, 10.0), (1, 20.0), (2.9, 20.0), (3, 40.0), (4.9, 40.0), (5, None), (-1, None)],
)
def test_a_signals_last_value_stays_valid_for_a_while(hours: float, value: float | None) -> None:
    assert CARBON.value_at(hours * HOUR_S) == value


def test_an_hours_value_is_known_only_after_the_hour() -> None:
    assert CARBON.until(0.5 * HOUR_S) is None
    known = CARBON.until(2.5 * HOUR_S)
    assert known is not None
    assert known.values == (10.0, 20.0)


def test_hours_have_the_mean_of_their_valid_values_and_gaps_are_interpolated() -> None:
    times_s = tuple(HOUR_S * t for t in (0, 0.5, 1, 4, 5))
    prices = Signal(SignalKind.PRICE, times_s, (0.0, 10.0, 20.0, 50.0, -60.0), HOUR_S, stale_s=0.0)
    first_s, values = prices.hourly(6 * HOUR_S)
    assert first_s == 0.0
    assert values.tolist() == pytest.approx([5.0, 20.0, 30.0, 40.0, 50.0, -60.0])
    assert len(prices.hourly(2.5 * HOUR_S)[1]) == 2


def test_a_signal_without_a_whole_hour_has_no_hours() -> None:
    assert len(Signal(SignalKind.CARBON, (100.0,), (1.0,)).hourly(200.0)[1]) == 0


def test_constant_values_stay_constant() -> None:
    times_s = np.arange(100) * HOUR_S
    values = np.random.default_rng(1).uniform(0, 500, 100)
    steady = Signal(SignalKind.CARBON, times_s.tolist(), values.tolist())
    assert steady.hourly(100 * HOUR_S)[1] == pytest.approx(values)


@pytest.mark.parametrize(
    ("kind", "times_s", "values", "text"),
    [
        (SignalKind.CARBON, (), (), "values: expected one for each time, at least one, found 0"),
        (SignalKind.CARBON, (0.0,), (-1.0,), r"values\[0\]: expected 0 to 2000, found -1.0"),
        (SignalKind.PRICE, (0.0,), (float("nan"),), r"values\[0\]: expected -1e\+06 to 1e\+06, found nan"),
        (
            SignalKind.PRICE,
            (5.0, 5.0),
            (1.0, 1.0),
            r"times_s\[1\]: expected after the one before, 5, found 5",
        ),
    ],
)
def test_an_invalid_signal_is_refused(
    kind: SignalKind, times_s: tuple[float, ...], values: tuple[float, ...], text: str
) -> None:
    with pytest.raises(InvalidFieldError, match=text):
        Signal(kind, times_s, values)
