"""Forecasts of a signal's next hours from past ones.

*Persistence*: as now. *Seasonal naive*: as at the same hour of the last known day. *Regression*: for every
number of hours ahead, it predicts the deviation from the seasonal naive value as a linear function of the
differences between the last hours, the same hour of earlier days and of the last week, and the last day's
mean, of the hour of the day and of whether it is a weekend (in UTC). Ridge regression fits it to past weeks.

Which of the three is best depends on the grid and on the number of hours ahead, so they are compared on hours
that the fits have not seen. The history's examples are split into consecutive parts, and each part is
predicted by fits to those before it. The penalty of the ridge regression and the mixture of the three are
those of the least mean absolute error, so on these hours no forecast is worse than the better of the first
two. Only these are mixed while the history is not `MIN_HISTORY_H` longer than the number of hours ahead.

Hours count from 1970: hour 0 of a day is midnight UTC, and 1970 began on a Thursday.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DAY_H = 24
WEEK_H = 7 * DAY_H

MIN_HISTORY_H = 2 * WEEK_H
"""Required for a regression, beyond the hours ahead: each example looks a week back, and a week of them."""

MAX_HISTORY_H = 13 * WEEK_H
"""History that a forecast is fitted to: a season, as patterns change with it."""

REFIT_H = WEEK_H
"""How long a fit is used, unless the history has grown by a quarter before."""

_PART_COUNT = 5
"""Parts of the examples; all but the first are held out once."""

_MIN_EXAMPLES = 2 * DAY_H
"""For a fit that is only compared: with fewer, it says nothing about a fit to all examples."""

_PENALTIES = 10.0 ** np.arange(-2, 5)
"""Of standardised features: from next to none, to one that outweighs a season of examples."""

_TENTHS = np.array([(i, j) for i in range(11) for j in range(11 - i)]) / 10
"""Mixtures: the shares of the regression and of persistence; the rest is the seasonal naive forecast's."""

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
        self._weights: dict[int, tuple[int, int, Floats]] = {}
        """By hours ahead: the end and length of the history that was fitted, and the features' weights."""

    def forecast(self, first_hour: int, history: Floats, hour_count: int) -> Floats:
        """Return the next hours' values.

        Args:
            first_hour: of the history, hours since 1970.
            history: hourly values `[N]`, at least one; the last is of the hour that has just ended.
            hour_count: how many hours to look ahead.
        """
        naive = seasonal_naive(history, hour_count)
        if len(history) <= DAY_H:
            return naive
        first_hour += max(0, len(history) - MAX_HISTORY_H)
        history = history[-MAX_HISTORY_H:]
        columns = _columns(history)
        ahead = np.arange(1, hour_count + 1)
        weights = np.stack([self._fitted(first_hour, columns, each) for each in ahead.tolist()])
        now = np.full(hour_count, len(history) - 1)
        made = (_features(first_hour, columns, now, ahead) * weights).sum(axis=1)
        # A signal hardly leaves its past range, but a fit may.
        forecast: Floats = np.clip(naive + made, history.min(), history.max())
        return forecast

    def _fitted(self, first_hour: int, columns: Floats, ahead: int) -> Floats:
        history, *_ = columns
        length = len(history)
        end_hour = first_hour + length
        known = self._weights.get(ahead)
        if known is not None and 0 <= end_hour - known[0] < min(REFIT_H, known[1] // 4):
            return known[2]
        is_long = length - ahead >= MIN_HISTORY_H
        origins = np.arange(WEEK_H if is_long else DAY_H, length - ahead)
        weights: Floats = np.zeros(_FEATURE_COUNT)
        if len(origins):
            features = _features(first_hour, columns, origins, ahead)
            wanted = history[origins + ahead] - history[_same_hour(origins, ahead)]
            weights = _fit(features, wanted, ahead, is_long=is_long)
        self._weights[ahead] = end_hour, length, weights
        return weights


def _fit(features: Floats, wanted: Floats, ahead: int, *, is_long: bool) -> Floats:
    """Return the features' weights `[F]`, for deviations `wanted` `[N]` that many hours ahead."""
    # A fit knows only examples whose outcome is known when a held-out part begins.
    edges = np.linspace(0, len(wanted), _PART_COUNT + 1).astype(int)[1:].tolist()
    parts = [(begin - ahead, slice(begin, end)) for begin, end in pairwise(edges)]
    parts = [(known, held) for known, held in parts if is_long and known >= _MIN_EXAMPLES]
    weights: Floats = np.zeros(_FEATURE_COUNT)
    held_out, made = slice(None), np.zeros(len(wanted))
    if parts:
        held_out = slice(parts[0][1].start, None)
        fits = [_ridge(features[:known], wanted[:known]) @ features[held].T for known, held in parts]
        by_penalty = np.concatenate(fits, axis=1)
        best = int(np.argmin(np.abs(by_penalty - wanted[held_out]).mean(axis=1)))
        made, weights = by_penalty[best], _ridge(features, wanted)[best]
    as_now = features[held_out, _FROM_NAIVE]
    errors = np.abs(_TENTHS @ np.stack([made, as_now]) - wanted[held_out]).mean(axis=1)
    regression, persisting = _TENTHS[int(np.argmin(errors))].tolist()
    weights = regression * weights
    weights[_FROM_NAIVE] += persisting
    return weights


def _ridge(features: Floats, wanted: Floats) -> Floats:
    """Return the features' weights of ridge regression for each penalty `[len(_PENALTIES), F]`."""
    means, scales = features.mean(axis=0), features.std(axis=0)
    scales[scales <= 1e-9 * scales.max()] = 1.0
    standard = (features - means) / scales
    values, vectors = np.linalg.eigh(standard.T @ standard)
    along = vectors.T @ (standard.T @ (wanted - wanted.mean()))
    weights: Floats = (along / (np.maximum(0.0, values) + _PENALTIES[:, None])) @ vectors.T / scales
    weights[:, _CONSTANT] = wanted.mean() - weights @ means  # centred, the constant has no weight
    return weights


_FEATURE_COUNT = 10 + DAY_H + 2
_FROM_NAIVE, _CONSTANT = 0, -1


def _same_hour(origins: Ints, ahead: Ints | int) -> Ints:
    """Return the index of the same hour as that many ahead, on the last known day."""
    return origins + ahead - DAY_H * -(-ahead // DAY_H)


def _columns(history: Floats) -> Floats:
    """Return the history, the mean of the day that ends with each hour, and that of the hour on seven days.

    The result is `[3, N]`; a mean is too low until it has all its hours.
    """
    return np.stack([history, _trailing_mean(history, 1, DAY_H), _trailing_mean(history, DAY_H, 7)])


def _trailing_mean(history: Floats, step: int, count: int) -> Floats:
    kernel = np.zeros((count - 1) * step + 1)
    kernel[::step] = 1 / count
    return np.convolve(history, kernel)[: len(history)]


def _features(first_hour: int, columns: Floats, origins: Ints, ahead: Ints | int) -> Floats:
    """Return `[len(origins), _FEATURE_COUNT]`; each origin is the last known hour, `ahead` hours before.

    All but the first are meaningless for origins in the first week.
    """
    history, day_means, hour_means = columns
    same = _same_hour(origins, ahead)
    now, before, earlier, day_ago, before_day_ago, naive, day_before, week_before = (
        history[np.maximum(0, index)]
        for index in (
            origins,
            origins - 1,
            origins - 2,
            origins - DAY_H,
            origins - DAY_H - 1,
            same,
            same - DAY_H,
            origins + ahead - WEEK_H * -(-ahead // WEEK_H),
        )
    )
    differences = [
        now - naive,
        now - before,
        before - earlier,
        now - day_ago,
        before - before_day_ago,
        now - hour_means[origins],
        naive - day_before,
        naive - week_before,
        naive - day_means[origins],
        naive - hour_means[np.maximum(0, same)],
    ]
    target = first_hour + origins + ahead
    hour_of_day = np.eye(DAY_H)[target % DAY_H]
    is_weekend = (target // DAY_H + _THURSDAY) % 7 >= 5
    others = np.stack([is_weekend, np.ones(len(origins))], axis=1)
    return np.concatenate([np.stack(differences, axis=1), hour_of_day, others], axis=1)
