"""Chooses the next clocks to measure: where a stage's curve is least certain. Pure.

Theory of operation
===================

The solver plans on effective energy over time, a convex curve that falls with the clock. Two measured clocks
therefore bound the curve between them: it is not above the chord (the cost of a plan without a clock there),
and not below the prolonged neighbouring chords, nor below the cheaper of the two. The *gap* between the
bounds, per computation, is the most that measuring a clock there could gain.

The extremes are measured first: the highest clock and a sensible low one. Then each stage measures the middle
of the interval that holds most of its gaps; all stages do so at the same time, each at its own clock. The
*uncertainty*, by how much the plan's energy can still change, is the root mean square of a stage's gaps over
its clocks, summed over the stages: no computation's clock is known beforehand, and the wide gaps count most.

A gap within the standard errors of its two clocks is noise, which no clock between them resolves.

A clock that can't be measured ends the descent: no lower clock is tried. The exception is the highest clock:
the one next to it is tried, to tell whether the clock (which runs in step with the energy counter, say) or
the rank is the cause. A stage that has given up two clocks before it has measured two is not tried any
further.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from perseus.service.domain.measured import StageKey, StageProfile
from perseus.service.job.profiling.hull import Point, effective_point, height_j, lower_hull, slope_w
from perseus.service.job.profiling.stage_profiles import blocking_power_w, curves, interpolate
from perseus.service.job.ranks.usable_clocks import MIN_CLOCKS, UsableClocks
from perseus.solver import Kind, Measurement, Schedule

LOW_SHARE = 0.55
"""The low extreme, as a share of the highest clock.

The value is tuned: on the published A40 curves, single clocks (960, 1050 MHz) cost 2 % less than those around
them, which nothing predicts. Starting from 0.55 and 0.65, halving intervals finds them; from 0.5 and 0.6 it
does not, and the plan costs 0.5 to 0.7 % more than with the complete profile, not 0.15 %. Refining where a
measured clock lay off the line between its neighbours did not change that. The A100 curves are insensitive to
it.
"""

REACH = 0.85
"""Lowest clock to extrapolate to, as a share of the lowest measured clock."""


MAX_BARRED = 2
"""Failed clocks after which a stage that has not yet measured the two that planning needs is given up."""


@dataclass(frozen=True, slots=True)
class ClockChoice:
    """The clock of each stage to measure next, and by how much the plan's energy can still change.

    `uncertainty` is a share; infinite while a stage has fewer than two clocks (except one that stays at
    stock). A stage with nothing left to measure repeats its highest measured clock, 0 if there is none.
    """

    clocks_mhz: tuple[int, ...]
    uncertainty: float


def choose_clocks(
    profiles: Sequence[StageProfile],
    schedule: Schedule,
    clocks_mhz: UsableClocks,
    barred: Collection[tuple[int, int]],
) -> ClockChoice:
    """Choose among each stage's `clocks_mhz` except the `barred` (stage, clock)."""
    powers_w = blocking_power_w(profiles, schedule.stage_count)
    stages = []
    for stage, order in enumerate(schedule.orders):
        counts: Counter[StageKey] = Counter((c.chunk, c.kind) for c in order if c.kind is not Kind.FIXED)
        barred_mhz = {mhz for at, mhz in barred if at == stage}
        own = [p for p in profiles if p.stage == stage and counts.keys() <= p.measurements.keys()]
        measured_mhz = sorted((profile.clock_mhz for profile in own), reverse=True)
        stages.append(
            _Stage(counts, curves(own, stage), measured_mhz, clocks_mhz[stage], barred_mhz, powers_w[stage])
        )
    if not all(stage.is_bounded for stage in stages):
        return ClockChoice(tuple(stage.extreme_mhz() for stage in stages), math.inf)
    found = [stage.least_certain() for stage in stages]
    energy_j = math.fsum(stage.min_energy_j for stage in stages)
    return ClockChoice(tuple(mhz for mhz, _ in found), math.fsum(gap_j for _, gap_j in found) / energy_j)


