"""What workers do: all that takes seconds of a processor. Runs in their processes."""

from collections import OrderedDict
from dataclasses import replace

from perseus.service.domain.commands import Refine, SlowPlan, Solve
from perseus.service.domain.inputs import Refined, Solved
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
    solve,
    with_lag,
)

POINT_COUNT = 100

CONFIDENCE = 0.95
"""The probability with which a plan keeps its iteration time, for all that measurements' errors can do."""

KEPT_FRONTIERS = 4
"""That a process remembers: a large one has many megabytes, and clients ask for plan after plan of one."""

_frontiers: OrderedDict[int, Frontier] = OrderedDict()


def solve_explaining(
    problem: Pipeline,
    point_count: int = POINT_COUNT,
    slow: SlowPlan | None = None,
    set_latency_s: float = 0.0,
    hull_tolerance: float | None = None,
) -> Frontier:
    """Solve a problem, with the lag between stages that explains a slow plan, if there is one.

    Measured times are planned with so that plans keep theirs with the probability CONFIDENCE.
    `set_latency_s`: how long the GPUs take to set a clock; 0 for plans whose clocks change at once.
    `hull_tolerance`: the share of energies that `solve` may leave out to be quicker; None for its own choice.

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


def plan_of(key: int, frontier: Frontier | None, iteration_time_s: float) -> Plan:
    """Return a plan of a frontier, which comes along unless this process was given it under that key before.

    Raises:
        DeadlineError: no plan is as fast as that.
    """
    if frontier is None:
        frontier = _frontiers.pop(key)
    _frontiers[key] = frontier
    while len(_frontiers) > KEPT_FRONTIERS:
        _frontiers.popitem(last=False)
    return frontier.plan(iteration_time_s)


def answer(hull_tolerance: float | None, asked: Solve | Refine) -> Solved | Refined:
    """Solve what a job's machine asks for, here and now, as workers do.

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
    """Return a plan with the times that were measured, where it was made with others: with a margin."""
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
