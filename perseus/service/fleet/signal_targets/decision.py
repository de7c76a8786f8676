"""The current decision for a job that follows a signal: its window and its target iteration time. Pure."""

from dataclasses import dataclass

from perseus.service.domain.inputs import SignalTargetSet
from perseus.service.domain.job_signal import JobSignal
from perseus.service.domain.signals import SignalRule, SignalTargetState, WorkWindow
from perseus.service.fleet.signal_targets.replanning import replan
from perseus.service.fleet.signal_targets.speed_curve import SpeedCurve
from perseus.service.fleet.signals.history import SignalForecast

MIN_INTERVAL_S = 1.0
_REPLANS_PER_HOUR = 4
"""How often targets are replanned with measured progress within one of the signal's hours."""

_LATE = 1.01
"""A job is late with more than this times the feasible work left: less is noise without extra time."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A job's target, and when to decide again if nothing happens before."""

    order: SignalTargetSet
    next_s: float


def decide(job: JobSignal, curve: SpeedCurve, now_s: float, forecast: SignalForecast | None) -> Decision:
    """Decide a job's target now.

    Args:
        job: the job, which has plans.
        curve: its speed curve.
        now_s: since 1970.
        forecast: of its signal; None if the signal is unknown.
    """
    window, done_count = _window(job, curve, now_s)
    value = None
    if forecast is None:
        found = replan(window, curve, now_s, done_count, None)
    else:
        found = replan(window, curve, now_s, done_count, forecast.values, forecast.hour_s)
        value = float(forecast.values[0])
    left, left_s = window.iteration_count - done_count, window.end_s - now_s
    if left <= 0 or left_s <= 0:
        state = SignalTargetState.DONE
    elif left > _LATE * curve.fastest_per_s * left_s:
        state = SignalTargetState.LATE
    else:
        state = SignalTargetState.NO_SIGNAL if found.has_no_signal else SignalTargetState.FOLLOWING
    target_time_s = None if found.point is curve.points[0] else found.point.iteration_time_s
    order = SignalTargetSet(job.rule, window, state, target_time_s, value)
    return Decision(order, _next_s(now_s, window, forecast))


def _window(job: JobSignal, curve: SpeedCurve, now_s: float) -> tuple[WorkWindow, int]:
    """Return the current window and the progress in it; a new horizon follows one that is over."""
    rule, signal_target = job.rule, job.signal_target
    if signal_target is not None and not (
        rule.extra_time is not None and now_s >= signal_target.window.end_s
    ):
        return signal_target.window, signal_target.done_count
    return _new_window(rule, curve, now_s), 0


def _new_window(rule: SignalRule, curve: SpeedCurve, now_s: float) -> WorkWindow:
    if rule.extra_time is not None:
        return WorkWindow.within_extra_time(now_s, rule.extra_time, curve.fastest_per_s)
    assert rule.work_until is not None
    # A deadline that had passed before the job could begin leaves the shortest window.
    end_s = max(rule.work_until.end_s, now_s + MIN_INTERVAL_S)
    return WorkWindow(now_s, end_s, rule.work_until.iteration_count)


def _next_s(now_s: float, window: WorkWindow, forecast: SignalForecast | None) -> float:
    if forecast is None:
        return now_s + MIN_INTERVAL_S
    hour_s = forecast.hour_s
    next_hour_s = hour_s * (now_s // hour_s + 1)
    soon_s = now_s + max(MIN_INTERVAL_S, hour_s / _REPLANS_PER_HOUR)
    times_s = [next_hour_s, soon_s, *([window.end_s] if window.end_s > now_s else [])]
    return min(times_s)
