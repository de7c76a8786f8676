"""Estimate one lag for all transfers between stages, from two measured iterations.

Activations and gradients take time to travel. At the highest clocks, waits of light stages hide much of that
time; a plan that stretches a light stage until it has no slack exposes it. So if a plan exceeds its
prediction by more than the all-max plan does, the excess shows how long a transfer takes: the longer the lag,
the further apart the two plans' iteration times.

Fits (`perseus.solver.study`) estimate lags per boundary and direction, but need many plans.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from perseus.solver.computation import Computation
from perseus.solver.errors import PipelineError
from perseus.solver.graph import Dependency, order_computations
from perseus.solver.pipeline import Pipeline
from perseus.solver.plan import Plan, earliest_finishes_ps

_MEASUREMENT_TOLERANCE = 0.01
"""Relative error of a measured iteration time."""

_GRID_COUNT = 32
"""Grid steps of the search: as the lag grows, the plans may move apart and together again."""


def with_lag(pipeline: Pipeline, lag_s: float) -> Pipeline:
    """Return the pipeline with this lag, in seconds, for every transfer along its paths, in both directions.

    Raises:
        PipelineError: the lag is not finite, or negative.
    """
    hops = _hops(pipeline)
    return replace(
        pipeline,
        activation_lags_s=dict.fromkeys(hops, lag_s) if lag_s else {},
        gradient_lags_s={(receiver, sender): lag_s for sender, receiver in hops} if lag_s else {},
    )


def common_lag_s(pipeline: Pipeline) -> float:
    """Return the lag of every transfer along the pipeline's paths, in seconds; 0 if there is none.

    Raises:
        PipelineError: transfers have different lags, or there are extra ones.
    """
    if pipeline.extra_lags_s:
        found = len(pipeline.extra_lags_s)
        raise PipelineError(f"extra_lags_s: expected none, found {found}", field="extra_lags_s", found=found)
    hops = _hops(pipeline)
    lags_s = {pipeline.activation_lags_s.get(hop, 0.0) for hop in hops}
    lags_s |= {pipeline.gradient_lags_s.get((receiver, sender), 0.0) for sender, receiver in hops}
    if len(lags_s) > 1:
        raise PipelineError(
            f"activation_lags_s, gradient_lags_s: expected one lag for all, found {min(lags_s)} to "
            f"{max(lags_s)} s",
            field="activation_lags_s",
            found=f"{min(lags_s)} to {max(lags_s)}",
        )
    return lags_s.pop() if lags_s else 0.0


def explaining_lag_s(
    pipeline: Pipeline, slow_plan: Plan, slow_time_s: float, fast_plan: Plan, fast_time_s: float
) -> float | None:
    """Return the least lag of all transfers that explains two plans' measured iteration times.

    With this lag the replayed plans differ by the measured difference. The search starts at the pipeline's
    own common lag, with which they may differ by more already. The rest of an iteration (the optimizer) is
    assumed equal under both plans and not negative, so a lag that makes the replayed fast plan longer than
    measured is ruled out. Return None if no lag explains the times.

    Raises:
        PipelineError: the pipeline's transfers have different lags, or there are extra ones.
    """
    slow, fast = _iteration_time_ps(pipeline, slow_plan), _iteration_time_ps(pipeline, fast_plan)
    scale = pipeline.scale
    excess_ps = scale.to_ps(slow_time_s - fast_time_s)
    max_ps = scale.to_ps((1 + _MEASUREMENT_TOLERANCE) * fast_time_s)

    def explains(lag_ps: int) -> bool:
        return slow(lag_ps) - fast(lag_ps) >= excess_ps

    def is_too_long(lag_ps: int) -> bool:
        return fast(lag_ps) > max_ps

    min_ps = scale.to_ps(common_lag_s(pipeline))
    if not _hops(pipeline) or is_too_long(min_ps):
        return None
    if explains(min_ps):
        return scale.to_s(min_ps)
    longest_ps = _first(is_too_long, min_ps, max(min_ps, max_ps) + 1) - 1
    grid_ps = [min_ps + (longest_ps - min_ps) * k // _GRID_COUNT for k in range(_GRID_COUNT + 1)]
    for below_ps, grid_lag_ps in pairwise(grid_ps):
        if explains(grid_lag_ps):
            return scale.to_s(_first(explains, below_ps, grid_lag_ps))
    return None


def predicted_iteration_time_s(pipeline: Pipeline, plan: Plan) -> float:
    """Return the iteration time with a plan's durations and the lag that is common to all transfers.

    Raises:
        PipelineError: the pipeline's transfers have different lags, or there are extra ones.
    """
    scale = pipeline.scale
    return scale.to_s(_iteration_time_ps(pipeline, plan)(scale.to_ps(common_lag_s(pipeline))))


def _hops(pipeline: Pipeline) -> set[tuple[int, int]]:
    """Return the (sending stage, receiving stage) of activations; gradients travel the other way."""
    return {
        (sender, receiver)
        for path in pipeline.schedule.paths
        for (sender, _), (receiver, _) in pairwise(path)
        if sender != receiver
    }


def _iteration_time_ps(pipeline: Pipeline, plan: Plan) -> Callable[[int], int]:
    """Return the plan's iteration time as a function of the lag, both in scaled picoseconds."""
    computations, dependencies = order_computations(with_lag(pipeline, 1.0))
    times_s: dict[Computation, float] = dict(pipeline.fixed_times_s)
    times_s |= {planned.computation: planned.duration_s for stage in plan.stages for planned in stage}
    durations_ps = [pipeline.scale.to_ps(times_s[computation]) for computation in computations]

    def replayed(lag_ps: int) -> int:
        # The lags of one second mark the dependencies that are transfers.
        lagged = [Dependency(earlier, later, lag_ps if lag else 0) for earlier, later, lag in dependencies]
        return max(earliest_finishes_ps(lagged, durations_ps))

    return replayed


def _first(holds: Callable[[int], bool], below: int, high: int) -> int:
    """Return the first value for which `holds`; it does not hold at `below`, and holds at `high`."""
    while high - below > 1:
        middle = (below + high) // 2
        if holds(middle):
            high = middle
        else:
            below = middle
    return high
