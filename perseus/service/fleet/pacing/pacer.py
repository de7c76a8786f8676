"""What a job that follows a signal is to be told now: its window, and its pace in the present hour. Pure."""

from dataclasses import dataclass

from perseus.service.domain.inputs import SignalPaced
from perseus.service.domain.job_pacing import JobPacing
from perseus.service.domain.signals import PacingState, SignalRule, WorkWindow
from perseus.service.fleet.pacing.policy import look
from perseus.service.fleet.pacing.spending import SpeedCurve
from perseus.service.fleet.signals.outlook import Outlook

LEAST_BETWEEN_S = 1.0
_LOOKS_AN_HOUR = 4
"""Progress is measured against the plan so often while one of the signal's hours lasts."""

_LATE = 1.01
"""Times what can be done in time: less is noise, where all extra time is spent."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a job is to be told, and when to look again if nothing happens."""

    order: SignalPaced
    next_s: float


def decide(job: JobPacing, curve: SpeedCurve, now_s: float, outlook: Outlook | None) -> Decision:
    """Return how a job is to run now.

    Args:
        job: the job, which is planned.
        curve: its paces.
        now_s: since 1970.
        outlook: on its signal; None if nothing is known of that.
    """
    window, done_count = _window(job, curve, now_s)
    value = None
    if outlook is None:
        found = look(window, curve, now_s, done_count, None)
    else:
        found = look(window, curve, now_s, done_count, outlook.values, outlook.hour_s)
        value = float(outlook.values[0])
    left, left_s = window.iteration_count - done_count, window.end_s - now_s
    if left <= 0 or left_s <= 0:
        state = PacingState.DONE
    elif left > _LATE * curve.fastest_per_s * left_s:
        state = PacingState.LATE
    else:
        state = PacingState.BLIND if found.is_blind else PacingState.PACED
    pace_s = None if found.pace is curve.paces[0] else found.pace.iteration_time_s
    order = SignalPaced(job.rule, window, state, pace_s, value)
    return Decision(order, _next_s(now_s, window, outlook))


def _window(job: JobPacing, curve: SpeedCurve, now_s: float) -> tuple[WorkWindow, int]:
    """Return the window that counts now, and what is done in it: a horizon that is over begins anew."""
    rule, pacing = job.rule, job.pacing
    if pacing is not None and not (rule.extra_time is not None and now_s >= pacing.window.end_s):
        return pacing.window, pacing.done_count
    return _new_window(rule, curve, now_s), 0


def _new_window(rule: SignalRule, curve: SpeedCurve, now_s: float) -> WorkWindow:
    if rule.extra_time is not None:
        return WorkWindow.within_extra_time(now_s, rule.extra_time, curve.fastest_per_s)
    assert rule.work_until is not None
    # A deadline that was over when it could have begun leaves no time: as late as can be.
    end_s = max(rule.work_until.end_s, now_s + LEAST_BETWEEN_S)
    return WorkWindow(now_s, end_s, rule.work_until.iteration_count)


def _next_s(now_s: float, window: WorkWindow, outlook: Outlook | None) -> float:
    if outlook is None:
        return now_s + LEAST_BETWEEN_S
    hour_s = outlook.hour_s
    next_hour_s = hour_s * (now_s // hour_s + 1)
    soon_s = now_s + max(LEAST_BETWEEN_S, hour_s / _LOOKS_AN_HOUR)
    times_s = [next_hour_s, soon_s, *([window.end_s] if window.end_s > now_s else [])]
    return min(times_s)
