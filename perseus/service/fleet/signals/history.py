"""A signal's history and its forecast, from its source if it has one, otherwise our own.

An hour of a signal is a clock hour, or shorter if its values are finer.
"""

import math
from dataclasses import dataclass

import numpy as np

from perseus.service.domain.signals import HOUR_S
from perseus.service.fleet.signals.forecast import DAY_H, MAX_HISTORY_H, RegressionForecast
from perseus.service.fleet.signals.series import Floats, Signal

FORECAST_H = 3 * DAY_H
MAX_HOURS = 10_000
"""The longest forecast, in hours of the signal: more than a year of clock hours."""


@dataclass(frozen=True, slots=True, eq=False)
class SignalForecast:
    """A signal's values from the present hour on `[N]`, at least one, and the duration of each."""

    hour_s: float
    values: Floats


class SignalHistory:
    """The history of one signal. Another thread may make the forecast, one at a time.

    Attributes:
        version: rises with every update.
    """

    def __init__(self) -> None:
        self.version = 0
        self._signal: Signal | None = None
        self._model = RegressionForecast()
        self._made: tuple[int, int, SignalForecast | None] | None = None
        self._hourly_means: dict[int, float | None] = {}

    def take(self, signal: Signal, now_s: float) -> None:
        """Add the source's latest values, which may include its forecast."""
        since_s = now_s - MAX_HISTORY_H * HOUR_S
        self._signal = signal.after(self._signal, since_s)
        self.version += 1
        self._hourly_means.clear()

    def value_at(self, now_s: float) -> float | None:
        """Return the value at a time, if there is a valid one."""
        return None if self._signal is None else self._signal.value_at(now_s)

    def mean_in_hour(self, hour: int) -> float | None:
        """Return the mean of the valid values in an hour, counted since 1970."""
        if self._signal is None:
            return None
        if hour not in self._hourly_means:
            if len(self._hourly_means) >= FORECAST_H:
                self._hourly_means.clear()
            (mean,) = self._signal.means(HOUR_S * np.array([hour, hour + 1], dtype=np.float64)).tolist()
            self._hourly_means[hour] = None if math.isnan(mean) else mean
        return self._hourly_means[hour]

    def forecast_at(self, now_s: float) -> SignalForecast | None:
        """Return the signal's present value and forecast; None if no value is valid now."""
        version, signal = self.version, self._signal  # an update may arrive meanwhile
        if signal is None or signal.value_at(now_s) is None:
            return None
        hour_s = min(HOUR_S, signal.valid_s)
        hour = int(now_s // hour_s)
        made = self._made
        if made is None or made[:2] != (version, hour):
            made = self._made = version, hour, self._combined(signal, hour, hour_s, now_s)
        return made[2]

    def _combined(self, signal: Signal, hour: int, hour_s: float, now_s: float) -> SignalForecast | None:
        ahead_s = max(FORECAST_H * HOUR_S, signal.known_end_s - now_s)
        count = min(MAX_HOURS, math.ceil(ahead_s / hour_s))
        edges_s = hour_s * np.arange(hour, hour + count + 1, dtype=np.float64)
        values = signal.means(edges_s)
        # A stale value that stays valid for lack of a newer one is not a forecast.
        is_known = ~np.isnan(values) & (edges_s[:-1] < signal.known_end_s)
        own = self._own_forecast(signal, now_s)
        if own is None:
            known_count = int(np.argmin(is_known)) if not is_known.all() else count
            values = values[: max(1, known_count)]  # replanning repeats it after that
        else:
            clock_hours = (edges_s[:-1] // HOUR_S).astype(int) - int(now_s // HOUR_S)
            values = np.where(is_known, values, own[np.minimum(clock_hours, len(own) - 1)])
        return SignalForecast(hour_s, values)

    def _own_forecast(self, signal: Signal, now_s: float) -> Floats | None:
        """Return our own forecast from the present clock hour on; None without history."""
        hour = int(now_s // HOUR_S)
        first_s, history = signal.hourly(hour * HOUR_S)
        if not len(history):
            return None
        first = int(first_s // HOUR_S)
        missing = hour - first - len(history)
        return self._model.forecast(first, history, missing + FORECAST_H)[missing:]
