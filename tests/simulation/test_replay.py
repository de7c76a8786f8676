"""Replays on a small pipeline: power, progress and statuses."""

from dataclasses import replace

import numpy as np
import pytest

from perseus.service.domain.power import Budget, Feed
from perseus.service.domain.signals import HOUR_S, ExtraTime, SignalKind
from perseus.service.fleet.signals.forecast import RegressionForecast
from perseus.service.fleet.signals.series import Signal
from perseus.simulation.replay import (
    Fleet,
    Forecast,
    Forecasts,
    Replay,
    ReplayedBudget,
    ReplayedJob,
    ReplayedPolicy,
    Straggler,
    replay,
)
from perseus.solver import Frontier, solve
from tests.solver.pipelines import small_pipeline


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return solve(small_pipeline(), point_count=40)


def job(frontier: Frontier, job_id: str = "x", hours: float = 2.0) -> ReplayedJob:
    return ReplayedJob(job_id, frontier, 2, "a", 50.0, 1.0, 0.0, hours * HOUR_S)


def fleet(*jobs: ReplayedJob, hours: float = 2.0) -> Fleet:
    return Fleet(0.0, hours * HOUR_S, {"a": Feed("a")}, jobs, noise=0.0)


def test_a_job_without_budgets_follows_its_plan_for_no_slowdown(frontier: Frontier) -> None:
    totals = replay(fleet(job(frontier))).totals["x"]
    stock_s = frontier.baseline.iteration_time_s
    assert totals.iteration_count == pytest.approx(2 * HOUR_S / stock_s)
    assert totals.stock_time_s == pytest.approx(totals.time_s)
    planned_j = 2 * frontier.plan_within(stock_s).energy_until_j(stock_s)
    assert totals.energy_j / totals.iteration_count == pytest.approx(planned_j)
    assert totals.stock_energy_j / totals.iteration_count == pytest.approx(2 * frontier.baseline.energy_j)


def test_the_same_seed_gives_the_same_replay(frontier: Frontier) -> None:
    noisy = replace(fleet(job(frontier)), noise=0.02, seed=7)
    one, other = replay(noisy), replay(noisy)
    assert one.powers_w["x"].tolist() == other.powers_w["x"].tolist()
    assert replay(replace(noisy, seed=8)).powers_w["x"].tolist() != one.powers_w["x"].tolist()


def budget(share: float, stock_w: float) -> Budget:
    return Budget("b", "a", share * stock_w, 0.5 * HOUR_S, HOUR_S)


def between(done: Replay, begin_s: float, end_s: float) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return (done.times_s - done.durations_s >= begin_s) & (done.times_s <= end_s)


def test_a_budget_is_kept_while_it_lasts_and_costs_speed(frontier: Frontier) -> None:
    some = [job(frontier, "x"), replace(job(frontier, "y"), weight=5.0, power_error=0.02)]
    stock_w = sum(each.stock_power_w for each in some)
    limited = replace(fleet(*some), budgets=[ReplayedBudget(budget(0.8, stock_w), 0.0)])
    done = replay(limited)
    held = between(done, 0.5 * HOUR_S + 5, HOUR_S)
    assert done.feeds_w["a"][held].max() <= 0.8 * stock_w
    assert done.limits_w["a"][held].tolist() == [0.8 * stock_w] * held.sum()
    assert done.speeds["x"][held].min() < done.speeds["y"][held].min()
    assert done.speeds["x"][-1] == 1.0
    assert all(status.is_compliant for _, status in done.statuses)


def test_a_budget_that_is_cancelled_ends(frontier: Frontier) -> None:
    stock_w = job(frontier).stock_power_w
    cancelled = ReplayedBudget(budget(0.8, stock_w), 0.0, cancelled_s=0.7 * HOUR_S)
    done = replay(replace(fleet(job(frontier)), budgets=[cancelled]))
    after = between(done, 0.7 * HOUR_S + 60, HOUR_S)
    assert done.speeds["x"][after].tolist() == [1.0] * after.sum()
    assert np.isinf(done.limits_w["a"][after]).all()


