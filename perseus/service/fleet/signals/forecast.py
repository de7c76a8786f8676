"""What a signal may be in the next hours, from the past ones.

Three ways, and each is what the next one has to beat. *Persistence*: as now. *Seasonal naive*: as at the same
hour of the last day that is known. *Regression*: for every number of hours ahead, how far the value will be
from the seasonal naive one, as a linear function of the last hours, of the same hour of earlier days and the
last week, of the last day's mean, and of the hour of the day and whether it is a weekend (in UTC), fitted by
ridge regression to the weeks before. It is fitted to what was known then; less than `LEAST_HISTORY_H` is not
enough, and then the seasonal naive stands in for it.

Hours count from 1970: hour 0 of a day is midnight UTC, and 1970 began on a Thursday.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DAY_H = 24
WEEK_H = 7 * DAY_H

MIN_HISTORY_H = 2 * WEEK_H + DAY_H
"""For a regression: two weeks of examples, beyond the day that each looks back at least."""

MAX_HISTORY_H = 26 * WEEK_H
"""That a regression is fitted to: a season, and what fitting costs stays bounded."""

REFIT_H = WEEK_H
"""A fit is used for so long."""

_RIDGE = 1.0
_THURSDAY = 3


def persistence(history: Floats, hour_count: int) -> Floats:
    """Return the last value for each of the next hours."""
    return np.full(hour_count, history[-1])


def seasonal_naive(history: Floats, hour_count: int) -> Floats:
    """Return the value at the same hour of the last day that is known; with less than a day, the last one."""
    if len(history) < DAY_H:
        return persistence(history, hour_count)
    return np.resize(history[-DAY_H:], hour_count)


class RegressionForecast:
    """Forecasts one hourly signal by regression; keeps its fits for a while."""

    def __init__(self) -> None:
        self._weights: dict[int, tuple[int, Floats]] = {}
        """By hours ahead: the hour until which it was fitted, and the features' weights."""

    def forecast(self, first_hour: int, history: Floats, hour_count: int) -> Floats:
        """Return the next hours' values.

        Args:
            first_hour: of the history, hours since 1970.
            history: hourly values `[N]`, the last of them of the hour that has just ended; at least one.
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
        # A signal does not leave the range that it was seen in by much; what is fitted may.
        forecast: Floats = np.clip(naive + made, history.min(), history.max())
        return forecast

    def _fitted(self, first_hour: int, history: Floats, means: Floats, ahead: int) -> Floats:
        end_hour = first_hour + len(history)
        known = self._weights.get(ahead)
        if known is not None and 0 <= end_hour - known[0] < REFIT_H:
            return known[1]
        origins = np.arange(max(WEEK_H, len(history) - MAX_HISTORY_H), len(history) - ahead)
        if len(origins) < WEEK_H:  # nothing has been seen that far ahead yet, or hardly
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
    """Return where the same hour as that many ahead was, on the last day that is known."""
    return origins + ahead - DAY_H * -(-ahead // DAY_H)


def _day_means(history: Floats) -> Floats:
    """Return the mean of the day that ends with each hour; meaningless on the first."""
    sums = np.concatenate([np.zeros(1), np.cumsum(history)])
    ends = np.arange(1, len(history) + 1)
    means: Floats = (sums[ends] - sums[np.maximum(0, ends - DAY_H)]) / DAY_H
    return means


def _features(first_hour: int, history: Floats, means: Floats, origins: Ints, ahead: Ints | int) -> Floats:
    """Return `[len(origins), _FEATURE_COUNT]`; each origin is the last hour known, `ahead` hours before."""
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