class _Stage:
    """One stage: the counts of its computations, their measurements, and its hulls."""

    def __init__(
        self,
        counts: Counter[StageKey],
        measured: dict[StageKey, list[Measurement]],
        measured_mhz: Sequence[int],
        usable_mhz: Sequence[int],
        barred_mhz: Collection[int],
        power_w: float,
    ) -> None:
        self._counts = counts
        self._measured = measured
        self._usable_mhz = usable_mhz
        self._power_w = power_w
        self.measured_mhz = measured_mhz
        self._left_mhz = self._find_left_mhz(barred_mhz)

    @property
    def is_bounded(self) -> bool:
        """Whether enough clocks are measured to plan."""
        return len(self.measured_mhz) >= min(MIN_CLOCKS, len(self._usable_mhz))

    def _find_left_mhz(self, barred_mhz: Collection[int]) -> list[int]:
        """Return the clocks that are left to measure, highest first."""
        if len(barred_mhz) >= MAX_BARRED and not self.is_bounded:
            return []
        usable_mhz = self._usable_mhz
        if not self.measured_mhz and usable_mhz and usable_mhz[0] in barred_mhz:
            return list(usable_mhz[1:2])
        lowest_mhz = min(self.measured_mhz, default=math.inf)
        floor_mhz = max((mhz for mhz in barred_mhz if mhz < lowest_mhz), default=0)
        unfit_mhz = {*self.measured_mhz, *barred_mhz}
        return [mhz for mhz in usable_mhz if mhz > floor_mhz and mhz not in unfit_mhz]

    @property
    def min_energy_j(self) -> float:
        """The lowest energy of the stage's computations."""
        return math.fsum(n * min(m.energy_j for m in self._measured[key]) for key, n in self._counts.items())

    def extreme_mhz(self) -> int:
        """Return the first clock to measure, then the second."""
        if not self._left_mhz or self.is_bounded:
            return self._highest_measured_mhz()
        if not self.measured_mhz:
            return self._left_mhz[0]
        return min(self._left_mhz, key=lambda mhz: abs(mhz - LOW_SHARE * self.measured_mhz[0]))

    def least_certain(self) -> tuple[int, float]:
        """Return the clock to measure next, and the root mean square of the gaps, in joules per iteration."""
        reached_mhz = REACH * self.measured_mhz[-1]
        left_mhz = [mhz for mhz in self._left_mhz if mhz >= reached_mhz]
        gaps_j = dict.fromkeys(left_mhz, 0.0)
        for key, count in self._counts.items():
            hull = lower_hull([effective_point(m, self._power_w) for m in self._measured[key]])
            for mhz in left_mhz:
                gaps_j[mhz] += count * self._gap_j(hull, key, mhz)
        best_mhz, max_j = self._highest_measured_mhz(), 0.0
        for high_mhz, low_mhz in pairwise([*self.measured_mhz, 0]):
            inside = [mhz for mhz in left_mhz if low_mhz < mhz < high_mhz]
            sum_j = math.fsum(gaps_j[mhz] for mhz in inside)
            if sum_j > max_j:
                # Below the lowest measured clock, the interval has no other end and thus no middle.
                best_mhz, max_j = inside[len(inside) // 2 if low_mhz else -1], sum_j
        return best_mhz, math.hypot(*gaps_j.values()) / math.sqrt(len(gaps_j) + len(self.measured_mhz))

    def _highest_measured_mhz(self) -> int:
        """Return the highest measured clock that is still usable; one refused since may not be held again."""
        measured_mhz = (mhz for mhz in self.measured_mhz if mhz in self._usable_mhz)
        return max(measured_mhz, default=max(self._left_mhz, default=0))

    def _gap_j(self, hull: Sequence[Point], key: StageKey, mhz: int) -> float:
        """Return by how much a computation's energy at this clock may lie below the chord."""
        time_s = self._at(key, mhz).time_s
        gap_j = _gap_below_j(hull, time_s)
        if mhz > self.measured_mhz[-1]:
            above = [m for m in self.measured_mhz if m > mhz][-1:]
            around = [*above, next(m for m in self.measured_mhz if m < mhz)]
            cheaper_j = min(effective_point(self._at(key, m), self._power_w).energy_j for m in around)
            gap_j = min(gap_j, height_j(hull, time_s) - cheaper_j)
        return max(0.0, gap_j)

    def _at(self, key: StageKey, clock_mhz: int) -> Measurement:
        return interpolate(self._measured[key], clock_mhz)


def _gap_below_j(hull: Sequence[Point], time_s: float) -> float:
    """Return how far the curve may lie below the hull at a time; beyond the hull's end, half its slope."""
    if len(hull) < 2 or time_s <= hull[0].time_s:
        return 0.0
    if time_s >= hull[-1].time_s:
        return -slope_w(hull[-2], hull[-1]) * (time_s - hull[-1].time_s) / 2
    right = bisect_right(hull, time_s, key=lambda point: point.time_s)
    before, after = hull[right - 1], hull[right]
    lowest_j = after.energy_j
    if right + 1 < len(hull):
        lowest_j -= slope_w(after, hull[right + 1]) * (after.time_s - time_s)
    if right >= 2:
        fall_w = slope_w(hull[right - 2], before)
        lowest_j = max(lowest_j, before.energy_j + fall_w * (time_s - before.time_s))
    return height_j(hull, time_s) - lowest_j - math.hypot(before.error_j, after.error_j)
