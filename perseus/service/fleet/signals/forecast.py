"""Forecasts of a signal's next hours from past ones.

There are three methods, and each is the baseline of the next. *Persistence*: as now. *Seasonal naive*: as at
the same hour of the last known day. *Regression*: for every number of hours ahead, it predicts the deviation
from the seasonal naive value as a linear function of the last hours, of the same hour of earlier days and the
last week, of the last day's mean, and of the hour of the day and whether it is a weekend (in UTC). Ridge
regression fits it to past weeks, with only the values known at each time. With less than `MIN_HISTORY_H` of
history, the seasonal naive forecast is used instead.

Hours count from 1970: hour 0 of a day is midnight UTC, and 1970 began on a Thursday.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DAY_H = 24
WEEK_H = 7 * DAY_H

MIN_HISTORY_H = 2 * WEEK_H + DAY_H
"""Required for a regression: two weeks of examples, after the day that each looks back at least."""

MAX_HISTORY_H = 26 * WEEK_H
"""History that a regression is fitted to: a season, at a bounded cost."""

REFIT_H = WEEK_H
"""How long a fit is used."""

_RIDGE = 1.0
_THURSDAY = 3


def persistence(history: Floats, hour_count: int) -> Floats:
    """Return the last value for each of the next hours."""
    return np.full(hour_count, history[-1])


def seasonal_naive(history: Floats, hour_count: int) -> Floats:
    """Return the values at the same hours of the last known day; with less than a day, the last value."""
    if len(history) < DAY_H:
        return persistence(history, hour_count)
    return np.resize(history[-DAY_H:], hour_count)


class RegressionForecast:
    """Forecasts one hourly signal by regression; keeps its fits for a while."""

    def __init__(self) -> None:
        self._weights: dict[int, tuple[int, Floats]] = {}
        """By hours ahead: the end of the history that was fitted, and the features' weights."""

    def forecast(self, first_hour: int, history: Floats, hour_count: int) -> Floats:
        """Return the next hours' values.

        Args:
            first_hour: of the history, hours since 1970.
            history: hourly values `[N]`, at least one; the last is of the hour that has just ended.
            hour_count: how many hours to look ahead.
        """
        naive = seasonal_naive(history, hour_count)
        if len(history) < MIN_HISTORY_H:
            return naive
        means = _day_means(history)
        ahead = np.arange(1, hour_count + 1)
        weights = np.stack([self._fitted(first_hour, history, means, each) for each in ahead.tolist()])
        now = np.full(hour_count, len(history) - 1)
        made = (_features(first_hour, history, means, now, ahead) * weights).sum(axis=1)
        # A signal hardly leaves its past range, but a fit may.
        forecast: Floats = np.clip(naive + made, history.min(), history.max())
        return forecast

    def _fitted(self, first_hour: int, history: Floats, means: Floats, ahead: int) -> Floats:
        end_hour = first_hour + len(history)
        known = self._weights.get(ahead)
        if known is not None and 0 <= end_hour - known[0] < REFIT_H:
            return known[1]
        origins = np.arange(max(WEEK_H, len(history) - MAX_HISTORY_H), len(history) - ahead)
        if len(origins) < WEEK_H:  # too few examples that far ahead
            weights: Floats = np.zeros(_FEATURE_COUNT)
        else:
            features = _features(first_hour, history, means, origins, ahead)
            wanted = history[origins + ahead] - history[_same_hour(origins, ahead)]
            square = features.T @ features + _RIDGE * np.eye(_FEATURE_COUNT)
            weights = np.linalg.solve(square, features.T @ wanted).astype(np.float64)
        self._weights[ahead] = end_hour, weights
        return weights


_FEATURE_COUNT = 9 + DAY_H + 1


def _same_hour(origins: Ints, ahead: Ints | int) -> Ints:
    """Return the index of the same hour as that many ahead, on the last known day."""
    return origins + ahead - DAY_H * -(-ahead // DAY_H)


def _day_means(history: Floats) -> Floats:
    """Return the mean of the day that ends with each hour; meaningless on the first day."""
    sums = np.concatenate([np.zeros(1), np.cumsum(history)])
    ends = np.arange(1, len(history) + 1)
    means: Floats = (sums[ends] - sums[np.maximum(0, ends - DAY_H)]) / DAY_H
    return means


def _features(first_hour: int, history: Floats, means: Floats, origins: Ints, ahead: Ints | int) -> Floats:
    """Return `[len(origins), _FEATURE_COUNT]`; each origin is the last known hour, `ahead` hours before."""
    target = first_hour + origins + ahead
    same = _same_hour(origins, ahead)
    scale = max(1e-9, float(np.abs(history).mean()))
    lagged = [
        history[origins],
        history[origins - 1],
        history[origins - 2],
        history[origins - DAY_H],
        history[origins - DAY_H - 1],
        history[same],
        history[np.maximum(0, same - DAY_H)],
        history[np.maximum(0, origins + ahead - WEEK_H * -(-ahead // WEEK_H))],
        means[origins],
    ]
    hour_of_day = np.eye(DAY_H)[target % DAY_H]
    is_weekend = (target // DAY_H + _THURSDAY) % 7 >= 5
    return np.concatenate(
        [np.stack(lagged, axis=1) / scale, hour_of_day, is_weekend[:, None].astype(np.float64)], axis=1
    )
