"""Targets of a job that follows a signal: its window and speed, hour by hour, with measured progress."""

from dataclasses import replace

import numpy as np
import pytest

from perseus.service.domain.job_signal import JobSignal
from perseus.service.domain.signals import (
    HOUR_S,
    ExtraTime,
    SignalKind,
    SignalRule,
    SignalTarget,
    SignalTargetState,
    WorkUntil,
)
from perseus.service.fleet.signal_targets.decision import MIN_INTERVAL_S, Decision, decide
from perseus.service.fleet.signal_targets.speed_curve import SpeedCurve, SpeedPoint
from perseus.service.fleet.signals.history import SignalForecast

RULE = SignalRule(SignalKind.CARBON, ExtraTime(5, 24 * HOUR_S))
UNTIL = SignalRule(SignalKind.PRICE, work_until=WorkUntil(36_000, 11 * HOUR_S))
CURVE = SpeedCurve(
    [SpeedPoint(time_s, 1 / time_s, power_w) for time_s, power_w in [(1.0, 1000), (1.1, 850), (1.2, 760)]]
)
DIRTY = SignalForecast(HOUR_S, np.array([500.0, *[100.0] * 23]))
CLEAN = SignalForecast(HOUR_S, np.array([100.0, *[500.0] * 23]))


def after(job: JobSignal, decision: Decision, done_count: int = 0) -> JobSignal:
    """Return the job after a decision and some progress."""
    order = decision.order
    signal_target = SignalTarget(order.window, order.state, order.target_time_s, order.value, done_count)
    return replace(job, signal_target=signal_target)


def test_a_dirty_hour_is_slow_and_a_clean_one_is_not() -> None:
    job = JobSignal(RULE, None, None)
    dirty, clean = (decide(job, CURVE, 0.0, forecast) for forecast in (DIRTY, CLEAN))
    assert (dirty.order.target_time_s, dirty.order.value) == (1.2, 500.0)
    assert (clean.order.target_time_s, clean.order.value) == (None, 100.0)
    assert dirty.order.state is clean.order.state is SignalTargetState.FOLLOWING
    window = dirty.order.window
    assert (window.begin_s, window.end_s) == (0.0, 24 * HOUR_S)
    assert window.iteration_count == pytest.approx(24 * HOUR_S / 1.05)
    assert dirty.next_s == HOUR_S / 4


@pytest.mark.parametrize(
    ("now_s", "forecast", "next_s"),
    [
        (0.0, None, MIN_INTERVAL_S),
        (HOUR_S - 60, DIRTY, HOUR_S),
        (10.9 * HOUR_S, replace(DIRTY, hour_s=9 * HOUR_S), 11 * HOUR_S),
        (11 * HOUR_S, DIRTY, 11.25 * HOUR_S),
    ],
    ids=["no signal", "next hour", "end of the window", "window is over"],
)
def test_the_next_decision_comes_in_time(
    now_s: float, forecast: SignalForecast | None, next_s: float
) -> None:
    job = JobSignal(UNTIL, None, None)
    job = after(job, decide(job, CURVE, 0.0, DIRTY))
    assert decide(job, CURVE, now_s, forecast).next_s == next_s


def test_a_new_horizon_follows_one_that_is_over() -> None:
    job = JobSignal(RULE, None, None)
    job = after(job, decide(job, CURVE, 0.0, DIRTY), 80_000)
    found = decide(job, CURVE, 23 * HOUR_S, DIRTY)
    assert job.signal_target is not None
    assert found.order.window == job.signal_target.window
    found = decide(job, CURVE, 24 * HOUR_S + 7, CLEAN)
    assert found.order.window.begin_s == 24 * HOUR_S + 7


def test_without_a_signal_there_is_no_slowdown_until_it_is_known_again() -> None:
    job = JobSignal(RULE, None, None)
    blind = decide(job, CURVE, 0.0, None).order
    assert (blind.state, blind.target_time_s, blind.value) == (SignalTargetState.NO_SIGNAL, None, None)
    job = after(job, decide(job, CURVE, 0.0, None), 3 * 3600)
    again = decide(job, CURVE, 3 * HOUR_S, DIRTY).order
    assert (again.state, again.target_time_s) == (SignalTargetState.FOLLOWING, 1.2)


def test_a_deadline_that_cannot_be_met_is_late_and_finished_work_is_done() -> None:
    job = JobSignal(UNTIL, None, None)
    first = decide(job, CURVE, 0.0, DIRTY)
    assert (first.order.state, first.order.window.end_s) == (SignalTargetState.FOLLOWING, 11 * HOUR_S)
    late = decide(after(job, first, 100), CURVE, 5 * HOUR_S, DIRTY).order
    assert (late.state, late.target_time_s) == (SignalTargetState.LATE, None)
    done = decide(after(job, first, 36_000), CURVE, 5 * HOUR_S, DIRTY).order
    assert (done.state, done.target_time_s) == (SignalTargetState.DONE, None)
    over = decide(after(job, first, 35_000), CURVE, 11 * HOUR_S, DIRTY).order
    assert (over.state, over.target_time_s) == (SignalTargetState.DONE, None)
    too_late = decide(JobSignal(UNTIL, None, None), CURVE, 12 * HOUR_S, DIRTY).order
    assert (too_late.state, too_late.target_time_s) == (SignalTargetState.LATE, None)
