"""Where on the frontier each pipeline runs, and what a reported straggler means there."""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from perseus.service.domain.bounds import MAX_DURATION_S, MAX_SLOWDOWN_FACTOR, MIN_DURATION_S, check_range
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.model import (
    STOCK_MHZ,
    NoSlowdown,
    NoSlowdownBasis,
    PlannedClocks,
    Straggler,
)
from perseus.service.domain.specification import Deadline, OperatingPolicy
from perseus.solver import Frontier, Kind, Pipeline, Plan, PlannedComputation

_DIGITS = 1e-9
"""What rounding may add to a time or a power that is as allowed, as a share."""


def check_straggler(straggler: Straggler) -> None:
    """Refuse a report without a figure or with an impossible one.

    Raises:
        InvalidFieldError: names the figure.
    """
    time_s, factor = straggler.iteration_time_s, straggler.slowdown_factor
    if (time_s is None) == (factor is None):
        raise InvalidFieldError(field="slowness", expected="a time or a factor", found="neither")
    if factor is not None:
        check_range("slowdown_factor", factor, 1, MAX_SLOWDOWN_FACTOR)
    if time_s is not None:
        check_range("iteration_time_s", time_s, MIN_DURATION_S, MAX_DURATION_S)


def straggler_time_s(
    straggler: Straggler, frontier: Frontier, baseline_time_s: float, planned_time_s: float
) -> float:
    """Return T': the straggler's iteration time on the frontier's scale, never below T_min.

    A detected straggler is slower than its own plan by its factor; `planned_time_s` is the iteration time
    under that plan. From a measured iteration time, the part outside the computations is subtracted.
    """
    if straggler.slowdown_factor is not None:
        scale_s = planned_time_s if straggler.is_detected else frontier.t_min_s
        return scale_s * straggler.slowdown_factor
    assert straggler.iteration_time_s is not None
    return max(frontier.t_min_s, straggler.iteration_time_s - overhead_s(frontier, baseline_time_s))


def overhead_s(frontier: Frontier, baseline_time_s: float) -> float:
    """Return the part of a measured iteration outside the computations that the frontier knows.

    That is the excess of the stock baseline over the all-max prediction: transfers, optimizer. It does not
    depend on the clocks. If `baseline_time_s` is 0 (no baseline was measured), so is the result.
    """
    return max(0.0, baseline_time_s - frontier.baseline.iteration_time_s)


def prediction_of_s(planned_time_s: float, frontier: Frontier, baseline_time_s: float) -> float:
    """Return the predicted iteration time of the job if the slowest plan takes `planned_time_s`.

    It is never less than the baseline itself.
    """
    return max(baseline_time_s, overhead_s(frontier, baseline_time_s) + planned_time_s)


def no_slowdown(frontier: Frontier, baseline_time_s: float) -> NoSlowdown:
    """Return the iteration time that is not slower than stock, on the frontier's scale.

    That is the planned all-max iteration; not T_min, which is shorter if the highest clock is not the fastest
    for every computation. A measured baseline (0 if there is none) can only lower it: its excess over the
    all-max plan is not available to the computations (`overhead_s`).
    """
    planned_s = frontier.baseline.iteration_time_s
    if 0 < baseline_time_s < planned_s:
        return NoSlowdown(max(frontier.t_min_s, baseline_time_s), NoSlowdownBasis.BASELINE)
    return NoSlowdown(planned_s, NoSlowdownBasis.ALL_MAX)


def planned_clocks(
    plan: Plan, frontier: Frontier, target_s: float, at_stock: Collection[int]
) -> PlannedClocks:
    """Return the plan for a target time as it is offered, with the set-latency cost of the point there.

    Stages `at_stock` have no clock in it: the frontier knows only one for them, which represents stock.
    """
    plan = with_fixed(plan, frontier.pipeline)
    stages = tuple(
        tuple(planned._replace(clock_mhz=STOCK_MHZ) for planned in computations)
        if stage in at_stock
        else computations
        for stage, computations in enumerate(plan.stages)
    )
    cost_percent = frontier.point_within(target_s).latency_cost_percent
    return PlannedClocks(replace(plan, stages=stages), cost_percent)


