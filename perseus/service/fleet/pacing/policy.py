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
from perseus.service.fleet.pacing.spending import Floats, Pace, SpeedCurve


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a look at the signal found.

    Attributes:
        pace: to run at now.
        is_blind: nothing is known of the signal, so there is no slowdown.
        is_late: the work can't be done in time any more.
    """

    pace: Pace
    is_blind: bool
    is_late: bool


def hours_left(now_s: float, end_s: float, hour_s: float = HOUR_S) -> Floats:
    """Return how long each clock hour from now to the end lasts, the first and last ones cut; `[N]`.

    `hour_s`: of a signal with finer values, how long one of them counts.
    """
    first_s = hour_s * (math.floor(now_s / hour_s) + 1)
    edges_s = np.concatenate([[now_s], np.arange(first_s, end_s, hour_s), [end_s]])
    return np.diff(edges_s)


def look(
    window: WorkWindow,
    curve: SpeedCurve,
    now_s: float,
    done_count: float,
    signal: Floats | None,
    hour_s: float = HOUR_S,
) -> Outlook:
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
    fastest = curve.paces[0]
    if now_s >= window.end_s or left <= 0:
        return Outlook(fastest, is_blind=False, is_late=left > 0)
    is_late = left > curve.fastest_per_s * (window.end_s - now_s) * (1 + 1e-9)
    if signal is None or not len(signal):
        return Outlook(fastest, is_blind=True, is_late=is_late)
    durations_s = hours_left(now_s, window.end_s, hour_s)
    speeds = curve.spend(durations_s, np.resize(signal, len(durations_s)), left)
    return Outlook(curve.at_least(float(speeds[0])), is_blind=False, is_late=is_late)
