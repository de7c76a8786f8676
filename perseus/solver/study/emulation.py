"""Emulate a cluster's iteration: many pipelines, including stragglers, until all have synchronised.

Data-parallel pipelines run the same iteration, each by its own plan, and all wait for the slowest to exchange
gradients. A straggler takes longer for everything at the same power, so its energy grows with its time; the
published savings count it in the same way. Tensor-parallel ranks are not separate: a stage's measurements
already cover all its GPUs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from perseus.solver.computation import Computation
from perseus.solver.errors import PipelineError, SolverError
from perseus.solver.pipeline import Pipeline
from perseus.solver.plan import Plan, PlannedComputation, replay


@dataclass(frozen=True, slots=True)
class Replicas:
    """Pipelines of a cluster that run identically.

    Attributes:
        plan: the plan of each of them.
        count: their number.
        slowdown: factor on all measured times; stragglers are above 1.

    Raises:
        SolverError: fewer than one, or a slowdown that is below 1 or not finite.
    """

    plan: Plan
    count: int = 1
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise SolverError(f"count: expected at least 1 pipeline, found {self.count}", found=self.count)
        if not (math.isfinite(self.slowdown) and self.slowdown >= 1):
            raise SolverError(
                f"slowdown: expected a finite factor of 1 or more, found {self.slowdown}", found=self.slowdown
            )


@dataclass(frozen=True, slots=True)
class EmulatedComputation:
    """A computation on the timeline; ``power_w`` is the power of all GPUs of its stage meanwhile."""

    computation: Computation
    clock_mhz: int
    start_s: float
    duration_s: float
    power_w: float


@dataclass(frozen=True, slots=True)
class EmulatedPipeline:
    """One pipeline's part of a cluster's iteration.

    Attributes:
        busy_until_s: the end of its last computation; then it waits for the others.
        energy_j: until all have synchronised.
        stages: each stage's computations in order. FIXED ones, which draw blocking power, are left out.
    """

    busy_until_s: float
    energy_j: float
    stages: tuple[tuple[EmulatedComputation, ...], ...]


@dataclass(frozen=True, slots=True)
class EmulatedIteration:
    """A cluster's iteration.

    Attributes:
        iteration_time_s: until the slowest pipeline has ended.
        energy_j: of all pipelines until then.
        pipelines: one pipeline of each of the replicas, in the order in which they were given.
    """

    iteration_time_s: float
    energy_j: float
    pipelines: tuple[EmulatedPipeline, ...]


def emulate(
    pipeline: Pipeline,
    cluster: Sequence[Replicas],
    waiting_power_w: Sequence[Mapping[int, float]] | None = None,
) -> EmulatedIteration:
    """Emulate one iteration of a cluster of such pipelines.

    ``waiting_power_w`` is the power of each stage's GPUs together while they wait, by the clock in MHz that
    they hold meanwhile: that of the stage's next computation, or after the last one that of the next
    iteration's first. Without it, waiting draws blocking power at any clock.

    Raises:
        SolverError: the cluster is empty.
        ProfileError: a computation has no clock in a plan, or one at which it was not measured.
        PipelineError: a stage's waiting power is missing at a clock of a plan.
    """
    if not cluster:
        raise SolverError("cluster: expected at least one pipeline, found none")
    if waiting_power_w is not None and len(waiting_power_w) != pipeline.schedule.stage_count:
        raise PipelineError(
            f"waiting_power_w: expected one mapping for each of {pipeline.schedule.stage_count} stages, "
            f"found {len(waiting_power_w)}",
            field="waiting_power_w",
            found=len(waiting_power_w),
        )
    plans = [replay(pipeline, replicas.plan.settings) for replicas in cluster]
    until_s = max(
        plan.iteration_time_s * replicas.slowdown for plan, replicas in zip(plans, cluster, strict=True)
    )
    pipelines = tuple(
        _emulate_pipeline(pipeline, plan, replicas.slowdown, until_s, waiting_power_w)
        for plan, replicas in zip(plans, cluster, strict=True)
    )
    energy_j = sum(one.energy_j * replicas.count for one, replicas in zip(pipelines, cluster, strict=True))
    return EmulatedIteration(until_s, energy_j, pipelines)


def _emulate_pipeline(
    pipeline: Pipeline,
    plan: Plan,
    slowdown: float,
    until_s: float,
    waiting_power_w: Sequence[Mapping[int, float]] | None,
) -> EmulatedPipeline:
    power_w = {
        (*key, m.setting): m.energy_j / m.time_s
        for key, measurements in pipeline.profiles.items()
        for m in measurements
    }

    settings = plan.settings

    def run(p: PlannedComputation) -> EmulatedComputation:
        c = p.computation
        drawn_w = power_w[c.stage, c.chunk, c.kind, settings[c]]
        return EmulatedComputation(c, p.clock_mhz, p.start_s * slowdown, p.duration_s * slowdown, drawn_w)

    stages = tuple(tuple(run(p) for p in stage) for stage in plan.stages)
    energy_j = 0.0
    for stage, computations in enumerate(stages):
        energy_j += sum(one.power_w * one.duration_s for one in computations)
        for clock_mhz, wait_s in _waits(computations, until_s):
            if waiting_power_w is None or clock_mhz is None:
                energy_j += pipeline.blocking_power_w[stage] * wait_s
            else:
                energy_j += _power_at(waiting_power_w, stage, clock_mhz) * wait_s
    return EmulatedPipeline(plan.iteration_time_s * slowdown, energy_j, stages)


def _waits(computations: Sequence[EmulatedComputation], until_s: float) -> Iterator[tuple[int | None, float]]:
    """Yield each wait's (clock held, length in s); no clock is held where a stage has only FIXED ones."""
    if not computations:
        yield None, until_s
        return
    first, last = computations[0], computations[-1]
    yield first.clock_mhz, first.start_s
    for earlier, later in pairwise(computations):
        yield later.clock_mhz, later.start_s - earlier.start_s - earlier.duration_s
    yield first.clock_mhz, until_s - last.start_s - last.duration_s


def _power_at(waiting_power_w: Sequence[Mapping[int, float]], stage: int, clock_mhz: int) -> float:
    power_w = waiting_power_w[stage].get(clock_mhz)
    if power_w is None or not (math.isfinite(power_w) and power_w >= 0):
        raise PipelineError(
            f"waiting_power_w, stage {stage}: expected a finite power of 0 W or more at {clock_mhz} MHz, "
            f"found {'none' if power_w is None else power_w}",
            field="waiting_power_w",
            stage=stage,
            clock_mhz=clock_mhz,
        )
    return power_w
