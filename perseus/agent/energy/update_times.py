"""The update times of an energy counter.

A poll locates an update only to a few milliseconds. But the counter updates with a steady period of its own,
so all polls together locate every update to a fraction of that: few steady periods fit into every poll
interval.

This matters most if the training iteration happens to be a whole number of counter periods. The counter then
samples the same few moments of every iteration, and errors of their times do not average out.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_MIN_JITTER_S = 50e-6
_BISECTIONS = 50
_PHASE_ERROR_SHARE = 5.0  # at least √3 times the root mean square error, found by simulation


@dataclass(frozen=True, slots=True)
class UpdateTimes:
    """The moments at which the counter moved, and their errors: individual and common ones."""

    times_s: Array
    jitter_s: float
    phase_error_s: float


def find_update_times(times_s: Array, uncertainties_s: Array) -> UpdateTimes | None:
    """Return the steady update times that fit the poll intervals `times_s` ± `uncertainties_s`, in order of
    time.

    None if no steady period fits, or if it adds little information.
    """
    if len(times_s) < 3:
        return None
    steps_s = np.diff(times_s)
    periods = np.concatenate([[0.0], np.cumsum(np.round(steps_s / np.median(steps_s)))])
    origin_s = times_s[0]
    earliest_s = times_s - uncertainties_s - origin_s
    latest_s = times_s + uncertainties_s - origin_s

    # The first move lies between the largest lower and the smallest upper limit, given the period. Their
    # distance is a concave function of the period: bisect its slope for the most.
    median_step_s = float(np.median(steps_s))
    shortest_s, longest_s = 0.5 * median_step_s, 2.0 * median_step_s
    for _ in range(_BISECTIONS):
        period_s = (shortest_s + longest_s) / 2
        lower_s, upper_s = earliest_s - period_s * periods, latest_s - period_s * periods
        if periods[np.argmin(upper_s)] < periods[np.argmax(lower_s)]:
            shortest_s = period_s
        else:
            longest_s = period_s
    first_s, last_s = np.max(lower_s), np.min(upper_s)
    slack_s = abs(last_s - first_s) / 2
    typical_s = float(np.median(uncertainties_s))
    if slack_s > typical_s / 2:
        return None
    return UpdateTimes(
        times_s=origin_s + (first_s + last_s) / 2 + period_s * periods,
        # If the limits cross, no steady period fits: each move must then be allowed this jitter.
        jitter_s=max(_MIN_JITTER_S, slack_s if last_s < first_s else 0.0),
        # The slack may be small by chance; limits from n polls leave an uncertainty of the order of one
        # poll's / n.
        phase_error_s=max(float(slack_s), _PHASE_ERROR_SHARE * typical_s / len(times_s)),
    )
