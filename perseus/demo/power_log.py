"""Samples of jobs under power budgets, second by second, and their evaluation. Pure.

`power`  drawn by the GPUs themselves, in the second before
`limit`  the coordinator's, from budgets; `power_cap`: what may be drawn now, on its way to the limit by ramps
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

MEAN_S = 10.0
"""Window over which a mean may be 2 % above a limit, if iterations are short."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One second. `speeds`: of jobs with a known stock iteration time, relative to it."""

    time_s: float
    powers_w: Mapping[str, float]
    speeds: Mapping[str, float]
    limit_w: float = math.inf
    power_cap_w: float = math.inf
    is_compliant: bool = True

    @property
    def power_w(self) -> float:
        """The power of all jobs."""
        return sum(self.powers_w.values())


@dataclass(slots=True)
class PowerLog:
    """All samples, in order."""

    samples: list[Sample] = field(default_factory=list)

    def between(self, first_s: float, last_s: float) -> list[Sample]:
        """Return the samples of a time span."""
        return [sample for sample in self.samples if first_s < sample.time_s <= last_s]

    def mean_w(self, first_s: float, last_s: float) -> float:
        """Return the mean power of a time span that has samples."""
        return fmean(sample.power_w for sample in self.between(first_s, last_s))

    def speed(self, job_id: str, first_s: float, last_s: float) -> float | None:
        """Return the mean speed of a job; None if it is unknown."""
        speeds = [s.speeds[job_id] for s in self.between(first_s, last_s) if job_id in s.speeds]
        return fmean(speeds) if speeds else None

    def worst_mean_w(self, first_s: float, last_s: float, window_s: float = MEAN_S) -> float:
        """Return the highest mean over a window within a time span; over the whole span if that is higher.

        A window begins and ends with a sample, so what is at the edges may be in the whole span only.
        """
        found = self.between(first_s, last_s)
        means = [
            fmean(each.power_w for each in self.between(end.time_s - window_s, end.time_s))
            for end in found
            if end.time_s - window_s >= first_s - 0.5
        ]
        return max([*means, self.mean_w(first_s, last_s)])

    def under_s(self, limit_w: float, first_s: float) -> float | None:
        """Return when two consecutive seconds were first under a limit; None if they never were."""
        later = self.between(first_s, math.inf)
        for sample, following in pairwise(later):
            if sample.power_w <= limit_w and following.power_w <= limit_w:
                return sample.time_s
        return None


def summary(
    log: PowerLog, phases: Sequence[tuple[str, float, float]], job_ids: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the figures of each phase, which is a name with its begin and end."""
    return [
        {
            "name": name,
            "power_w": log.mean_w(begin_s, end_s),
            "limit_w": _finite(log.between(begin_s, end_s)[-1].limit_w),
            "worst_ten_second_mean_w": log.worst_mean_w(begin_s, end_s),
            "speeds": {job_id: log.speed(job_id, begin_s, end_s) for job_id in job_ids},
        }
        for name, begin_s, end_s in phases
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