def with_fixed(plan: Plan, pipeline: Pipeline) -> Plan:
    """Return the plan with the FIXED computations, which the solver leaves out, in their places.

    They have no clock (0). Only the stage's own order delays them, so each starts when the one before ends.
    """
    if not pipeline.fixed_times_s:
        return plan
    stages = []
    for order, planned in zip(pipeline.schedule.orders, plan.stages, strict=True):
        others, stage, end_s = iter(planned), list[PlannedComputation](), 0.0
        for computation in order:
            if computation.kind is Kind.FIXED:
                duration_s = pipeline.fixed_times_s[computation]
                stage.append(PlannedComputation(computation, 0, end_s, duration_s))
            else:
                stage.append(next(others))
            end_s = stage[-1].start_s + stage[-1].duration_s
        stages.append(tuple(stage))
    return replace(plan, stages=tuple(stages))


def target_times_s(
    frontier: Frontier,
    policy: OperatingPolicy,
    baseline_time_s: float,
    straggler_times_s: Mapping[int, float],
    pipeline_count: int,
    signal_target_s: float | None = None,
    slowdown_share: float = 1.0,
) -> tuple[float, ...]:
    """Return the iteration time that each pipeline may take.

    Without stragglers, the policy decides. With stragglers, all wait for the slowest, so every other pipeline
    may take min(T_slow, T'); the stragglers themselves must not get any slower. For the last two arguments
    see `own_time_s`.
    """
    own_s = own_time_s(frontier, policy, baseline_time_s, signal_target_s, slowdown_share)
    others_s = max([own_s, min(frontier.t_slow_s, max(straggler_times_s.values(), default=0.0))])
    return tuple(own_s if pipeline in straggler_times_s else others_s for pipeline in range(pipeline_count))


def budget_target_times_s(
    frontier: Frontier, targets_s: Sequence[float], budget_target_s: float, slowdowns: Mapping[int, float]
) -> tuple[float, ...]:
    """Return the iteration times of pipelines under a power budget: never faster than without it.

    A straggler gets the plan that its slowness stretches to the target.
    """
    return tuple(
        max(target_s, min(frontier.t_slow_s, budget_target_s / slowdowns.get(pipeline, 1.0)))
        for pipeline, target_s in enumerate(targets_s)
    )


def own_time_s(
    frontier: Frontier,
    policy: OperatingPolicy,
    baseline_time_s: float,
    signal_target_s: float | None = None,
    slowdown_share: float = 1.0,
) -> float:
    """Return the iteration time, from T_min to T*, of a pipeline that waits for no other.

    A slowdown is relative to stock; plans use `slowdown_share` of it. `signal_target_s` is the target of a
    policy that follows a signal; None while the signal asks for no slowdown.
    """
    if policy.deadline is not None:
        wanted_s = _allowed_s(policy.deadline) - overhead_s(frontier, baseline_time_s)
    elif policy.max_average_power_w is not None:
        # Power falls along the frontier, so all points from some index on are below the limit.
        powers_w = [point.energy_j / point.iteration_time_s for point in frontier.points]
        first = bisect_left(powers_w, -policy.max_average_power_w, key=lambda power_w: -power_w)
        return frontier.points[min(first, len(frontier.points) - 1)].iteration_time_s
    elif policy.signal is not None and signal_target_s is not None:
        wanted_s = signal_target_s
    else:
        slowdown = slowdown_share * policy.max_slowdown_percent / 100
        wanted_s = no_slowdown(frontier, baseline_time_s).time_s * (1 + slowdown)
    return max(frontier.t_min_s, min(wanted_s, frontier.t_star_s))


def missed_policy(frontier: Frontier, policy: OperatingPolicy, baseline_time_s: float) -> str:
    """Return how every plan misses a policy's deadline or power, in a sentence; empty if one meets it."""
    if policy.deadline is not None:
        allowed_s = _allowed_s(policy.deadline)
        shortest_s = frontier.t_min_s + overhead_s(frontier, baseline_time_s)
        if shortest_s > allowed_s * (1 + _DIGITS):
            return (
                f"no plan meets the policy's deadline: it leaves {allowed_s:.3f} s an iteration, and the "
                f"fastest plan takes {shortest_s:.3f} s"
            )
    if policy.max_average_power_w is not None:
        last = frontier.points[-1]  # power falls along the frontier
        least_w = last.energy_j / last.iteration_time_s
        if least_w > policy.max_average_power_w * (1 + _DIGITS):
            return (
                f"no plan meets the policy's {policy.max_average_power_w:g} W a pipeline: the plan of least "
                f"power draws {least_w:.0f} W"
            )
    return ""


def _allowed_s(deadline: Deadline) -> float:
    return deadline.time_s / deadline.iteration_count
