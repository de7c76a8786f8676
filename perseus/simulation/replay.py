"""Replays a fleet: the state machine and the jobs' curves and policies are real, only the GPUs are simulated.

A job draws the power that its plans predict, apart from an error of its own and noise. It reaches a new
target a second after an urgent command, and an iteration after any other. Time advances in steps of a second
while a feed is in transition, in longer ones while a feed is limited, as measurements may ask for a cut, and
in the longest while nothing happens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from perseus.service.domain.job_signal import SpeedCurveBasis
from perseus.service.domain.power import Budget, Feed, FeedStatus
from perseus.service.domain.signals import HOUR_S, ExtraTime, SignalKind, WorkWindow
from perseus.service.fleet.power.budgets import limit_w
from perseus.service.fleet.power.curve import power_points
from perseus.service.fleet.power.demand import JobDemand, PowerPoint
from perseus.service.fleet.power.machine import PERIOD_S, FleetMachine
from perseus.service.fleet.power.messages import (
    BudgetCancelled,
    BudgetSet,
    Command,
    Input,
    JobChanged,
    JobLeft,
    PowerMeasured,
    SetTargetTime,
    Tick,
)
from perseus.service.fleet.signal_targets.from_frontier import speed_curve
from perseus.service.fleet.signal_targets.replanning import replan
from perseus.service.fleet.signal_targets.speed_curve import Floats
from perseus.service.fleet.signals.forecast import RegressionForecast, persistence, seasonal_naive
from perseus.service.fleet.signals.series import Signal
from perseus.solver import Frontier

Forecast = Literal["regression", "seasonal naive", "persistence", "perfect"]
"""How policies see a signal ahead: by the coordinator's forecast, by one of its baselines, or as it is."""

_FINE_S, _LIMITED_S, _COARSE_S = 1.0, 5.0, 20.0
_FINE_FOR_S = 120.0
"""How long time advances in fine steps after each event."""

_URGENT_S = 1.0
_J_PER_KWH = 3.6e6
_FORECAST_H = 72


@dataclass(frozen=True, slots=True)
class Straggler:
    """A pipeline that takes `factor` times longer between two times."""

    pipeline: int
    factor: float
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class ReplayedPolicy:
    """Least signal × energy within some extra time, over consecutive horizons."""

    kind: SignalKind
    extra_time: ExtraTime


@dataclass(frozen=True, slots=True)
class ReplayedJob:
    """A job with its frontier, its owner's terms, and its events. Times are seconds since 1970."""

    job_id: str
    frontier: Frontier
    pipeline_count: int
    feed: str
    tolerance_percent: float
    weight: float
    begin_s: float
    end_s: float
    policy: ReplayedPolicy | None = None
    stragglers: Sequence[Straggler] = ()
    power_error: float = 0.0

    @property
    def stock_time_s(self) -> float:
        """Time of an iteration with everything at its highest clock."""
        return self.frontier.baseline.iteration_time_s

    @property
    def stock_power_w(self) -> float:
        """Power of all its pipelines at that clock."""
        return self.pipeline_count * self.frontier.baseline.energy_j / self.stock_time_s


@dataclass(frozen=True, slots=True)
class ReplayedBudget:
    """A budget, when it is set, and when it is cancelled (infinite for never)."""

    budget: Budget
    known_s: float
    cancelled_s: float = float("inf")

    @property
    def over_s(self) -> float:
        """When it ends or is cancelled; infinite for never."""
        end_s = self.budget.end_s
        return self.cancelled_s if end_s is None else min(end_s, self.cancelled_s)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet to replay."""

    begin_s: float
    end_s: float
    feeds: Mapping[str, Feed]
    jobs: Sequence[ReplayedJob]
    budgets: Sequence[ReplayedBudget] = ()
    signals: Mapping[SignalKind, Signal] = field(default_factory=dict)
    noise: float = 0.01
    seed: int = 0
    forecast: Forecast = "regression"


@dataclass(frozen=True, slots=True)
class JobTotals:
    """A job's totals; carbon and cost are None without that signal.

    `stock_*`: of the same number of iterations at the highest clock, run at full speed from the job's
    beginning on.
    """

    iteration_count: float
    time_s: float
    energy_j: float
    carbon_g: float | None
    cost: float | None
    stock_time_s: float
    stock_energy_j: float
    stock_carbon_g: float | None
    stock_cost: float | None


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay. Arrays have a value for each step `[N]`.

    Attributes:
        times_s: the ends of the steps, since 1970.
        durations_s: of the steps.
        speeds: per job, relative to stock; NaN while it does not run.
        powers_w: per job.
        feeds_w, limits_w, power_caps_w: per feed: power, limit in force, and power cap; infinite if none.
        signals: per kind; NaN where unknown.
        statuses: the published statuses of feeds, with their times.
        outcomes: the budgets that were in force, each with its feed's status at its end.
        totals: per job.
    """

    times_s: Floats
    durations_s: Floats
    speeds: Mapping[str, Floats]
    powers_w: Mapping[str, Floats]
    feeds_w: Mapping[str, Floats]
    limits_w: Mapping[str, Floats]
    power_caps_w: Mapping[str, Floats]
    signals: Mapping[SignalKind, Floats]
    statuses: Sequence[tuple[float, FeedStatus]]
    outcomes: Sequence[tuple[ReplayedBudget, FeedStatus]]
    totals: Mapping[str, JobTotals]


