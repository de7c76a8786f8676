"""Forecasts: each method, that none looks ahead, and that regression learns patterns."""

import numpy as np
import pytest

from perseus.service.fleet.signals.forecast import (
    DAY_H,
    MIN_HISTORY_H,
    WEEK_H,
    Floats,
    RegressionForecast,
    persistence,
    seasonal_naive,
)


def days(count: int, noise: float = 0.0) -> Floats:
    """Return a daily wave, larger on weekends, and slow weather."""
    hours = np.arange(count * DAY_H)
    random = np.random.default_rng(3)
    weather = np.cumsum(random.standard_normal(len(hours))) * noise
    wave: Floats = (
        200 + 50 * np.sin(2 * np.pi * hours / DAY_H) * (1 + 0.5 * (hours // DAY_H % 7 >= 5)) + weather
    )
    return wave


def level_grid(count: int) -> Floats:
    """Return the intensity of a grid that changes slowly, by little of its mean."""
    changes = np.random.default_rng(5).standard_normal(count * DAY_H)
    hours = np.zeros(len(changes))
    for hour in range(1, len(hours)):
        hours[hour] = 0.98 * hours[hour - 1] + changes[hour]
    return 600 + 4 * hours


def test_persistence_and_seasonal_naive() -> None:
    history = np.arange(50.0)
    assert persistence(history, 3).tolist() == [49.0, 49.0, 49.0]
    assert seasonal_naive(history, 26).tolist() == [*range(26, 50), 26.0, 27.0]
    assert seasonal_naive(np.array([7.0]), 2).tolist() == [7.0, 7.0]


def test_a_day_of_history_is_repeated() -> None:
    history = days(1)
    assert RegressionForecast().forecast(0, history, 30).tolist() == seasonal_naive(history, 30).tolist()


def test_days_of_history_tell_which_baseline_is_better() -> None:
    """Too short for a regression: it repeats days that are alike, and keeps a value that wanders."""
    alike, wandering = days(8), level_grid(8)
    assert len(alike) < MIN_HISTORY_H
    made = RegressionForecast().forecast(0, alike, 30)
    assert made.tolist() == pytest.approx(seasonal_naive(alike, 30).tolist())
    made = RegressionForecast().forecast(0, wandering, 1)
    assert made.tolist() == pytest.approx([wandering[-1]])


@pytest.mark.parametrize("ahead", [1, 6])
@pytest.mark.parametrize(
    "hours", [level_grid(140), days(140, noise=3.0), days(140)], ids=["level", "noisy", "regular"]
)
def test_no_worse_than_persistence_and_seasonal_naive(hours: Floats, ahead: int) -> None:
    model = RegressionForecast()
    errors = []
    for known in range(8 * WEEK_H, len(hours) - ahead, 13):
        history = hours[:known]
        made = (
            model.forecast(0, history, ahead),
            persistence(history, ahead),
            seasonal_naive(history, ahead),
        )
        errors.append([abs(float(each[-1]) - hours[known + ahead - 1]) for each in made])
    ours, as_now, as_yesterday = np.mean(errors, axis=0).tolist()
    assert ours <= 1.03 * min(as_now, as_yesterday)


def test_regression_learns_weekends() -> None:
    wave = days(10 * 7)
    known = len(wave) - WEEK_H
    ahead = RegressionForecast().forecast(4 * DAY_H, wave[:known], 2 * DAY_H)  # hour 0 is on a Monday
    naive = seasonal_naive(wave[:known], 2 * DAY_H)
    error, naive_error = (np.abs(each - wave[known:][: 2 * DAY_H]).mean() for each in (ahead, naive))
    assert error < 0.4 * naive_error


def test_a_fit_is_renewed_after_a_week() -> None:
    wave = days(80, noise=2.0)
    model = RegressionForecast()
    model.forecast(0, wave[:1000], 2)
    kept = model.forecast(0, wave[: 1000 + WEEK_H - 1], 2)
    assert kept.tolist() != RegressionForecast().forecast(0, wave[: 1000 + WEEK_H - 1], 2).tolist()
    anew = model.forecast(0, wave[: 1000 + WEEK_H], 2)
    assert anew.tolist() == RegressionForecast().forecast(0, wave[: 1000 + WEEK_H], 2).tolist()


def test_forecasts_stay_within_the_past_range() -> None:
    wave = np.concatenate([days(40), np.full(30, 1000.0)])
    made = RegressionForecast().forecast(0, wave, 100)
    assert wave.min() <= made.min()
    assert made.max() <= 1000.0
