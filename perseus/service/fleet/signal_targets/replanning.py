"""The speed of a job that follows a signal, replanned as forecasts change and measured progress arrives.

The job spends its extra time over a horizon, or until a deadline, and must finish a number of iterations by
its end. Each replanning spreads the remaining iterations over the remaining time with the forecast signal,
but only the speed of the present hour is used. That speed is one of the job's points, never a mixture, and
never slower than planned; the next replanning uses the slack that rounding gains. While the signal is
unknown, there is no slowdown; the job spends the time that is left once the signal is known again.

A power budget always wins: it may ask for a longer iteration time than this one, never for a shorter one. The
job makes up for the loss afterwards as far as it can.
"""

import math
from dataclasses import dataclass

import numpy as np

from perseus.service.domain.signals import HOUR_S, WorkWindow
from perseus.service.fleet.signal_targets.speed_curve import Floats, SpeedCurve, SpeedPoint


@dataclass(frozen=True, slots=True)
class SpeedChoice:
    """The result of a replanning.

    Attributes:
        point: to run at now.
        has_no_signal: the signal is unknown, so there is no slowdown.
        is_late: the work can't be done in time any more.
    """

    point: SpeedPoint
    has_no_signal: bool
    is_late: bool


def hours_ahead(now_s: float, end_s: float, signal: Floats, hour_s: float = HOUR_S) -> tuple[Floats, Floats]:
    """Return how long each value of a signal applies from now to the end, and the values; both `[N + 1]`.

    The first entry is the rest of the present clock hour. After it, each value appears once, with the time of
    all its hours: a signal that is too short repeats, so that the size doesn't grow with the time.
    """
    first_s = min(end_s, hour_s * (math.floor(now_s / hour_s) + 1)) - now_s
    count = len(signal)
    whole_count, last_s = divmod(end_s - now_s - first_s, hour_s)
    rounds, rest = divmod(int(whole_count), count)
    durations_s = np.full(count, rounds * hour_s)
    durations_s[np.arange(1, rest + 1) % count] += hour_s
    durations_s[(rest + 1) % count] += last_s
    return np.concatenate([[first_s], durations_s]), np.concatenate([signal[:1], signal])


def replan(
    window: WorkWindow,
    curve: SpeedCurve,
    now_s: float,
    done_count: float,
    signal: Floats | None,
    hour_s: float = HOUR_S,
) -> SpeedChoice:
    """Return the point to run at now.

    Args:
        window: the work, and the time for it.
        curve: the job's speed curve.
        now_s: since 1970; from the window's end on, and once the work is done, there is no slowdown.
        done_count: measured iterations since the window began.
        signal: known and forecast values from the present clock hour on; they repeat if the window lasts
            longer. None or empty if the signal is unknown.
        hour_s: the duration of each value.
    """
    left = window.iteration_count - done_count
    fastest = curve.points[0]
    if now_s >= window.end_s or left <= 0:
        return SpeedChoice(fastest, has_no_signal=False, is_late=left > 0)
    is_late = left > curve.fastest_per_s * (window.end_s - now_s) * (1 + 1e-9)
    if signal is None or not len(signal):
        return SpeedChoice(fastest, has_no_signal=True, is_late=is_late)
    durations_s, values = hours_ahead(now_s, window.end_s, signal, hour_s)
    speeds = curve.spend(durations_s, values, left)
    return SpeedChoice(curve.at_least(float(speeds[0])), has_no_signal=False, is_late=is_late)
