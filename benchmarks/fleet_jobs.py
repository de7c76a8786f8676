"""Jobs for the power benchmarks: the published profiles, several sizes, one with a straggler."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness import published_pipeline
from perseus.service.domain.power import DEFAULT_FEED
from perseus.service.fleet.power.curve import power_points
from perseus.service.fleet.power.demand import JobDemand, PowerPoint
from perseus.solver import Frontier, Plan, solve
from perseus.solver.study import Replicas, emulate, zeus_global

MICROBATCH_COUNT = 48
STRAGGLER = 1.1


@functools.cache
def frontier(gpu: str) -> Frontier:
    return solve(published_pipeline(gpu, MICROBATCH_COUNT))


@functools.cache
def one_clock(gpu: str) -> Sequence[Plan]:
    return zeus_global(published_pipeline(gpu, MICROBATCH_COUNT))


@dataclass(frozen=True, slots=True)
class Job:
    """Pipelines of a published profile; `has_straggler`: one of them takes STRAGGLER × as long."""

    job_id: str
    gpu: str
    pipeline_count: int
    tolerance_percent: float
    weight: float
    has_straggler: bool = False

    @property
    def gpu_count(self) -> int:
        return 64 * self.pipeline_count

    @property
    def slowdowns(self) -> Mapping[int, float]:
        return {0: STRAGGLER} if self.has_straggler else {}

    def stock_power_w(self) -> float:
        """Power with everything at its highest clock, waiting for the straggler."""
        plan = frontier(self.gpu).baseline
        return self._power_w(plan, plan)

    def points(self) -> tuple[PowerPoint, ...]:
        """Return the points of its frontier for a budget."""
        stage = {DEFAULT_FEED: 1.0}
        return power_points(
            frontier(self.gpu),
            [[stage] * 8] * self.pipeline_count,
            own_time_s=frontier(self.gpu).baseline.iteration_time_s,
            slowdowns=self.slowdowns,
        )

    def one_clock_points(self) -> tuple[PowerPoint, ...]:
        """Return the points of one lower clock for all its GPUs instead, straggler or not."""
        slowest = max(self.slowdowns.values(), default=1.0)
        plans = one_clock(self.gpu)
        found: list[PowerPoint] = []
        for plan in plans:
            power_w = self._power_w(plan, plan)
            if not found or power_w < found[-1].power_w[DEFAULT_FEED]:
                speed = plans[0].iteration_time_s / plan.iteration_time_s
                found.append(PowerPoint(slowest * plan.iteration_time_s, speed, {DEFAULT_FEED: power_w}))
        return tuple(found)

    def demand(self) -> JobDemand:
        return JobDemand(
            self.job_id, self.points(), tolerance_percent=self.tolerance_percent, weight=self.weight
        )

    def _power_w(self, waiting: Plan, straggling: Plan) -> float:
        cluster = [Replicas(waiting, self.pipeline_count - self.has_straggler)]
        if self.has_straggler:
            cluster.append(Replicas(straggling, 1, STRAGGLER))
        done = emulate(frontier(self.gpu).pipeline, cluster)
        return done.energy_j / done.iteration_time_s


MIX = (
    Job("a100-fixed", "a100-sxm", 2, 0.0, 2.0),
    Job("a100-strict", "a100-sxm", 4, 5.0, 2.0),
    Job("a100-easy", "a100-sxm", 4, 20.0, 0.5),
    Job("a100-straggler", "a100-sxm", 8, 10.0, 1.0, has_straggler=True),
    Job("a40-strict", "a40", 4, 5.0, 1.0),
    Job("a40-easy", "a40", 8, 15.0, 0.5),
)
"""2,176 GPUs of a typical site: jobs that must not be slowed, that may be, and that may be slowed more."""
