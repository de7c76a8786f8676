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

from perseus.service.domain.bounds import check_range
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.fleet.pacing.spending import Floats, Pace, SpeedCurve
from perseus.service.fleet.signals.series import HOUR_S, SignalKind

MAX_EXTRA_TIME_PERCENT = 1000.0
MIN_HORIZON_S = HOUR_S
MAX_HORIZON_S = 366 * 24 * HOUR_S


@dataclass(frozen=True, slots=True)
class SignalPolicy:
    """Least signal × energy within some extra time.

    Attributes:
        kind: the signal: carbon or price.
        begin_s: since 1970, from when it counts.
        end_s: until when the work is to be done.
        iteration_count: the work.
    """

    kind: SignalKind
    begin_s: float
    end_s: float
    iteration_count: float

    @classmethod
    def within_extra_time(
        cls, kind: SignalKind, begin_s: float, horizon_s: float, extra_time_percent: float, full_speed: float
    ) -> "SignalPolicy":
        """Return the policy of doing in a horizon what takes so much less at full speed.

        Raises:
            InvalidFieldError: a figure is out of range.
        """
        check_range("horizon_s", horizon_s, MIN_HORIZON_S, MAX_HORIZON_S)
        check_range("extra_time_percent", extra_time_percent, 0, MAX_EXTRA_TIME_PERCENT)
        work = full_speed * horizon_s / (1 + extra_time_percent / 100)
        return cls(kind, begin_s, begin_s + horizon_s, work)

    def __post_init__(self) -> None:
        if not self.begin_s < self.end_s < math.inf:
            raise InvalidFieldError(field="end_s", expected=f"after {self.begin_s:g}", found=self.end_s)
        if not 0 < self.iteration_count < math.inf:
            raise InvalidFieldError(
                field="iteration_count", expected="a finite number above 0", found=self.iteration_count
            )


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


def hours_left(now_s: float, end_s: float) -> Floats:
    """Return how long each clock hour from now to the end lasts, the first and last ones cut; `[N]`."""
    first_s = HOUR_S * (math.floor(now_s / HOUR_S) + 1)
    edges_s = np.concatenate([[now_s], np.arange(first_s, end_s, HOUR_S), [end_s]])
    return np.diff(edges_s)


def look(
    policy: SignalPolicy, curve: SpeedCurve, now_s: float, done_count: float, signal: Floats | None
) -> Outlook:
    """Return how to run now.

    Args:
        policy: what is wanted.
        curve: the job's.
        now_s: since 1970; from the policy's end on, and once the work is done, there is no slowdown.
        done_count: iterations since the policy's begin, as measured.
        signal: the present hour of the clock and those after it, as known and forecast; where the policy
            lasts longer, they repeat. None or empty if nothing is known.
    """
    left = policy.iteration_count - done_count
    fastest = curve.paces[0]
    if now_s >= policy.end_s or left <= 0:
        return Outlook(fastest, is_blind=False, is_late=left > 0)
    is_late = left > curve.fastest_per_s * (policy.end_s - now_s) * (1 + 1e-9)
    if signal is None or not len(signal):
        return Outlook(fastest, is_blind=True, is_late=is_late)
    durations_s = hours_left(now_s, policy.end_s)
    speeds = curve.spend(durations_s, np.resize(signal, len(durations_s)), left)
    return Outlook(curve.at_least(float(speeds[0])), is_blind=False, is_late=is_late)
