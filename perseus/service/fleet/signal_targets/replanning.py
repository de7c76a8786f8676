"""A job that runs by a signal: how fast now, replanned as forecasts change and measured progress comes.

The extra time is spent over a horizon, or until a deadline: by its end so many iterations are to be done. At
every look the rest of them is planned over the rest of the time, with what the signal may be; only the pace
of the present hour is used. A pace is one of the job's, never a mixture, and never slower than the plan: what
rounding gains is slack for the next look. Where nothing is known of the signal, there is no slowdown; then
the time that is left is spent as soon as something is known again.

A power budget always wins: it asks for a slower pace than this one, never for a faster one, and what it costs
is made up for afterwards as far as the job can.
"""

import math
from dataclasses import dataclass

import numpy as np

from perseus.service.domain.signals import HOUR_S, WorkWindow
from perseus.service.fleet.signal_targets.speed_curve import Floats, SpeedCurve, SpeedPoint


@dataclass(frozen=True, slots=True)
class SpeedChoice:
    """What a look at the signal found.

    Attributes:
        pace: to run at now.
        is_blind: nothing is known of the signal, so there is no slowdown.
        is_late: the work can't be done in time any more.
    """

    point: SpeedPoint
    has_no_signal: bool
    is_late: bool


def hours_ahead(now_s: float, end_s: float, signal: Floats, hour_s: float = HOUR_S) -> tuple[Floats, Floats]:
    """Return how long each value of a signal counts from now to the end, and the values; `[N + 1]` both.

    The first is the rest of the present clock hour. After it, each value is there once, with all its hours: a
    signal that is too short repeats, and however long the time, there are no more of them.
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
    """Return how to run now.

    Args:
        window: the work, and the time for it.
        curve: the job's.
        now_s: since 1970; from the window's end on, and once the work is done, there is no slowdown.
        done_count: iterations since the window's begin, as measured.
        signal: the present hour of the clock and those after it, as known and forecast; where the window
            lasts longer, they repeat. None or empty if nothing is known.
        hour_s: how long such an hour lasts.
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
