"""Running by a carbon signal: the savings on a published year, and the errors of forecasts.

`python -m benchmarks.carbon` also draws `docs/images/carbon.png`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.fleet_jobs import frontier
from benchmarks.harness import DATA, Cell, Column, Table, main
from perseus.service.domain.job_signal import SpeedCurveBasis
from perseus.service.domain.signals import HOUR_S, SignalKind, WorkWindow
from perseus.service.fleet.signal_targets.from_frontier import speed_curve
from perseus.service.fleet.signal_targets.replanning import replan
from perseus.service.fleet.signal_targets.speed_curve import Floats, SpeedCurve
from perseus.service.fleet.signals.forecast import (
    DAY_H,
    WEEK_H,
    RegressionForecast,
    persistence,
    seasonal_naive,
)
from perseus.service.signals.csv_file import read_signal_csv

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "carbon.png"
_EXTRA_PERCENT = (0.0, 2.5, 5.0)
_HORIZONS_H = (1, 6, 24)
_J_PER_KWH = 3.6e6
_LOOK_AHEAD_H = 48


def run() -> Sequence[Table]:
    signal = read_signal_csv(DATA / "carbon" / "ciso-2022.csv", SignalKind.CARBON, "avg_CI")
    first_s, hours = signal.hourly(signal.times_s[-1] + HOUR_S)
    first_hour = int(first_s // HOUR_S)
    model = RegressionForecast()
    forecasts = {
        known: model.forecast(first_hour, hours[:known], _LOOK_AHEAD_H) for known in range(WEEK_H, len(hours))
    }
    level, model = _level_grid(len(hours)), RegressionForecast()
    level_ahead = {
        known: model.forecast(first_hour, level[:known], max(_HORIZONS_H))
        for known in range(len(level) // 2, len(level))
    }
    weeks = _Weeks(hours, forecasts)
    rows = [weeks.row(extra_percent) for extra_percent in _EXTRA_PERCENT]
    draw(weeks, PICTURE)
    return [
        Table(
            "Carbon of a week's training, GPT-3 175B, A100 SXM, 48 microbatches, California 2022",
            (
                Column("extra time, %", ".1f"),
                Column("weeks", "d"),
                Column("stock, kg", ".0f"),
                Column("plan at T_min: less, %", ".2f"),
                Column("spent evenly: less, %", ".2f"),
                Column("by forecast: less, %", ".2f"),
                Column("foreseen: less, %", ".2f"),
                Column("gain by forecast, points", ".2f"),
                Column("foreseen, points", ".2f"),
                Column("share of foresight's gain, %", ".0f"),
                Column("latest, % of the time", ".3f"),
            ),
            tuple(rows),
            "Against stock, for the iterations of a week at stock in the extended time. One pipeline, every "
            "week of the year but the first, replanned every hour with its own plans; it knows the past "
            "hours. Evenly and foreseen: ideal mixtures of plans, with all hours of the week known. Gains "
            "are points of stock's carbon over spending the same time evenly; latest: delay of the end of "
            "the work in the worst week.",
        ),
        Table(
            "Forecasts of carbon intensity: mean absolute error, gCO2/kWh",
            (
                Column("grid"),
                Column("hours ahead", "d"),
                Column("forecasts", "d"),
                Column("Perseus", ".2f"),
                Column("persistence", ".2f"),
                Column("seasonal naive", ".2f"),
                Column("over the better one", ".3f"),
            ),
            (*_errors("California 2022", hours, forecasts), *_errors("level, made up", level, level_ahead)),
            "From every hour of the second half of the year, fitted once a week to the past hours; the "
            "method was chosen on the first half. The level grid is artificial: it wanders by 3 % of its "
            "mean of 600 gCO2/kWh and hardly swings by day; California's mean is "
            f"{hours.mean():.0f} gCO2/kWh. 24 hours ahead, persistence and seasonal naive are the same.",
        ),
    ]


def _hours_left(now_s: float, end_s: float) -> Floats:
    """Return the length of each clock hour from now, a whole hour, to the end; the last may be shorter."""
    return np.diff([*np.arange(now_s, end_s, HOUR_S), end_s])


class _Weeks:
    def __init__(self, hours: Floats, forecasts: dict[int, Floats]) -> None:
        self._hours, self._forecasts = hours, forecasts
        stock = frontier("a100-sxm").baseline
        self._stock_s, self._stock_w = stock.iteration_time_s, stock.energy_j / stock.iteration_time_s
        self.curve: SpeedCurve = speed_curve(SpeedCurveBasis(frontier("a100-sxm"), stock.iteration_time_s))

    def row(self, extra_percent: float) -> tuple[Cell, ...]:
        length_h = WEEK_H * (1 + extra_percent / 100)
        sums = np.zeros(5)
        latest = 0.0
        begins = [b for b in range(WEEK_H, len(self._hours), WEEK_H) if b + length_h <= len(self._hours)]
        for begin in begins:
            *grams, late = self.week(begin, extra_percent)[0]
            sums += grams
            latest = max(latest, late)
        stock_g, planned_g, even_g, ours_g, foreseen_g = sums.tolist()
        less = [100 * (1 - grams / stock_g) for grams in (planned_g, even_g, ours_g, foreseen_g)]
        gain, foreseen = (round(each - less[1], 9) + 0.0 for each in less[2:])
        share = 100 * gain / foreseen if foreseen > 1e-6 else None
        return (
            extra_percent, len(begins), stock_g / 1000, *less, gain, foreseen, share, 100 * latest,
        )  # fmt: skip

    def week(self, begin: int, extra_percent: float) -> tuple[tuple[float, ...], Floats]:
        """Return the grams at stock, at T_min, evenly, by forecast and foreseen; the delay; our speeds."""
        end_s = HOUR_S * (begin + WEEK_H * (1 + extra_percent / 100))
        policy = WorkWindow(HOUR_S * begin, end_s, WEEK_H * HOUR_S / self._stock_s)
        durations_s = _hours_left(policy.begin_s, end_s)
        signal = self._hours[begin : begin + len(durations_s)]
        week = self._hours[begin : begin + WEEK_H]
        stock_g = self._stock_w * HOUR_S * week.sum() / _J_PER_KWH
        planned_g = self.curve.power_w(1 / self._stock_s) * HOUR_S * week.sum() / _J_PER_KWH
        even = policy.iteration_count / durations_s.sum()
        even_g = self.curve.power_w(even) * float(durations_s @ signal) / _J_PER_KWH
        foreseen = self.curve.spend(durations_s, signal, policy.iteration_count)
        foreseen_w = np.array([self.curve.power_w(speed) for speed in foreseen])
        foreseen_g = float((foreseen_w * durations_s) @ signal) / _J_PER_KWH
        done = ours_g = 0.0
        now_s = policy.begin_s
        speeds = []
        for hour, duration_s in enumerate(durations_s.tolist()):
            point = replan(policy, self.curve, now_s, done, self._forecasts[begin + hour]).point
            left = policy.iteration_count - done
            worked_s = min(duration_s, left / point.speed_per_s)  # it stops when the work is done
            done += worked_s * point.speed_per_s
            ours_g += point.power_w * worked_s * signal[hour] / _J_PER_KWH
            now_s += duration_s
            speeds.append(point.speed_per_s * self._stock_s)
        late_s = max(0.0, policy.iteration_count - done) / self.curve.fastest_per_s
        ours_g += self.curve.power_w(self.curve.fastest_per_s) * late_s * signal[-1] / _J_PER_KWH
        late = late_s / (end_s - policy.begin_s)
        return (stock_g, planned_g, even_g, ours_g, foreseen_g, late), np.array(speeds)

    def signal(self, begin: int, count: int) -> Floats:
        """Return some hours of the signal."""
        return self._hours[begin : begin + count]


def _errors(grid: str, hours: Floats, forecasts: Mapping[int, Floats]) -> Iterator[tuple[Cell, ...]]:
    """Yield a row for each number of hours ahead, for the second half of the hours."""
    for ahead in _HORIZONS_H:
        errors: list[tuple[float, ...]] = []
        for known in range(len(hours) // 2, len(hours) - ahead + 1):
            actual = hours[known + ahead - 1]
            made = (
                forecasts[known][ahead - 1],
                persistence(hours[:known], ahead)[-1],
                seasonal_naive(hours[:known], ahead)[-1],
            )
            errors.append(tuple(abs(float(value) - actual) for value in made))
        ours, as_now, as_yesterday = np.mean(errors, axis=0).tolist()
        yield grid, ahead, len(errors), ours, as_now, as_yesterday, ours / min(as_now, as_yesterday)


def _level_grid(hour_count: int) -> Floats:
    """Return the intensity of a grid that wanders slowly by 3 % of its mean, and hardly swings by day."""
    changes = 4 * np.random.default_rng(0).standard_normal(hour_count)
    hours = np.arange(hour_count)
    wandering = np.zeros(hour_count)
    for hour in range(1, hour_count):
        wandering[hour] = 0.98 * wandering[hour - 1] + changes[hour]
    level: Floats = 600 + wandering + 5 * np.sin(2 * np.pi * hours / DAY_H)
    return level


def draw(weeks: _Weeks, path: Path) -> None:
    """Draw a week in June: the signal and the resulting speed."""
    begin = 23 * WEEK_H
    figure = Figure(figsize=(9, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    _, speeds = weeks.week(begin, 5.0)
    hours = np.arange(len(speeds))
    above.plot(hours, weeks.signal(begin, len(speeds)), color="tab:green", drawstyle="steps-post")
    above.set_ylabel("gCO2/kWh")
    for extra_percent in _EXTRA_PERCENT:
        _, speeds = weeks.week(begin, extra_percent)
        label = f"{extra_percent:g} % extra time"
        below.plot(np.arange(len(speeds)), 100 * speeds, drawstyle="steps-post", label=label)
    below.set_ylabel("speed, % of stock")
    below.set_xlabel("hours")
    below.legend(frameon=False, fontsize=8, loc="lower left")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main("carbon", run)