class _Job:
    """A job on simulated GPUs."""

    def __init__(self, job: ReplayedJob) -> None:
        self.job = job
        self.own_time_s = job.stock_time_s
        self.done_count = 0.0
        self.points: tuple[PowerPoint, ...] = ()
        self.is_running = False
        self.targets: list[tuple[float, float | None]] = []
        """Pending targets: when each comes into force, and the iteration time; in order."""
        self._target_time_s: float | None = None
        self._window: WorkWindow | None = None
        self._done_before = 0.0
        self._known: dict[tuple[float, tuple[tuple[int, float], ...]], tuple[PowerPoint, ...]] = {}
        self._curve = speed_curve(SpeedCurveBasis(job.frontier, job.stock_time_s))

    @property
    def point(self) -> PowerPoint:
        """The operating point at which it runs."""
        if self._target_time_s is None:
            return self.points[0]
        target_time_s = self._target_time_s
        return next(
            (p for p in self.points if p.iteration_time_s >= target_time_s * (1 - 1e-9)), self.points[-1]
        )

    def arrive(self, now_s: float) -> None:
        """Apply the targets that are due."""
        while self.targets and self.targets[0][0] <= now_s:
            self._target_time_s = self.targets.pop(0)[1]

    def update(self, now_s: float, forecast: "Forecasts") -> bool:
        """Follow stragglers and the job's policy; return whether its points have changed."""
        before = self.points
        job = self.job
        slowdowns = {
            each.pipeline: each.factor for each in job.stragglers if each.begin_s <= now_s < each.end_s
        }
        if job.policy is not None:
            self.own_time_s = self._policy_time_s(now_s, job.policy, forecast)
        key = self.own_time_s, tuple(sorted(slowdowns.items()))
        if key not in self._known:
            placement = [[{job.feed: 1.0}] * job.frontier.pipeline.schedule.stage_count] * job.pipeline_count
            self._known[key] = power_points(
                job.frontier, placement, own_time_s=self.own_time_s, slowdowns=slowdowns
            )
        self.points = self._known[key]
        return self.points is not before

    def speed_per_s(self) -> float:
        """Return the present iterations per second."""
        return 1 / self.point.iteration_time_s

    def _policy_time_s(self, now_s: float, policy: ReplayedPolicy, forecast: "Forecasts") -> float:
        if self._window is None or now_s >= self._window.end_s:
            self._done_before = self.done_count
            full_speed = 1 / self.job.stock_time_s
            self._window = WorkWindow.within_extra_time(now_s, policy.extra_time, full_speed)
        signal = forecast.ahead(policy.kind, now_s)
        found = replan(self._window, self._curve, now_s, self.done_count - self._done_before, signal)
        return found.point.iteration_time_s


