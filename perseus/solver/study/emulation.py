"""Emulate a cluster's iteration: many pipelines, including stragglers, until all have synchronised.

Data-parallel pipelines run the same iteration, each by its own plan, and all wait for the slowest to exchange
gradients. A straggler takes longer for everything at the same power, so its energy grows with its time; the
published savings count it in the same way. Tensor-parallel ranks are not separate: a stage's measurements
already cover all its GPUs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perseus.solver.computation import Computation
from perseus.solver.errors import SolverError
from perseus.solver.pipeline import Pipeline
from perseus.solver.plan import Plan, PlannedComputation, replay, waiting_saved_j


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


def emulate(pipeline: Pipeline, cluster: Sequence[Replicas]) -> EmulatedIteration:
    """Emulate one iteration of a cluster of such pipelines.

    Waiting draws blocking power at the clock held meanwhile (:mod:`perseus.solver.waiting`).

    Raises:
        SolverError: the cluster is empty.
        ProfileError: a computation has no clock in a plan, or one at which it was not measured.
    """
    if not cluster:
        raise SolverError("cluster: expected at least one pipeline, found none")
    plans = [replay(pipeline, replicas.plan.settings) for replicas in cluster]
    until_s = max(
        plan.iteration_time_s * replicas.slowdown for plan, replicas in zip(plans, cluster, strict=True)
    )
    pipelines = tuple(
        _emulate_pipeline(pipeline, plan, replicas.slowdown, until_s)
        for plan, replicas in zip(plans, cluster, strict=True)
    )
    energy_j = sum(one.energy_j * replicas.count for one, replicas in zip(pipelines, cluster, strict=True))
    return EmulatedIteration(until_s, energy_j, pipelines)


def _emulate_pipeline(pipeline: Pipeline, plan: Plan, slowdown: float, until_s: float) -> EmulatedPipeline:
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
    saved_j = waiting_saved_j(pipeline, plan)
    for computations, stock_w, less_j in zip(stages, pipeline.stock_blocking_power_w, saved_j, strict=True):
        energy_j += sum(one.power_w * one.duration_s for one in computations)
        energy_j += stock_w * (until_s - sum(one.duration_s for one in computations)) - slowdown * less_j
    return EmulatedPipeline(plan.iteration_time_s * slowdown, energy_j, stages)
