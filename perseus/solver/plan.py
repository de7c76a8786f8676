"""Plans, and the replay that computes a plan's time and energy from measured times."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perseus.solver.computation import Computation, Kind
from perseus.solver.errors import ProfileError
from perseus.solver.graph import Dependency, order_computations
from perseus.solver.pipeline import Pipeline
from perseus.solver.profile import highest
from perseus.solver.setting import Further, Setting, clock_of, further_of, in_order, name_of
from perseus.solver.waiting import FloatArray, below_searched_j, below_stock_j


class PlannedComputation(NamedTuple):
    """A computation, its clock, and its start and duration on measured times, from the iteration's begin.

    `further` holds its further settings: offline only, since agents set clocks. A tuple, because plans have
    thousands of computations and look-ups must be fast.
    """

    computation: Computation
    clock_mhz: int
    start_s: float
    duration_s: float
    further: Further = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A clock for every computation of one pipeline's iteration, and its effects on the measured times.

    Attributes:
        iteration_time_s: from the first start to the last end.
        effective_energy_j: of all stages, without the blocking power over the iteration.
        blocking_power_w: of all GPUs of the pipeline together, at stock: after their last computation they
            wait there. What they save while they wait at lower clocks is in the effective energy.
        stages: each stage's computations in order; FIXED ones, which have no clock, are left out.
    """

    iteration_time_s: float
    effective_energy_j: float
    blocking_power_w: float
    stages: tuple[tuple[PlannedComputation, ...], ...]

    @property
    def clocks_mhz(self) -> dict[Computation, int]:
        """The clock of each computation that has one."""
        return {p.computation: p.clock_mhz for stage in self.stages for p in stage}

    @property
    def settings(self) -> Mapping[Computation, int | Setting]:
        """The setting of each computation that has a clock: the clock, with any further settings."""
        return {
            p.computation: Setting(p.clock_mhz, p.further) if p.further else p.clock_mhz
            for stage in self.stages
            for p in stage
        }

    @property
    def energy_j(self) -> float:
        """Energy of the pipeline over one iteration, waiting included."""
        return self.energy_until_j(self.iteration_time_s)

    def energy_until_j(self, time_s: float) -> float:
        """Return the energy until the iteration has ended and ``time_s`` has passed, whichever is later."""
        return self.effective_energy_j + self.blocking_power_w * max(time_s, self.iteration_time_s)


def replay(pipeline: Pipeline, settings: Mapping[Computation, int | Setting]) -> Plan:
    """Replay the iteration at these settings on the measured times; every computation starts as early as it
    can.

    A setting is a clock in MHz, or a `Setting` where further ones were measured (`Measurement.setting`).

    Raises:
        ProfileError: a computation has no setting, or one at which it was not measured.
    """
    computations, dependencies = order_computations(pipeline)
    to_ps = pipeline.scale.to_ps
    measured = {key: {m.setting: m for m in measurements} for key, measurements in pipeline.profiles.items()}
    chosen: list[tuple[int | Setting, int, float]] = []
    for c in computations:
        power_w = pipeline.blocking_power_w[c.stage]
        if c.kind is Kind.FIXED:
            chosen.append((0, to_ps(pipeline.fixed_times_s[c]), 0.0))
            continue
        options = measured[c.stage, c.chunk, c.kind]
        setting = settings.get(c)
        if setting is None or setting not in options:
            found = "none" if setting is None else name_of(setting)
            raise ProfileError(
                f"{c}: expected one of its measured {_listed(options)}, found {found}",
                computation=c,
                found=found,
            )
        m = options[setting]
        effective_j = pipeline.scale.in_units_j(m.energy_j - power_w * m.time_s)
        chosen.append((setting, max(1, to_ps(m.time_s)), effective_j))
    return assemble_plan(pipeline, computations, dependencies, chosen)


def fastest_clock_plan(pipeline: Pipeline) -> Plan:
    """Return the all-max plan: every computation at its highest measured clock.

    Of several settings with that clock, take the fastest.
    """
    highest_of = {key: highest(some).setting for key, some in pipeline.profiles.items()}
    return replay(
        pipeline,
        {
            c: highest_of[c.stage, c.chunk, c.kind]
            for c in pipeline.schedule.computations
            if c.kind is not Kind.FIXED
        },
    )


def earliest_finishes_ps(dependencies: Sequence[Dependency], durations_ps: Sequence[int]) -> list[int]:
    """Return each computation's earliest finish.

    Dependencies into a computation must come before those out of it.
    """
    starts_ps = [0] * len(durations_ps)
    for earlier, later, lag_ps in dependencies:
        ready_ps = starts_ps[earlier] + durations_ps[earlier] + lag_ps
        if ready_ps > starts_ps[later]:
            starts_ps[later] = ready_ps
    return [start_ps + duration_ps for start_ps, duration_ps in zip(starts_ps, durations_ps, strict=True)]


def assemble_plan(
    pipeline: Pipeline,
    computations: Sequence[Computation],
    dependencies: Sequence[Dependency],
    chosen: Sequence[tuple[int | Setting, int, float]],
) -> Plan:
    """Build a plan from each computation's (setting, time in scaled ps, effective energy in J)."""
    to_s = pipeline.scale.to_s
    finishes_ps = earliest_finishes_ps(dependencies, [time_ps for _, time_ps, _ in chosen])
    stages: list[list[PlannedComputation]] = [[] for _ in pipeline.blocking_power_w]
    for c, finish_ps, (setting, time_ps, _) in zip(computations, finishes_ps, chosen, strict=True):
        if c.kind is not Kind.FIXED:
            start_s, duration_s = to_s(finish_ps - time_ps), to_s(time_ps)
            stages[c.stage].append(
                PlannedComputation(c, clock_of(setting), start_s, duration_s, further_of(setting))
            )
    effective_j = sum(effective_energy_j for _, _, effective_energy_j in chosen)
    if pipeline.blocking_powers_w:
        for stage, planned in enumerate(stages):
            effective_j -= float(below_searched_j(pipeline, stage, *_columns(planned))[0])
    return Plan(
        iteration_time_s=to_s(max(finishes_ps)),
        effective_energy_j=effective_j,
        blocking_power_w=sum(pipeline.stock_blocking_power_w),
        stages=tuple(tuple(stage) for stage in stages),
    )


def waiting_saved_j(pipeline: Pipeline, plan: Plan) -> list[float]:
    """Return how much less each stage draws in its waits, up to its last computation, than at stock."""
    return [
        float(below_stock_j(pipeline, stage, *_columns(planned))[0])
        for stage, planned in enumerate(plan.stages)
    ]


def _columns(planned: Sequence[PlannedComputation]) -> tuple[NDArray[np.int32], FloatArray, FloatArray]:
    """Return clocks, starts and durations of a stage's computations, a row each."""
    return (
        np.array([[p.clock_mhz for p in planned]], dtype=np.int32),
        np.array([[p.start_s for p in planned]], dtype=np.float64),
        np.array([[p.duration_s for p in planned]], dtype=np.float64),
    )


def _listed(settings: Collection[int | Setting]) -> str:
    """Format a computation's settings for a message."""
    listed = sorted(settings, key=in_order)
    if any(map(further_of, listed)):
        return f"settings ({'; '.join(map(name_of, listed))})"
    return f"clocks ({', '.join(map(str, listed))} MHz)"
