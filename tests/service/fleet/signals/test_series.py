"""What a signal's values count for, and until when."""

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
def test_the_last_value_counts_for_a_while_and_then_nothing_is_known(
    hours: float, value: float | None
) -> None:
    assert CARBON.value_at(hours * HOUR_S) == value


def test_an_hours_value_is_known_when_it_is_over() -> None:
    assert CARBON.until(0.5 * HOUR_S) is None
    known = CARBON.until(2.5 * HOUR_S)
    assert known is not None
    assert known.values == (10.0, 20.0)


def test_hours_have_the_mean_of_what_counts_in_them_and_gaps_are_bridged() -> None:
    times_s = tuple(HOUR_S * t for t in (0, 0.5, 1, 4, 5))
    signal = Signal(SignalKind.PRICE, times_s, (0.0, 10.0, 20.0, 50.0, -60.0), HOUR_S, stale_s=0.0)
    first_s, values = signal.hourly(6 * HOUR_S)
    assert first_s == 0.0
    assert values.tolist() == pytest.approx([5.0, 20.0, 30.0, 40.0, 50.0, -60.0])
    assert len(signal.hourly(2.5 * HOUR_S)[1]) == 2


def test_hours_of_a_signal_that_has_none_yet() -> None:
    assert len(Signal(SignalKind.CARBON, (100.0,), (1.0,)).hourly(200.0)[1]) == 0


def test_steady_values_stay_what_they_are() -> None:
    times_s = np.arange(100) * HOUR_S
    values = np.random.default_rng(1).uniform(0, 500, 100)
    signal = Signal(SignalKind.CARBON, times_s.tolist(), values.tolist())
    assert signal.hourly(100 * HOUR_S)[1] == pytest.approx(values)


@pytest.mark.parametrize(
    ("kind", "times_s", "values", "text"),
    [
        (SignalKind.CARBON, (), (), "values: expected one for each time, at least one, found 0"),
        (SignalKind.CARBON, (0.0,), (-1.0,), r"values\[0\]: expected 0 to 1e\+06, found -1.0"),
        (SignalKind.PRICE, (0.0,), (float("nan"),), r"values\[0\]: expected -1e\+06 to 1e\+06, found nan"),
        (
            SignalKind.PRICE,
            (5.0, 5.0),
            (1.0, 1.0),
            r"times_s\[1\]: expected after the one before, 5, found 5",
        ),
    ],
)
def test_what_is_no_signal_is_refused(
    kind: SignalKind, times_s: tuple[float, ...], values: tuple[float, ...], text: str
) -> None:
    with pytest.raises(InvalidFieldError, match=text):
        Signal(kind, times_s, values)
