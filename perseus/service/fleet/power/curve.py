"""A planned job's operating points, by power per feed and speed, read off its frontier.

A pipeline with iteration time T draws the energy of its plan for T, divided by T. Pipelines that wait for a
straggler run the plan for the straggler's time, or for the target iteration time if that is longer. The
straggler itself runs the plan that, stretched by its slowness, takes the target time. It takes that much
longer for everything at the same power, as in the published savings (its energy grows with its time). So a
job with a straggler gives up power before speed: its first point already uses the slack.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.errors import InvalidFieldError
from perseus.service.fleet.power.demand import PowerPoint
from perseus.solver import Frontier, Plan, waiting_saved_j

Floats = NDArray[np.float64]

StageFeeds = Mapping[str, float]
"""The share of a stage's GPUs on each feed; the shares add up to 1."""


def power_points(
    frontier: Frontier,
    placement: Sequence[Sequence[StageFeeds]],
    *,
    own_time_s: float,
    slowdowns: Mapping[int, float] | None = None,
    overhead_s: float = 0.0,
) -> tuple[PowerPoint, ...]:
    """Return the points of a job, fastest first; a slower one never draws more in total.

    Args:
        frontier: of one of its pipelines.
        placement: per pipeline and stage, the feeds of its GPUs.
        own_time_s: the iteration time of the job's policy while no budget asks for less power.
        slowdowns: by straggling pipeline, how many times longer everything takes.
        overhead_s: the time in an iteration outside computations, at stock's blocking power.

    Raises:
        InvalidFieldError: there is no pipeline, one has a different number of stages than the frontier, or a
            slowdown is below 1 or of a pipeline that does not exist.
    """
    slowdowns = {pipeline: factor for pipeline, factor in (slowdowns or {}).items() if factor != 1}
    _check(frontier, placement, slowdowns)
    feeds = sorted({feed for stages in placement for stage in stages for feed in stage})
    groups = Counter(slowdowns.get(pipeline, 1.0) for pipeline in range(len(placement)))
    # For each group of equally slow pipelines, how many of each stage are on each feed: [F, S].
    supplied = {factor: np.zeros((len(feeds), len(placement[0]))) for factor in groups}
    for pipeline, stages in enumerate(placement):
        for stage, shares in enumerate(stages):
            for feed, share in shares.items():
                supplied[slowdowns.get(pipeline, 1.0)][feeds.index(feed), stage] += share
    slowest = max(groups)
    first_s = max(own_time_s, slowest * frontier.t_min_s)
    own_times_s = [point.iteration_time_s for point in frontier.points]
    times_s = sorted({first_s, *(f * t for f in groups for t in own_times_s if f * t > first_s)})
    blocking_w = np.array(frontier.pipeline.stock_blocking_power_w)
    plans = _Plans(frontier)
    points: list[PowerPoint] = []
    for time_s in times_s:
        iteration_s = time_s + overhead_s
        power_w, highest_mhz = np.zeros(len(feeds)), 0
        for factor, on_feeds in supplied.items():
            plan = plans.within(max(time_s / factor, frontier.t_min_s))
            power_w += on_feeds @ (factor * plan.effective_j / iteration_s + blocking_w)
            highest_mhz = max(highest_mhz, plan.highest_clock_mhz)
        drawn_w = dict(zip(feeds, power_w.tolist(), strict=True))
        if not points or sum(drawn_w.values()) < sum(points[-1].power_w.values()):
            points.append(PowerPoint(time_s, (first_s + overhead_s) / iteration_s, drawn_w, highest_mhz))
    return tuple(points)


@dataclass(frozen=True, slots=True)
class _Totals:
    """A plan's effective energy by stage, `[S]`, and the highest clock of all its computations."""

    effective_j: Floats
    highest_clock_mhz: int


class _Plans:
    """Totals of the plans of a frontier's points, memoised."""

    def __init__(self, frontier: Frontier) -> None:
        self._frontier = frontier
        blocking_w = frontier.pipeline.stock_blocking_power_w
        self._measured_j = {
            (*key, m.clock_mhz): m.energy_j - blocking_w[key[0]] * m.time_s
            for key, some in frontier.pipeline.profiles.items()
            for m in some
        }
        self._known: dict[float, _Totals] = {}

    def within(self, iteration_time_s: float) -> _Totals:
        """Return the totals of the slowest plan within an iteration time."""
        deadline_s = self._frontier.point_within(iteration_time_s).deadline_s
        known = self._known.get(deadline_s)
        if known is None:
            known = self._of_plan(self._frontier.plan_within(iteration_time_s))
            self._known[deadline_s] = known
        return known

    def _of_plan(self, plan: Plan) -> _Totals:
        stages_j = [
            sum(self._measured_j[c.stage, c.chunk, c.kind, clock_mhz] for c, clock_mhz, *_ in stage) - saved_j
            for stage, saved_j in zip(
                plan.stages, waiting_saved_j(self._frontier.pipeline, plan), strict=True
            )
        ]
        highest_mhz = max(clock_mhz for stage in plan.stages for _, clock_mhz, *_ in stage)
        return _Totals(np.array(stages_j), highest_mhz)


def _check(
    frontier: Frontier, placement: Sequence[Sequence[StageFeeds]], slowdowns: Mapping[int, float]
) -> None:
    stage_count = frontier.pipeline.schedule.stage_count
    if not placement:
        raise InvalidFieldError(field="placement", expected="at least one pipeline", found="none")
    for pipeline, stages in enumerate(placement):
        if len(stages) != stage_count:
            raise InvalidFieldError(
                field=f"placement[{pipeline}]", expected=f"{stage_count} stages", found=len(stages)
            )
    for pipeline, factor in slowdowns.items():
        if not 0 <= pipeline < len(placement):
            expected = f"a pipeline from 0 to {len(placement) - 1}"
            raise InvalidFieldError(field="slowdowns", expected=expected, found=pipeline)
        if not 1 <= factor < float("inf"):
            raise InvalidFieldError(
                field=f"slowdowns[{pipeline}]", expected="a finite factor of 1 or more", found=factor
            )