def test_a_budget_below_the_tolerances_is_reported_as_not_kept(frontier: Frontier) -> None:
    strict = replace(job(frontier), tolerance_percent=1.0)
    limited = replace(fleet(strict), budgets=[ReplayedBudget(budget(0.8, strict.stock_power_w), 0.0)])
    message = [status for _, status in replay(limited).statuses if not status.is_compliant]
    assert message[0].to_pause == ("x",)


def test_a_straggler_slows_its_job_and_leaves_it_less_power(frontier: Frontier) -> None:
    slow = replace(job(frontier), stragglers=[Straggler(1, 1.2, 0.5 * HOUR_S, HOUR_S)])
    done = replay(fleet(slow))
    held = between(done, 0.5 * HOUR_S, HOUR_S)
    factor = frontier.baseline.iteration_time_s / frontier.t_min_s
    assert done.speeds["x"][held] == pytest.approx(factor / 1.2)
    assert done.powers_w["x"][held].max() < done.powers_w["x"][0]
    assert done.speeds["x"][-1] == 1.0


def carbon(hours: int) -> Signal:
    """Return a signal that is clean at night."""
    values = [100.0 if hour % 24 < 12 else 400.0 for hour in range(hours)]
    return Signal(SignalKind.CARBON, [hour * HOUR_S for hour in range(hours)], values)


def test_a_policy_spends_its_time_where_energy_is_dirty(frontier: Frontier) -> None:
    policy = ReplayedPolicy(SignalKind.CARBON, ExtraTime(4.0, 24 * HOUR_S))
    steered = replace(job(frontier), begin_s=72 * HOUR_S, end_s=96 * HOUR_S, policy=policy)
    days = replace(fleet(steered, hours=96), signals={SignalKind.CARBON: carbon(96)})
    done = replay(replace(days, begin_s=72 * HOUR_S))
    totals = done.totals["x"]
    assert totals.carbon_g is not None
    assert totals.stock_carbon_g is not None
    assert totals.time_s == pytest.approx(1.04 * totals.stock_time_s, rel=1e-3)
    assert totals.cost is None
    clean = done.signals[SignalKind.CARBON] == 100.0
    assert done.speeds["x"][clean].mean() > done.speeds["x"][~clean].mean() + 0.02
    assert totals.carbon_g / totals.stock_carbon_g < totals.energy_j / totals.stock_energy_j


def test_a_signal_that_ends_leaves_the_job_without_a_slowdown(frontier: Frontier) -> None:
    policy = ReplayedPolicy(SignalKind.CARBON, ExtraTime(4.0, 24 * HOUR_S))
    steered = replace(job(frontier, hours=20), policy=policy)
    days = replace(fleet(steered, hours=20), signals={SignalKind.CARBON: carbon(5)})
    done = replay(days)
    assert done.speeds["x"][between(done, 9 * HOUR_S, 20 * HOUR_S)].min() == 1.0
    assert np.isnan(done.signals[SignalKind.CARBON][-1])


def test_forecasts_are_of_the_method_asked_for() -> None:
    values = [100.0 + hour for hour in range(200)]
    signal = Signal(SignalKind.PRICE, [HOUR_S * hour for hour in range(200)], values)

    def ahead(method: Forecast) -> list[float]:
        found = Forecasts({SignalKind.PRICE: signal}, method).ahead(SignalKind.PRICE, 150 * HOUR_S)
        assert found is not None
        assert len(found) == 72
        return list(found)

    assert ahead("perfect") == values[150:] + values[-24:-2]
    assert ahead("persistence") == [values[149]] * 72
    assert ahead("seasonal naive") == 3 * values[126:150]
    assert ahead("regression") == list(RegressionForecast().forecast(0, np.array(values[:150]), 72))
