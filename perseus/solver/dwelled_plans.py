"""A frontier's plans for GPUs whose clock takes a while to set.

A plan made as if clocks changed at once is good where its clocks last: then it stays as it is. One whose
clocks don't gets a minimum dwell (:mod:`perseus.solver.dwell`). That takes up to a second for a large
pipeline, so among such plans only some are realised; who asks for another iteration time gets the slowest
realised one that is in time.
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
"""About how many plans of a frontier are realised at most, where they need a dwell."""

_DWELLED_COMPUTATIONS = 30_000
"""About how many computations they may have together, so that large pipelines take no hour."""


class LatencyPoint(NamedTuple):
    """A plan for GPUs with latency, by its row in the table.

    ``latency_cost_j``: what its iteration takes more, latency included, than that of the plan for the same
    deadline whose clocks change at once, both until the deadline.
    """

    deadline_s: float
    row: int
    latency_cost_j: float


class LatencyPlans:
    """Takes a frontier's plans, by rising deadline, and makes of them those for GPUs with a set latency.

    None is slower than its deadline on the measured times; with the latency none takes more than 0.2 % longer
    than on the measured times, unless even ``fallback`` is slower than the deadline (measured times may rise
    with the clock) or late itself (the highest clocks of a stage differ, and those between are slower).
    """

    def __init__(self, pipeline: Pipeline, fallback: Plan, latency_s: float) -> None:
        """Begin with none.

        Args:
            pipeline: what they are plans of.
            fallback: all at the highest clock, for deadlines for which nothing else is fast enough.
            latency_s: how long it takes to set a clock; more than 0.
        """
        self._pipeline, self._latency_s = pipeline, latency_s
        self._fallback_time_s = fallback.iteration_time_s
        self._table = PlanTableRecorder(fallback)
        self._rows: list[tuple[float, float, LatencyReplay]] = []
        self._points: list[tuple[float, float]] = []
        self._record(fallback, replay_with_latency(pipeline, fallback, latency_s))

    def take(self, deadline_s: float, plan: Plan, *, is_needed: bool) -> None:
        """Take the plan for a deadline whose clocks change at once.

        Where it is not needed and would have to be changed, there will be none for that deadline.
        """
        late = replay_with_latency(self._pipeline, plan, self._latency_s)
        if _keeps_clocks(plan, late, self._latency_s):
            self._record(plan, late)
        elif is_needed:
            dwelled, dwelled_late = _dwelled(self._pipeline, plan, self._latency_s)
            if _is_in_time(dwelled, dwelled_late):
                self._record(dwelled, dwelled_late)
            elif (
                self._fallback_time_s > deadline_s
            ):  # something there must be: the one that is late the least
                pairs = [(plan, late), (dwelled, dwelled_late)]
                self._record(*min(pairs, key=lambda pair: pair[1].iteration_time_s))
        else:
            return
        self._points.append((deadline_s, plan.effective_energy_j))

    def finish(self) -> tuple[list[LatencyPoint], PlanTable]:
        """Return the points, by rising deadline and iteration time and falling energy, and all plans."""
        return [self._cheapest(*point) for point in self._points], self._table.finish()

    def _record(self, plan: Plan, late: LatencyReplay) -> None:
        self._table.record(plan)
        self._rows.append((plan.effective_energy_j, plan.iteration_time_s, late))

    def _cheapest(self, deadline_s: float, instant_effective_j: float) -> LatencyPoint:
        """Return the plan of least effective energy that is in time; of equal ones the fastest.

        So energy and time of what is returned are both monotone in the deadline.
        """
        row = min(
            (row for row, (_, time_s, _) in enumerate(self._rows) if time_s <= deadline_s),
            key=lambda row: self._rows[row][:2],
        )
        # Both until the same time: the blocking power is that of both.
        return LatencyPoint(deadline_s, row, self._rows[row][2].effective_energy_j - instant_effective_j)


def dwelled_count(computation_count: int) -> int:
    """Return how many plans of a pipeline with so many computations may be realised with a dwell."""
    return max(1, min(_DWELLED_COUNT, _DWELLED_COMPUTATIONS // computation_count))


def latency_plan(pipeline: Pipeline, plan: Plan, latency_s: float) -> Plan | None:
    """Return a plan, or one as fast with a dwell, for GPUs with a set latency; None if that is too slow."""
    if _keeps_clocks(plan, replay_with_latency(pipeline, plan, latency_s), latency_s):
        return plan
    dwelled, late = _dwelled(pipeline, plan, latency_s)
    return dwelled if _is_in_time(dwelled, late) else None


def _keeps_clocks(plan: Plan, late: LatencyReplay, latency_s: float) -> bool:
    """Tell whether a plan is good as it is: ``late`` is what becomes of it on GPUs with the latency.

    It is not slower, nearly all time is spent at the planned clocks, and each is kept for two latencies.
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
    """Return how long a stage keeps a clock at least, that of the iteration's end aside."""
    starts_s = [next(run).start_s for _, run in groupby(stage, key=lambda planned: planned.clock_mhz)]
    return min((later_s - earlier_s for earlier_s, later_s in pairwise(starts_s)), default=float("inf"))
