"""The work of worker processes: everything that takes seconds of CPU time."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from perseus.service.domain.commands import Refine, SlowPlan, Solve
from perseus.service.domain.inputs import Refined, Solved
from perseus.service.domain.messages import rebalancing_to_proto
from perseus.solver import (
    Frontier,
    LagError,
    Pipeline,
    Plan,
    Refinement,
    common_lag_s,
    explaining_lag_s,
    fastest_clock_plan,
    predicted_iteration_time_s,
    rebalance,
    solve,
    with_lag,
)
from perseus.v1 import frontier_pb2

POINT_COUNT = 100

CONFIDENCE = 0.95
"""The probability with which a plan keeps its iteration time despite measurement errors."""

KEPT_FRONTIERS = 4
"""Frontiers that a process keeps: a large one takes many megabytes, and clients ask for plan after plan."""

_frontiers: OrderedDict[int, Frontier] = OrderedDict()


def solve_explaining(
    problem: Pipeline,
    point_count: int = POINT_COUNT,
    slow: SlowPlan | None = None,
    set_latency_s: float = 0.0,
    hull_tolerance: float | None = None,
) -> Frontier:
    """Solve a problem, with the lag between stages that explains a slow plan, if one is given.

    Plans keep their iteration time with the probability CONFIDENCE, given the errors of measured times.
    `set_latency_s`: how long the GPUs take to set a clock; 0 for clocks that change at once.
    `hull_tolerance`: the share of energies that `solve` may leave out for speed; None for its own choice.

    Raises:
        LagError: no lag explains the slow plan.
        SolverError: the problem can't be solved.
    """
    if slow is not None:
        problem = with_lag(problem, _lag_s(problem, slow))
    return solve(
        problem,
        point_count=point_count,
        hull_tolerance=hull_tolerance,
        set_latency_s=set_latency_s,
        confidence=CONFIDENCE,
    )


def rebalancing_of(frontier: Frontier, layers: Sequence[int]) -> frontier_pb2.Rebalancing:
    """Return what moving layers would bring a job with that frontier.

    Raises:
        SolverError: the layers don't fit.
    """
    return rebalancing_to_proto(rebalance(frontier, layers))


def plan_of(key: int, frontier: Frontier | None, iteration_time_s: float) -> Plan:
    """Return a plan of a frontier; `frontier` is None if this process already keeps it under the key.

    Raises:
        DeadlineError: no plan is that fast.
    """
    if frontier is None:
        frontier = _frontiers.pop(key)
    _frontiers[key] = frontier
    while len(_frontiers) > KEPT_FRONTIERS:
        _frontiers.popitem(last=False)
    return frontier.plan(iteration_time_s)


def answer(hull_tolerance: float | None, asked: Solve | Refine) -> Solved | Refined:
    """Execute a job's Solve or Refine command in this process, as workers do.

    Raises:
        SolverError: it can't be solved.
    """
    if isinstance(asked, Refine):
        return Refined(asked.refinement, refine(asked.refinement))
    return Solved(
        solve_explaining(asked.problem, POINT_COUNT, asked.slow, asked.set_latency_s, hull_tolerance)
    )


def refine(refinement: Refinement) -> Plan:
    """Refine one plan of a frontier."""
    return refinement.plan()


def _lag_s(problem: Pipeline, slow: SlowPlan) -> float:
    planned, stock = _as_measured(slow.plan, problem), fastest_clock_plan(problem)
    lag_s = explaining_lag_s(problem, planned, slow.median_time_s, stock, slow.baseline_time_s)
    if lag_s is None:
        predicted_s = predicted_iteration_time_s(problem, planned)
        predicted_stock_s = predicted_iteration_time_s(problem, stock)
        residual_s = (slow.median_time_s - slow.baseline_time_s) - (predicted_s - predicted_stock_s)
        raise LagError(
            f"no lag between stages explains iterations of {slow.median_time_s:.6f} s, "
            f"{slow.baseline_time_s:.6f} s at stock: {residual_s:.6f} s remain",
            median_time_s=slow.median_time_s,
            baseline_time_s=slow.baseline_time_s,
            predicted_time_s=predicted_s,
            predicted_baseline_time_s=predicted_stock_s,
            residual_s=residual_s,
            transfer_lag_s=common_lag_s(problem),
        )
    return lag_s


def _as_measured(plan: Plan, problem: Pipeline) -> Plan:
    """Return a plan with measured times in place of the padded ones that it was made with."""
    measured_s = {(*key, m.clock_mhz): m.time_s for key, some in problem.profiles.items() for m in some}
    stages = tuple(
        tuple(
            planned._replace(
                duration_s=measured_s.get((c.stage, c.chunk, c.kind, planned.clock_mhz), planned.duration_s)
            )
            for planned in stage
            for c in [planned.computation]
        )
        for stage in plan.stages
    )
    return replace(plan, stages=stages)
