"""Builds the fleet of a scenario: reads and solves profiles, reads signals, makes times absolute."""

from collections.abc import Callable
from datetime import UTC
from itertools import chain
from pathlib import Path

from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.power import Budget, Feed
from perseus.service.domain.signals import HOUR_S, ExtraTime
from perseus.service.signals.csv_file import SignalFileError, read_signal_csv
from perseus.simulation.replay import Fleet, ReplayedBudget, ReplayedJob, ReplayedPolicy, Straggler
from perseus.simulation.scenario import JobPart, Scenario, ScenarioError
from perseus.solver import (
    Frontier,
    MeasuredSetting,
    Pipeline,
    SolverError,
    blocking_of_stages,
    one_forward_one_backward,
    read_profile_csv,
    shrink_profiles,
    solve,
)

Frontiers = dict[tuple[Path, int, int, str], Frontier]
"""By profile, microbatches, GPUs of a stage, and blocking power."""

MAX_COMPUTATION_COUNT = 8_192
"""The most computations of a job's pipeline: the default limit of `perseus solve`."""


def build_fleet(
    scenario: Scenario,
    on_progress: Callable[[float], None] = lambda _: None,
    frontiers: Frontiers | None = None,
) -> Fleet:
    """Return the fleet of a scenario. Identical jobs are solved once.

    `frontiers`: those of earlier fleets; new ones are added.

    Raises:
        ScenarioError: a profile or signal can't be read or solved, or a figure of the fleet is impossible.
    """
    frontiers = {} if frontiers is None else frontiers
    start = scenario.start if scenario.start.tzinfo else scenario.start.replace(tzinfo=UTC)
    begin_s = start.timestamp()
    end_s = begin_s + scenario.duration_h * HOUR_S

    def at_s(hours: float | None) -> float:
        return end_s if hours is None else begin_s + hours * HOUR_S

    jobs = []
    for number, part in enumerate(scenario.jobs):
        key = (part.profile, part.microbatches, part.gpus_per_stage, str(part.blocking_power_w))
        if key not in frontiers:
            frontiers[key] = _solve(part)
        jobs.append(
            ReplayedJob(
                job_id=part.job_id,
                frontier=frontiers[key],
                pipeline_count=part.pipelines,
                feed=part.feed,
                tolerance_percent=part.tolerance_percent,
                weight=part.weight,
                begin_s=at_s(part.begin_h),
                end_s=at_s(part.end_h),
                policy=None
                if part.policy is None
                else ReplayedPolicy(
                    part.policy.signal,
                    ExtraTime(part.policy.extra_time_percent, part.policy.horizon_h * HOUR_S),
                ),
                stragglers=tuple(
                    Straggler(each.pipeline, each.factor, at_s(each.begin_h), at_s(each.end_h))
                    for each in part.stragglers
                ),
                power_error=part.power_error_percent / 100,
            )
        )
        on_progress((number + 1) / len(scenario.jobs))
    stock_w = {
        name: sum(job.stock_power_w for job in jobs if job.feed == name) for name in {j.feed for j in jobs}
    }
    try:
        feeds = {
            part.name: Feed(
                part.name,
                stock_w.get(part.name),
                part.ramp_down_w_per_s or float("inf"),
                part.ramp_up_w_per_s or float("inf"),
            )
            for part in scenario.feeds
        }
        feeds |= {name: Feed(name, power_w) for name, power_w in stock_w.items() if name not in feeds}
        budgets = [
            ReplayedBudget(
                Budget(
                    part.budget_id,
                    part.feed,
                    stock_w[part.feed] * part.percent / 100
                    if part.percent is not None
                    else part.limit_w or 0.0,
                    at_s(part.begin_h),
                    None if part.end_h is None else at_s(part.end_h),
                ),
                known_s=at_s(part.known_h),
                cancelled_s=float("inf") if part.cancelled_h is None else at_s(part.cancelled_h),
            )
            for part in scenario.budgets
        ]
        signals = {
            part.kind: read_signal_csv(
                part.file, part.kind, part.column, unit=part.unit, stale_s=part.stale_h * HOUR_S
            )
            for part in scenario.signals
        }
    except (InvalidFieldError, SignalFileError) as error:
        raise ScenarioError(str(error)) from None
    return Fleet(
        begin_s=begin_s,
        end_s=end_s,
        feeds=feeds,
        jobs=jobs,
        budgets=budgets,
        signals=signals,
        noise=scenario.noise_percent / 100,
        seed=scenario.seed,
        forecast=scenario.forecast,
    )


def _solve(part: JobPart) -> Frontier:
    try:
        profiles = shrink_profiles(read_profile_csv(part.profile, part.gpus_per_stage))
        for m in chain.from_iterable(profiles.values()):
            if isinstance(m, MeasuredSetting):
                names = ", ".join(name for name, _ in m.further)
                raise ScenarioError(
                    f"job {part.job_id!r}: expected clocks alone in {part.profile}, as agents set nothing "
                    f"else, found the further settings {names}"
                )
        stage_count = 1 + max(stage for stage, _, _ in profiles)
        computation_count = 2 * stage_count * part.microbatches
        if computation_count > MAX_COMPUTATION_COUNT:
            raise ScenarioError(
                f"job {part.job_id!r}: expected at most {MAX_COMPUTATION_COUNT} computations, "
                f"found {computation_count}"
            )
        waiting_w, by_clock_w = blocking_of_stages(part.blocking_power_w, part.gpus_per_stage, stage_count)
        return solve(
            Pipeline(
                schedule=one_forward_one_backward(stage_count, part.microbatches),
                profiles=profiles,
                blocking_power_w=waiting_w,
                blocking_powers_w=by_clock_w,
            )
        )
    except SolverError as error:
        raise ScenarioError(f"job {part.job_id!r}: {error}") from None
