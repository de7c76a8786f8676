"""Minimum dwell: plans for GPUs whose clock takes a while to set.

A plan made without regard to latency may change the clock at almost every computation. Each lower clock comes
late, so its computation spends a latency at the previous clock. Where clocks change faster than they can be
set, raises come late too, and that costs time. This module gives each stage runs of computations that share a
clock: no run shorter than a dwell, no computation slower than its limit, and among all such runs those of
least energy, latency included (dynamic programming over where runs begin, and at which clock).

At first the limits are the planned durations. A run that is faster than necessary leaves slack, so the limits
are then stretched as far as the iteration time allows, and the runs are chosen again.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perseus.solver.computation import Computation, Kind
from perseus.solver.graph import Dependency, order_computations
from perseus.solver.latency import Curve, check_clocks, check_latency, replay_with_latency
from perseus.solver.pipeline import Pipeline
from perseus.solver.plan import Plan, PlannedComputation, earliest_finishes_ps, replay
from perseus.solver.scale import Scale

FloatArray = NDArray[np.float64]

_STRETCH_COUNT = 4
_FIRST_PRICE_W = 8.0
_PRICE_COUNT = 8
_BISECTION_COUNT = 6

MIN_SHARE_ON_CLOCK = 0.9
"""Least share of computation time that a plan spends at its clocks."""

MAX_SLOWDOWN = 1.002
"""Largest accepted slowdown: measured times may rise with the clock, and then a late clock costs time."""


def dwell(pipeline: Pipeline, plan: Plan, latency_s: float) -> Plan:
    """Return a plan of the same iteration time that keeps its clocks for at least two latencies.

    Two, because lowering a clock and raising it again then has time for both sets. With the latency,
    computations spend at least 90 % of their time at the clocks of the result, where its stages allow it; a
    stage where no runs are fast enough keeps its clocks. On the measured times the result is never slower
    than ``plan``. With the latency it may be slower by at most 0.2 %, where a late clock was measured to be
    faster than the higher one before it; and where a stage keeps its clocks. :func:`replay_with_latency`
    returns the cost of latency for both plans.

    Raises:
        SolverError: the latency is not a finite number of 0 or more.
        ProfileError: a computation has no clock in the plan, or one at which it was not measured; or settings
            of more than a clock were measured (:func:`perseus.solver.latency.check_clocks`).
    """
    check_clocks(pipeline)
    search = _Search(pipeline, replay(pipeline, plan.clocks_mhz), latency_s)
    cheaper = search.dwelled(0.0)
    if search.is_on_clock(cheaper):
        return cheaper
    # A price on each second at the previous clock trades energy for fewer sets: find the lowest sufficient
    # price.
    too_low_w, price_w = 0.0, _FIRST_PRICE_W
    for _ in range(_PRICE_COUNT):
        dwelled = search.dwelled(price_w)
        if search.is_on_clock(dwelled):
            break
        too_low_w, price_w, cheaper = price_w, 4 * price_w, dwelled
    else:
        return dwelled
    for _ in range(_BISECTION_COUNT):
        middle_w = (too_low_w + price_w) / 2
        candidate = search.dwelled(middle_w)
        if search.is_on_clock(candidate):
            price_w, dwelled = middle_w, candidate
        else:
            too_low_w, cheaper = middle_w, candidate
    return search.mixed(dwelled, cheaper)


class _Search:
    """Dwelled versions of one plan, by the price of lateness."""

    def __init__(self, pipeline: Pipeline, planned: Plan, latency_s: float) -> None:
        self._pipeline, self._planned = pipeline, planned
        check_latency(latency_s)
        self._latency_s = latency_s
        self._stages = [_StageCosts(pipeline, s) if stage else None for s, stage in enumerate(planned.stages)]

    def is_on_clock(self, plan: Plan) -> bool:
        replayed = replay_with_latency(self._pipeline, plan, self._latency_s)
        return replayed.share_on_clock >= MIN_SHARE_ON_CLOCK

    def mixed(self, plan: Plan, cheaper: Plan) -> Plan:
        """Return ``plan`` with as many stages of the cheaper one as keep it fast and on its clocks."""
        for stage in cheaper.stages:
            candidate = replay(self._pipeline, plan.clocks_mhz | {p.computation: p.clock_mhz for p in stage})
            if candidate.iteration_time_s <= self._planned.iteration_time_s and self.is_on_clock(candidate):
                plan = candidate
        return plan

    def dwelled(self, lateness_price_w: float) -> Plan:
        """Return the dwelled plan; if lateness slows it too much, one in which it slows no computation
        more."""
        for max_slowdown in (math.inf, MAX_SLOWDOWN):
            plan = self._choose_runs(lateness_price_w, max_slowdown)
            late = replay_with_latency(self._pipeline, plan, self._latency_s)
            if late.iteration_time_s <= MAX_SLOWDOWN * self._planned.iteration_time_s:
                break
        return plan

    def _choose_runs(self, lateness_price_w: float, max_slowdown: float) -> Plan:
        plan, scale = self._planned, self._pipeline.scale
        limits_ps = {p.computation: scale.to_ps(p.duration_s) for stage in plan.stages for p in stage}
        for _ in range(_STRETCH_COUNT):
            clocks_mhz: dict[Computation, int] = {}
            for costs, computations in zip(self._stages, plan.stages, strict=True):
                if costs:
                    limits = [limits_ps[p.computation] for p in computations]
                    latency_ps = scale.to_ps(self._latency_s)
                    runs = _Runs(
                        costs, computations, limits, scale, latency_ps, lateness_price_w, max_slowdown
                    )
                    clocks_mhz |= runs.cheapest_clocks() or {p.computation: p.clock_mhz for p in computations}
            before, plan = plan, replay(self._pipeline, clocks_mhz)
            if plan.clocks_mhz == before.clocks_mhz:
                break
            limits_ps = _stretch(self._pipeline, plan, scale.to_ps(self._planned.iteration_time_s))
        return plan


def _stretch(pipeline: Pipeline, plan: Plan, deadline_ps: int) -> dict[Computation, int]:
    """Return how long each computation may take so that all together meet the deadline.

    The factor for each is the deadline over the longest path through it. A path is no longer than the longest
    path through any of its computations, so the stretched path meets the deadline.
    """
    computations, dependencies = order_computations(pipeline)
    to_ps = pipeline.scale.to_ps
    index_of = {c: i for i, c in enumerate(computations)}
    durations_ps = [to_ps(pipeline.fixed_times_s.get(c, 0.0)) for c in computations]
    planned = [p for stage in plan.stages for p in stage]
    for p in planned:
        durations_ps[index_of[p.computation]] = to_ps(p.duration_s)
    backward = [Dependency(later, earlier, lag_ps) for earlier, later, lag_ps in reversed(dependencies)]
    until_ps = earliest_finishes_ps(dependencies, durations_ps)
    from_ps = earliest_finishes_ps(backward, durations_ps)
    return {
        computations[i]: durations_ps[i] * deadline_ps // (until_ps[i] + from_ps[i] - durations_ps[i])
        for i in (index_of[p.computation] for p in planned)
    }


class _KindCosts(NamedTuple):
    """Costs of one kind of computation at each of the stage's clocks."""

    times_ps: FloatArray
    effective_energies_j: FloatArray
    measured: NDArray[np.bool_]


