"""Replay of a plan on a GPU whose clock takes a while to set.

A clock comes into force one latency after its set was issued. The agent issues a raise one latency before the
previous computation ends, so that it is in force by then, and a lower clock when the previous computation
ends: lateness costs joules, never seconds. Only one set is in progress at a time, and the newest wanted clock
wins: a clock that is superseded before its set is issued is never set.

The replay predicts ends correctly, as an agent does after a few iterations of a plan. That needs no fixed
point: a set issued within one latency of an end comes into force after it, so each end is known before the
raise that depends on it.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from perseus.solver.computation import Kind
from perseus.solver.errors import SolverError
from perseus.solver.graph import order_computations
from perseus.solver.pipeline import Pipeline
from perseus.solver.plan import Plan, replay
from perseus.solver.profile import Measurement, refuse_further
from perseus.solver.scale import Scale
from perseus.solver.waiting import BlockingPower


@dataclass(frozen=True, slots=True)
class LatencyReplay:
    """A plan's time and energy when its clocks take a while to set.

    Attributes:
        iteration_time_s: from the first start to the last end.
        effective_energy_j: of all stages, without the blocking power at stock over the iteration.
        blocking_power_w: of all GPUs of the pipeline together, at stock.
        set_count: sets in an iteration on all stages, including those back to the first clock at its end.
        share_on_clock: of the time in computations that have a clock, the share spent at the planned one.
    """

    iteration_time_s: float
    effective_energy_j: float
    blocking_power_w: float
    set_count: int
    share_on_clock: float

    @property
    def energy_j(self) -> float:
        """Energy of the pipeline over one iteration, waiting included."""
        return self.effective_energy_j + self.blocking_power_w * self.iteration_time_s


def replay_with_latency(pipeline: Pipeline, plan: Plan, latency_s: float) -> LatencyReplay:
    """Replay the plan with clocks that come into force ``latency_s`` after they were set.

    Each stage begins at its first clock, which was set while the previous iteration's gradients were
    synchronised. A computation whose clock changes while it runs does the share of work that each clock's
    measured time allows, and costs that share of its measured energy. At a clock at which it was not
    measured, both are interpolated between the neighbouring measured clocks.

    Raises:
        SolverError: the latency is not a finite number of 0 or more.
        ProfileError: a computation has no clock in the plan, or one at which it was not measured; or settings
            of more than a clock were measured (`check_clocks`).
    """
    check_latency(latency_s)
    check_clocks(pipeline)
    scale = pipeline.scale
    latency_ps = scale.to_ps(latency_s)
    clocks_mhz = replay(pipeline, plan.clocks_mhz).clocks_mhz
    curves = {key: Curve(measurements, scale) for key, measurements in pipeline.profiles.items()}
    powers = [BlockingPower(by_clock) for by_clock in pipeline.blocking_powers_w]
    stock_w = pipeline.stock_blocking_power_w
    stage_clocks = [_StageClock(stage[0].clock_mhz, latency_ps) if stage else None for stage in plan.stages]
    computations, dependencies = order_computations(pipeline)
    starts_ps = [0] * len(computations)
    last_end_ps = [0] * pipeline.schedule.stage_count
    waits_since_ps = list(last_end_ps)  # FIXED computations draw blocking power, too
    effective_energy_j = 0.0
    busy_ps = on_clock_ps = 0
    arcs = iter(dependencies)
    arc = next(arcs, None)
    for i, c in enumerate(computations):
        clock = stage_clocks[c.stage]
        if c.kind is Kind.FIXED or clock is None:
            end_ps = starts_ps[i] + scale.to_ps(pipeline.fixed_times_s[c])
        else:
            clock.want(clocks_mhz[c], last_end_ps[c.stage])
            if powers:
                for held_mhz, held_ps in clock.held(waits_since_ps[c.stage], starts_ps[i]):
                    saved_w = stock_w[c.stage] - powers[c.stage].at_w(held_mhz)
                    effective_energy_j -= saved_w * scale.to_s(held_ps)
            run = clock.run(curves[c.stage, c.chunk, c.kind], starts_ps[i], clocks_mhz[c])
            end_ps = waits_since_ps[c.stage] = run.end_ps
            effective_energy_j += run.energy_j
            effective_energy_j -= stock_w[c.stage] * scale.to_s(end_ps - starts_ps[i])
            busy_ps += end_ps - starts_ps[i]
            on_clock_ps += run.on_clock_ps
        last_end_ps[c.stage] = end_ps
        while arc and arc.earlier == i:
            starts_ps[arc.later] = max(starts_ps[arc.later], end_ps + arc.lag_ps)
            arc = next(arcs, None)
    return LatencyReplay(
        iteration_time_s=scale.to_s(max(last_end_ps)),
        effective_energy_j=effective_energy_j,
        blocking_power_w=plan.blocking_power_w,
        set_count=sum(clock.set_count for clock in stage_clocks if clock),
        share_on_clock=on_clock_ps / busy_ps if busy_ps else 1.0,
    )


def check_latency(latency_s: float) -> None:
    """Raise SolverError if the latency is invalid."""
    if not (math.isfinite(latency_s) and latency_s >= 0):
        raise SolverError(f"latency_s: expected a finite number of 0 or more, found {latency_s}")


def check_clocks(pipeline: Pipeline) -> None:
    """Refuse settings of more than a clock.

    A clock can change while a computation runs, which then does part of its work at each; a kernel's
    configuration can't. And of two other settings it is unknown which one is the raise, to be issued early.

    Raises:
        ProfileError: there are some.
    """
    measurements = chain.from_iterable(pipeline.profiles.values())
    refuse_further(measurements, "where setting them takes a while")


class Curve:
    """A computation's time and energy at any clock: measured, or interpolated between the measured clocks.

    Both are constant beyond the lowest and the highest measured clock.
    """

    def __init__(self, measurements: Sequence[Measurement], scale: Scale) -> None:
        by_clock = sorted(measurements, key=lambda m: m.clock_mhz)
        self._clocks_mhz = [m.clock_mhz for m in by_clock]
        self._times_ps = [max(1, scale.to_ps(m.time_s)) for m in by_clock]
        self._energies_j = [m.energy_j for m in by_clock]
        self._known: dict[int, tuple[int, float]] = {}

    def at(self, clock_mhz: int) -> tuple[int, float]:
        """Return the time in scaled picoseconds and the energy in joules."""
        if clock_mhz not in self._known:
            time_ps = round(np.interp(clock_mhz, self._clocks_mhz, self._times_ps))
            energy_j = float(np.interp(clock_mhz, self._clocks_mhz, self._energies_j))
            self._known[clock_mhz] = (time_ps, energy_j)
        return self._known[clock_mhz]


class _Set(NamedTuple):
    issued_ps: int
    in_force_ps: int
    clock_mhz: int


class _Run(NamedTuple):
    """A finished computation: its end, its energy, and its time at the planned clock."""

    end_ps: int
    energy_j: float
    on_clock_ps: int


class _StageClock:
    """One stage's clock over the iteration."""

    def __init__(self, first_clock_mhz: int, latency_ps: int) -> None:
        self._latency_ps = latency_ps
        self._planned_mhz = first_clock_mhz
        self._sets = [_Set(-latency_ps - 1, 0, first_clock_mhz)]

    @property
    def set_count(self) -> int:
        """Sets so far, plus the one that the next iteration's first computation needs."""
        return len(self._sets) - (self._sets[-1].clock_mhz == self._sets[0].clock_mhz)

    def want(self, clock_mhz: int, previous_end_ps: int) -> None:
        """Plan a clock for the computation that follows the end at ``previous_end_ps``."""
        raised = clock_mhz > self._planned_mhz
        self._planned_mhz = clock_mhz
        at_ps = previous_end_ps - self._latency_ps if raised else previous_end_ps
        while self._sets[-1].issued_ps >= at_ps > self._sets[0].issued_ps:
            self._sets.pop()
        if clock_mhz != self._sets[-1].clock_mhz:
            issued_ps = max(at_ps, self._sets[-1].in_force_ps)
            self._sets.append(_Set(issued_ps, issued_ps + self._latency_ps, clock_mhz))

    def held(self, begin_ps: int, end_ps: int) -> Iterator[tuple[int, int]]:
        """Yield (clock in MHz, time in ps) of each clock held in a wait.

        A raise that is in force when the wait begins is not needed before its end, and issued later then.
        """
        begun_mhz = self._sets[
            bisect_left(self._sets, begin_ps, 1, key=lambda s: s.in_force_ps) - 1
        ].clock_mhz
        for one in reversed(self._sets):
            if end_ps <= begin_ps:
                break
            if one.in_force_ps < end_ps:
                since_ps = max(one.in_force_ps, begin_ps)
                yield min(one.clock_mhz, begun_mhz), end_ps - since_ps
                end_ps = since_ps

    def run(self, curve: Curve, start_ps: int, planned_mhz: int) -> _Run:
        """Run a computation from its start, through all sets that come into force before its end."""
        now_ps, work_left, energy_j, on_clock_ps = start_ps, 1.0, 0.0, 0
        k = bisect_right(self._sets, start_ps, key=lambda one: one.in_force_ps) - 1
        while True:
            clock_mhz = self._sets[k].clock_mhz
            time_ps, whole_j = curve.at(clock_mhz)
            end_ps = now_ps + round(work_left * time_ps)
            k += 1
            changes = k < len(self._sets) and self._sets[k].in_force_ps < end_ps
            until_ps = self._sets[k].in_force_ps if changes else end_ps
            share = (until_ps - now_ps) / time_ps if changes else work_left
            energy_j += share * whole_j
            on_clock_ps += (until_ps - now_ps) * (clock_mhz == planned_mhz)
            if not changes:
                return _Run(end_ps, energy_j, on_clock_ps)
            now_ps, work_left = until_ps, work_left - share