class Forecasts:
    """Known and forecast values of each signal, computed once an hour."""

    def __init__(self, signals: Mapping[SignalKind, Signal], method: Forecast) -> None:
        self._signals, self._method = signals, method
        self._models = {kind: RegressionForecast() for kind in signals}
        self._made: dict[tuple[SignalKind, int], Floats | None] = {}

    def ahead(self, kind: SignalKind, now_s: float) -> Floats | None:
        """Return the values from the present hour on; None if the known values are too old."""
        hour = int(now_s // HOUR_S)
        if (kind, hour) not in self._made:
            self._made[kind, hour] = self._ahead(kind, hour)
        return self._made[kind, hour]

    def _ahead(self, kind: SignalKind, hour: int) -> Floats | None:
        known = self._signals[kind].until(hour * HOUR_S)
        if known is None or known.value_at(hour * HOUR_S) is None:
            return None
        first_s, history = known.hourly(hour * HOUR_S)
        if not len(history):
            return None
        first = int(first_s // HOUR_S)
        missing = hour - first - len(history)
        match self._method:
            case "persistence":
                ahead = persistence(history, missing + _FORECAST_H)
            case "seasonal naive":
                ahead = seasonal_naive(history, missing + _FORECAST_H)
            case "regression":
                ahead = self._models[kind].forecast(first, history, missing + _FORECAST_H)
            case "perfect":
                # Beyond the signal's end, nobody knows better than the last day.
                real = self._signals[kind].hourly((hour + _FORECAST_H) * HOUR_S)[1][len(history) :]
                rest_h = missing + _FORECAST_H - len(real)
                ahead = np.concatenate([real, seasonal_naive(np.concatenate([history, real]), rest_h)])
        return ahead[missing:]


def replay(
    fleet: Fleet,
    on_progress: Callable[[float], None] = lambda _: None,
    machine: FleetMachine | None = None,
) -> Replay:
    """Replay a fleet from its beginning to its end; `machine` in place of a new one."""
    return _Replayer(fleet, machine or FleetMachine(fleet.feeds)).run(on_progress)


class _Replayer:
    def __init__(self, fleet: Fleet, machine: FleetMachine) -> None:
        self._fleet = fleet
        self._machine = machine
        self._random = np.random.default_rng(fleet.seed)
        self._jobs = {job.job_id: _Job(job) for job in fleet.jobs}
        self._forecasts = Forecasts(fleet.signals, fleet.forecast)
        self._statuses: list[tuple[float, FeedStatus]] = []
        self._outcomes: list[tuple[ReplayedBudget, FeedStatus]] = []
        self._feeds = sorted({job.feed for job in fleet.jobs} | fleet.feeds.keys())
        self._set: set[str] = set()
        self._fine_until_s = fleet.begin_s
        self._rows: list[tuple[float, float]] = []
        self._speeds: dict[str, list[float]] = {job_id: [] for job_id in self._jobs}
        self._powers_w: dict[str, list[float]] = {job_id: [] for job_id in self._jobs}
        self._limits_w: dict[str, list[float]] = {name: [] for name in self._feeds}
        self._power_caps_w: dict[str, list[float]] = {name: [] for name in self._feeds}

    def run(self, on_progress: Callable[[float], None]) -> Replay:
        begin_s, end_s = self._fleet.begin_s, self._fleet.end_s
        now_s = begin_s
        while now_s < end_s:
            self._happen(now_s)
            self._apply(Tick(), now_s)
            until_s = self._next_s(now_s)
            self._outcomes += [
                (each, self._machine.statuses[each.budget.feed])
                for each in self._fleet.budgets
                if max(each.known_s, each.budget.start_s) <= now_s
                and until_s == min(each.over_s, self._fleet.end_s)
            ]
            self._draw(now_s, until_s)
            if now_s // HOUR_S != until_s // HOUR_S:
                on_progress((until_s - begin_s) / (end_s - begin_s))
            now_s = until_s
        return self._result()

    def _happen(self, now_s: float) -> None:
        """Set and cancel budgets, start and end jobs, and update their points."""
        current: dict[str, Budget] = {}
        for each in self._fleet.budgets:
            if each.known_s <= now_s < each.cancelled_s and not each.budget.is_over(now_s):
                current[each.budget.budget_id] = each.budget
                if each.budget.budget_id not in self._set:
                    self._set.add(each.budget.budget_id)
                    self._apply(BudgetSet(each.budget), now_s)
        for budget_id in sorted(self._set - current.keys()):
            self._set.discard(budget_id)
            self._apply(BudgetCancelled(budget_id), now_s)
        self._current = list(current.values())
        for job_id, job in self._jobs.items():
            runs = job.job.begin_s <= now_s < job.job.end_s
            if runs and job.update(now_s, self._forecasts) | (not job.is_running):
                demand = JobDemand(
                    job_id, job.points, tolerance_percent=job.job.tolerance_percent, weight=job.job.weight
                )
                self._apply(JobChanged(demand, job.point.iteration_time_s), now_s)
            elif job.is_running and not runs:
                self._apply(JobLeft(job_id), now_s)
            job.is_running = runs

    def _apply(self, event: Input, now_s: float) -> None:
        commands: list[Command] = self._machine.handle(event, now_s)
        if commands or not isinstance(event, Tick | PowerMeasured):
            self._fine_until_s = now_s + _FINE_FOR_S
        for command in commands:
            if isinstance(command, SetTargetTime):
                job = self._jobs[command.job_id]
                delay_s = _URGENT_S if command.is_urgent else job.point.iteration_time_s
                job.targets = [each for each in job.targets if each[0] <= now_s]
                job.targets.append((now_s + delay_s, command.iteration_time_s))
            else:
                self._statuses.append((now_s, command))

    def _next_s(self, now_s: float) -> float:
        """Return when the step ends: at the next known event at the latest."""
        wake_s = self._machine.wake_s(now_s)
        is_fine = now_s < self._fine_until_s or self._is_moving()
        is_limited = any(self._machine.is_limited(name) for name in self._feeds)
        times_s = [
            now_s + (_FINE_S if is_fine else _LIMITED_S if is_limited else _COARSE_S),
            self._fleet.end_s,
            now_s - now_s % HOUR_S + HOUR_S,
        ]
        if wake_s > now_s + PERIOD_S:
            times_s.append(wake_s)
        for each in self._fleet.budgets:
            times_s += [
                each.known_s,
                each.cancelled_s,
                each.budget.start_s,
                each.budget.end_s or float("inf"),
            ]
        for job in self._fleet.jobs:
            times_s += [job.begin_s, job.end_s, *(t for s in job.stragglers for t in (s.begin_s, s.end_s))]
        for running in self._jobs.values():
            times_s += [time_s for time_s, _ in running.targets]
        return min(time_s for time_s in times_s if time_s > now_s + 1e-6)

    def _is_moving(self) -> bool:
        return any(status.in_transition for status in self._machine.statuses.values())

    def _draw(self, now_s: float, until_s: float) -> None:
        """Advance time, and report the power to the state machine."""
        duration_s = until_s - now_s
        self._rows.append((until_s, duration_s))
        measured: dict[str, dict[str, float]] = {}
        # Means over longer steps are less noisy.
        noise = self._fleet.noise / max(1.0, duration_s) ** 0.5
        for job_id, job in self._jobs.items():
            power_w, speed = 0.0, float("nan")
            deviation = noise * self._random.standard_normal()
            if job.is_running:
                job.arrive(now_s)
                point = job.point
                power_w = point.power_w[job.job.feed] * (1 + job.job.power_error) * (1 + deviation)
                speed = job.job.stock_time_s / point.iteration_time_s
                job.done_count += duration_s * job.speed_per_s()
                measured[job_id] = {job.job.feed: power_w}
            self._speeds[job_id].append(speed)
            self._powers_w[job_id].append(power_w)
        for name in self._feeds:
            power_cap_w = self._machine.power_cap_w(name)
            own = [budget for budget in self._current if budget.feed == name]
            feed = self._fleet.feeds.get(name, Feed(name))
            self._limits_w[name].append(limit_w(own, feed, now_s))
            self._power_caps_w[name].append(power_cap_w)
        self._apply(PowerMeasured(duration_s, measured, {}), until_s)

    def _result(self) -> Replay:
        times_s, durations_s = (np.array(column) for column in zip(*self._rows, strict=True))
        powers_w = {job_id: np.array(values) for job_id, values in self._powers_w.items()}
        signals = {
            kind: np.array([_or_nan(signal.value_at(time_s)) for time_s in times_s - durations_s])
            for kind, signal in self._fleet.signals.items()
        }
        return Replay(
            times_s=times_s,
            durations_s=durations_s,
            speeds={job_id: np.array(values) for job_id, values in self._speeds.items()},
            powers_w=powers_w,
            feeds_w={
                name: np.sum([powers_w[job.job_id] for job in self._fleet.jobs if job.feed == name], axis=0)
                for name in self._feeds
            },
            limits_w={name: np.array(values) for name, values in self._limits_w.items()},
            power_caps_w={name: np.array(values) for name, values in self._power_caps_w.items()},
            signals=signals,
            statuses=tuple(self._statuses),
            outcomes=tuple(self._outcomes),
            totals={
                job_id: self._totals(job, powers_w[job_id], times_s, durations_s, signals)
                for job_id, job in self._jobs.items()
            },
        )

    def _totals(
        self,
        job: _Job,
        power_w: Floats,
        times_s: Floats,
        durations_s: Floats,
        signals: Mapping[SignalKind, Floats],
    ) -> JobTotals:
        begin_s = max(job.job.begin_s, self._fleet.begin_s)
        stock_s = job.done_count * job.job.stock_time_s
        overlap_s = np.clip(begin_s + stock_s - (times_s - durations_s), 0, durations_s)
        overlap_s[times_s <= begin_s] = 0
        stock_j = job.job.stock_power_w * (1 + job.job.power_error) * overlap_s
        energy_j = power_w * durations_s

        def weighed(kind: SignalKind, joules: Floats) -> float | None:
            if kind not in signals:
                return None
            return float(np.nansum(signals[kind] * joules) / _J_PER_KWH)

        return JobTotals(
            iteration_count=job.done_count,
            time_s=float(min(job.job.end_s, self._fleet.end_s) - begin_s),
            energy_j=float(energy_j.sum()),
            carbon_g=weighed(SignalKind.CARBON, energy_j),
            cost=weighed(SignalKind.PRICE, energy_j),
            stock_time_s=stock_s,
            stock_energy_j=float(stock_j.sum()),
            stock_carbon_g=weighed(SignalKind.CARBON, stock_j),
            stock_cost=weighed(SignalKind.PRICE, stock_j),
        )


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