class _StageCosts:
    """Times and costs of one stage's computations, at all clocks at which any of them was measured."""

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        measured = {(key[1], key[2]): some for key, some in pipeline.profiles.items() if key[0] == stage}
        self.clocks_mhz = np.array(sorted({m.clock_mhz for some in measured.values() for m in some}))
        self._kinds: dict[tuple[int, Kind], _KindCosts] = {}
        for key, some in measured.items():
            curve = Curve(some, pipeline.scale)
            times_ps, energies_j = np.array([curve.at(int(clock_mhz)) for clock_mhz in self.clocks_mhz]).T
            self._kinds[key] = _KindCosts(
                times_ps,
                energies_j - pipeline.blocking_power_w[stage] * times_ps / pipeline.scale.ps_per_s,
                np.isin(self.clocks_mhz, [m.clock_mhz for m in some]),
            )

    def of(self, c: Computation) -> _KindCosts:
        return self._kinds[c.chunk, c.kind]


class _Runs:
    """The dynamic program over one stage's n computations and F clocks."""

    def __init__(
        self,
        stage: _StageCosts,
        planned: Sequence[PlannedComputation],
        limits_ps: Sequence[int],
        scale: Scale,
        latency_ps: int,
        lateness_price_w: float,
        max_slowdown: float,
    ) -> None:
        self._stage, self._planned, self._limits_ps = stage, planned, limits_ps
        self._latency_ps, self._lateness_price_w = latency_ps, lateness_price_w
        self._max_slowdown, self._scale = max_slowdown, scale
        self._lateness_known: dict[tuple[int, Kind, int], _Lateness] = {}
        self._costs = costs = [stage.of(p.computation) for p in planned]
        times_ps = np.array([cost.times_ps for cost in costs])
        measured = np.array([cost.measured for cost in costs])
        self._refused_before = _sums_before(~measured | (times_ps > np.array(limits_ps)[:, None]))
        self._energy_before_j = _sums_before(np.array([cost.effective_energies_j for cost in costs]))
        # A wait before a computation hides part of the latency: lower clocks are set when the wait begins.
        waits_ps = [0] + [
            scale.to_ps(later.start_s - earlier.start_s - earlier.duration_s)
            for earlier, later in pairwise(planned)
        ]
        self._exposed_ps = [max(latency_ps - wait_ps, 0) for wait_ps in waits_ps]
        # The end (exclusive) of the shortest run from each computation that lasts a dwell at any clock.
        fastest_before_ps = np.concatenate([[0.0], np.cumsum(times_ps.min(axis=1))])
        ends = np.searchsorted(fastest_before_ps, fastest_before_ps[:-1] + 2 * latency_ps)
        self._shortest_ends = np.clip(ends, np.arange(len(costs)) + 1, len(costs))

    def cheapest_clocks(self) -> dict[Computation, int] | None:
        """Return each computation's clock, or None if no runs are fast enough."""
        count, clock_count = len(self._costs), self._energy_before_j.shape[1]
        every_clock = np.arange(clock_count)
        # Entry [j, f]: the least cost of the first j computations if the last of them is in a run at clock f
        # that has lasted a dwell; where that run's last step began, and at which clock before.
        min_j = np.full((count + 1, clock_count), np.inf)
        step_from = np.zeros((count + 1, clock_count), dtype=np.int64)
        clock_before = np.zeros((count + 1, clock_count), dtype=np.int64)
        for i in range(count):
            if i:
                entering_j = min_j[i][:, None] + self._lateness_j(i)
                before = entering_j.argmin(axis=0)
                entered_j = entering_j[before, every_clock]
            else:
                before, entered_j = every_clock, np.zeros(clock_count)
            for end, before_j, clocks in (
                (i + 1, min_j[i], every_clock),
                (int(self._shortest_ends[i]), entered_j, before),
            ):
                total_j = before_j + self._energy_before_j[end] - self._energy_before_j[i]
                fast_enough = self._refused_before[end] == self._refused_before[i]
                better = fast_enough & (total_j < min_j[end])
                min_j[end, better] = total_j[better]
                step_from[end, better] = i
                clock_before[end, better] = clocks[better]
        if np.isinf(min_j[count]).all():
            return None
        chosen = [0] * count
        end, f = count, int(min_j[count].argmin())
        while end:
            begin = int(step_from[end, f])
            chosen[begin:end] = [f] * (end - begin)
            end, f = begin, int(clock_before[end, f])
        return {
            p.computation: int(self._stage.clocks_mhz[f]) for p, f in zip(self._planned, chosen, strict=True)
        }

    def _lateness_j(self, i: int) -> FloatArray:
        """Return the extra cost of ``i`` when a lower clock is late, by previous clock and clock of ``i``.

        It is infinite where lateness makes ``i`` too slow.
        """
        c = self._planned[i].computation
        key = c.chunk, c.kind, self._exposed_ps[i]
        if key not in self._lateness_known:
            self._lateness_known[key] = self._find_lateness(self._costs[i], self._exposed_ps[i])
        lateness = self._lateness_known[key]
        return np.where(lateness.times_ps > self._max_slowdown * self._limits_ps[i], np.inf, lateness.costs_j)

    def _find_lateness(self, cost: _KindCosts, exposed_ps: int) -> "_Lateness":
        times_ps, energies_j = cost.times_ps, cost.effective_energies_j
        lower = np.tri(len(times_ps), k=-1, dtype=bool)
        late_ps = np.minimum(exposed_ps, times_ps)[:, None]
        costs_j = late_ps / times_ps[:, None] * (energies_j[:, None] - energies_j)
        costs_j += self._lateness_price_w * late_ps / self._scale.ps_per_s
        # A wait shorter than planned may hide less of the latency, so the time limit counts none of it as
        # hidden.
        late_ps = np.minimum(self._latency_ps, times_ps)[:, None]
        slowed_ps = late_ps + (1 - late_ps / times_ps[:, None]) * times_ps
        return _Lateness(np.where(lower, slowed_ps, 0.0), np.where(lower, costs_j, 0.0))


class _Lateness(NamedTuple):
    """The effect of lateness on a computation, by previous clock × clock; 0 unless it is lowered."""

    times_ps: FloatArray
    costs_j: FloatArray


def _sums_before(rows: NDArray[np.generic]) -> FloatArray:
    """Return cumulative sums: of the rows before each row, then of all rows."""
    sums: FloatArray = np.vstack([np.zeros(rows.shape[1]), np.cumsum(rows, axis=0)])
    return sums
