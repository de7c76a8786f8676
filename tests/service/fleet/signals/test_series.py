"""Which value of a signal is valid, and until when."""

import numpy as np
import pytest

from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.signals import HOUR_S, SignalKind
from perseus.service.fleet.signals.series import Signal

CARBON = Signal(SignalKind.CARBON, (0.0, HOUR_S, 3 * HOUR_S), (10.0, 20.0, 40.0), HOUR_S, stale_s=HOUR_S)


@pytest.mark.parametrize(
    ("hours", "value"),
    [(0, 10.0), (0.9, 10.0), (1, 20.0), (2.9, 20.0), (3, 40.0), (4.9, 40.0), (5, None), (-1, None)],
)
def test_the_last_value_stays_valid_for_a_while_and_then_the_signal_is_unknown(
    hours: float, value: float | None
) -> None:
    assert CARBON.value_at(hours * HOUR_S) == value


def test_an_hours_value_is_known_only_after_the_hour() -> None:
    assert CARBON.until(0.5 * HOUR_S) is None
    known = CARBON.until(2.5 * HOUR_S)
    assert known is not None
    assert known.values == (10.0, 20.0)


def test_hours_have_the_mean_of_their_valid_values_and_gaps_are_interpolated() -> None:
    times_s = tuple(HOUR_S * t for t in (0, 0.5, 1, 4, 5))
    signal = Signal(SignalKind.PRICE, times_s, (0.0, 10.0, 20.0, 50.0, -60.0), HOUR_S, stale_s=0.0)
    first_s, values = signal.hourly(6 * HOUR_S)
    assert first_s == 0.0
    assert values.tolist() == pytest.approx([5.0, 20.0, 30.0, 40.0, 50.0, -60.0])
    assert len(signal.hourly(2.5 * HOUR_S)[1]) == 2


def test_a_signal_without_a_whole_hour_has_no_hours() -> None:
    assert len(Signal(SignalKind.CARBON, (100.0,), (1.0,)).hourly(200.0)[1]) == 0


def test_constant_values_stay_constant() -> None:
    times_s = np.arange(100) * HOUR_S
    values = np.random.default_rng(1).uniform(0, 500, 100)
    signal = Signal(SignalKind.CARBON, times_s.tolist(), values.tolist())
    assert signal.hourly(100 * HOUR_S)[1] == pytest.approx(values)


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
