"""Which clocks to measure next: where a stage's curve is least certain. Pure.

Theory of operation
===================

What the solver plans on is effective energy over time, a convex curve that falls with the clock. Two measured
clocks therefore bound what lies between them: the curve is not above the chord (that is what a plan without
this clock pays), and not below the chords next to it, prolonged, nor below the cheaper of the two. The *gap*
between the bounds, per computation, is what measuring a clock there could gain.

First the extremes are measured: the highest clock and a sensible low one. Then each stage measures the middle
of the interval that holds the most of its gaps, all stages at the same time, each its own clock. How much the
plan's energy can still change, the *doubt*, is the root mean square of a stage's gaps over its clocks, summed
over the stages: no computation knows beforehand which clock it will have, and the wide gaps count most.

What lies within the standard errors of two clocks is noise, which no clock between them resolves.

A clock that can't be measured ends the descent: nothing below it is tried, but for the one next to the
highest, which tells whether it is the clock (that runs in step with the energy counter, say) or the rank. A
stage that has given up two clocks before it has two is not tried any further.
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

It is tuned: on the published A40 curves single clocks (960, 1050 MHz) cost 2 % less than those around them,
which nothing foretells. From 0.55 and 0.65 on, halving intervals finds them; from 0.5 and 0.6 it does not,
and the plan costs 0.5 to 0.7 % more than with the complete profile, not 0.15 %. To look more closely where a
measured clock lay off the line between its neighbours did not change that. The A100 curves do not care.
"""

REACH = 0.85
"""How far below the lowest measured clock a clock may lie to be guessed at."""


MAX_BARRED = 2
"""Clocks that a stage may have failed to be measured at before it has the two that planning needs."""


@dataclass(frozen=True, slots=True)
class ClockChoice:
    """What to measure next, a clock for each stage; and how much the plan's energy can still change.

    `doubt` is a share; infinite while a stage has fewer than two clocks (but for one that stays at stock). A
    stage of which nothing is left to measure has its highest measured clock again, 0 if there is none.
    """

    clocks_mhz: tuple[int, ...]
    uncertainty: float


def choose_clocks(
    profiles: Sequence[StageProfile],
    schedule: Schedule,
    clocks_mhz: UsableClocks,
    barred: Collection[tuple[int, int]],
) -> ClockChoice:
    """Choose among each stage's `clocks_mhz` but the `barred` (stage, clock)."""
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
    """One stage: how often it computes what, what is measured of that, and its hulls."""

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
        """Whether as many clocks are measured as it takes to plan."""
        return len(self.measured_mhz) >= min(MIN_CLOCKS, len(self._usable_mhz))

    def _find_left_mhz(self, barred_mhz: Collection[int]) -> list[int]:
        """Return the clocks that may yet be measured, highest first."""
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
        """What the stage's computations cost at the least."""
        return math.fsum(n * min(m.energy_j for m in self._measured[key]) for key, n in self._counts.items())

    def extreme_mhz(self) -> int:
        """The first clock to measure, then the second."""
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
                # Below the lowest there is no other end to be in the middle of.
                best_mhz, max_j = inside[len(inside) // 2 if low_mhz else -1], sum_j
        return best_mhz, math.hypot(*gaps_j.values()) / math.sqrt(len(gaps_j) + len(self.measured_mhz))

    def _highest_measured_mhz(self) -> int:
        """A measured clock that was refused since may not be held again."""
        measured_mhz = (mhz for mhz in self.measured_mhz if mhz in self._usable_mhz)
        return max(measured_mhz, default=max(self._left_mhz, default=0))

    def _gap_j(self, hull: Sequence[Point], key: StageKey, mhz: int) -> float:
        """What a computation at this clock may cost less than the chord says."""
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
    """How far below the hull the curve may lie at a time; beyond its end, along half its slope."""
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
