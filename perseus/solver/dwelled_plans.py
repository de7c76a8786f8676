"""A frontier's plans for GPUs whose clock takes a while to set.

A plan made as if clocks changed at once is kept if its clocks last long enough. Otherwise it gets a minimum
dwell (:mod:`perseus.solver.dwell`). That takes up to a second for a large pipeline, so only some of these
plans are realised. Other iteration times get the slowest realised plan that meets them.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from perseus.solver.dwell import MAX_SLOWDOWN, MIN_SHARE_ON_CLOCK, dwell
from perseus.solver.latency import LatencyReplay, replay_with_latency
from perseus.solver.pipeline import Pipeline
from perseus.solver.plan import Plan, PlannedComputation
from perseus.solver.plan_table import PlanTable, PlanTableRecorder

_DWELLED_COUNT = 20
"""Approximate limit on a frontier's plans that are realised with a dwell."""

_DWELLED_COMPUTATIONS = 30_000
"""Approximate limit on their total computations, so that large pipelines don't take an hour."""


class LatencyPoint(NamedTuple):
    """A plan for GPUs with latency, by its row in the table.

    ``latency_cost_j``: the extra energy of its iteration, latency included, over that of the plan for the
    same deadline whose clocks change at once, both until the deadline.
    """

    deadline_s: float
    row: int
    latency_cost_j: float


class LatencyPlans:
    """Converts a frontier's plans, by rising deadline, to plans for GPUs with a set latency.

    On the measured times no plan misses its deadline. With the latency none takes more than 0.2 % longer than
    on the measured times, unless even ``fallback`` misses the deadline (measured times may rise with the
    clock) or is late itself (the highest clocks of a stage differ, and those between are slower).
    """

    def __init__(self, pipeline: Pipeline, fallback: Plan, latency_s: float) -> None:
        """Start without plans.

        Args:
            pipeline: the pipeline that they are for.
            fallback: all at the highest clock, for deadlines that no other plan meets.
            latency_s: the set latency; more than 0.
        """
        self._pipeline, self._latency_s = pipeline, latency_s
        self._fallback_time_s = fallback.iteration_time_s
        self._table = PlanTableRecorder(fallback)
        self._rows: list[tuple[float, float, LatencyReplay]] = []
        self._points: list[tuple[float, float]] = []
        self._record(fallback, replay_with_latency(pipeline, fallback, latency_s))

    def take(self, deadline_s: float, plan: Plan, *, is_needed: bool) -> None:
        """Add the plan for a deadline whose clocks change at once.

        A plan that is not needed and would have to change is dropped.
        """
        late = replay_with_latency(self._pipeline, plan, self._latency_s)
        if _keeps_clocks(plan, late, self._latency_s):
            self._record(plan, late)
        elif is_needed:
            dwelled, dwelled_late = _dwelled(self._pipeline, plan, self._latency_s)
            if _is_in_time(dwelled, dwelled_late):
                self._record(dwelled, dwelled_late)
            elif self._fallback_time_s > deadline_s:  # there must be a plan: take the least late one
                pairs = [(plan, late), (dwelled, dwelled_late)]
                self._record(*min(pairs, key=lambda pair: pair[1].iteration_time_s))
        else:
            return
        self._points.append((deadline_s, plan.effective_energy_j))

    def finish(self) -> tuple[list[LatencyPoint], PlanTable]:
        """Return all plans, and the points by rising deadline and iteration time and falling energy."""
        return [self._cheapest(*point) for point in self._points], self._table.finish()

    def _record(self, plan: Plan, late: LatencyReplay) -> None:
        self._table.record(plan)
        self._rows.append((plan.effective_energy_j, plan.iteration_time_s, late))

    def _cheapest(self, deadline_s: float, instant_effective_j: float) -> LatencyPoint:
        """Return the plan of least effective energy that meets the deadline; of equal ones the fastest.

        So the returned energy and time are both monotone in the deadline.
        """
        row = min(
            (row for row, (_, time_s, _) in enumerate(self._rows) if time_s <= deadline_s),
            key=lambda row: self._rows[row][:2],
        )
        # Both energies run until the same time, so the blocking energy cancels.
        return LatencyPoint(deadline_s, row, self._rows[row][2].effective_energy_j - instant_effective_j)


def dwelled_count(computation_count: int) -> int:
    """Return the number of plans to realise with a dwell, for a pipeline of so many computations."""
    return max(1, min(_DWELLED_COUNT, _DWELLED_COMPUTATIONS // computation_count))


def latency_plan(pipeline: Pipeline, plan: Plan, latency_s: float) -> Plan | None:
    """Return the plan, or one as fast with a dwell, for GPUs with a set latency; None if too slow."""
    if _keeps_clocks(plan, replay_with_latency(pipeline, plan, latency_s), latency_s):
        return plan
    dwelled, late = _dwelled(pipeline, plan, latency_s)
    return dwelled if _is_in_time(dwelled, late) else None


def _keeps_clocks(plan: Plan, late: LatencyReplay, latency_s: float) -> bool:
    """Return whether a plan needs no dwell; ``late`` is its replay on GPUs with the latency.

    It needs none if it is not slower, spends nearly all its time at the planned clocks, and keeps each clock
    for two latencies.
    """
    return (
        _is_in_time(plan, late)
        and late.share_on_clock >= MIN_SHARE_ON_CLOCK
        and all(_shortest_run_s(stage) >= 2 * latency_s for stage in plan.stages)
    )


def _dwelled(pipeline: Pipeline, plan: Plan, latency_s: float) -> tuple[Plan, LatencyReplay]:
    dwelled = dwell(pipeline, plan, latency_s)
    return dwelled, replay_with_latency(pipeline, dwelled, latency_s)


def _is_in_time(plan: Plan, late: LatencyReplay) -> bool:
    return late.iteration_time_s <= MAX_SLOWDOWN * plan.iteration_time_s


def _shortest_run_s(stage: Sequence[PlannedComputation]) -> float:
    """Return the shortest time that a stage keeps a clock, except the last clock of the iteration."""
    starts_s = [next(run).start_s for _, run in groupby(stage, key=lambda planned: planned.clock_mhz)]
    return min((later_s - earlier_s for earlier_s, later_s in pairwise(starts_s)), default=float("inf"))
