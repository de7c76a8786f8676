"""A plan in force is re-checked on new profiles before anything is solved."""

from dataclasses import replace

import pytest

from perseus.solver import Pipeline, ProfileError, recheck, solve
from tests.solver.pipelines import remeasured, small_pipeline


def slowed(pipeline: Pipeline, factor: float) -> Pipeline:
    return remeasured(pipeline, lambda m: replace(m, time_s=factor * m.time_s, energy_j=factor * m.energy_j))


def test_unchanged_profiles_leave_the_plan_in_time() -> None:
    frontier = solve(small_pipeline(), point_count=5)
    plan = frontier.plan(frontier.t_star_s)
    checked = recheck(plan, frontier.pipeline, plan.iteration_time_s)
    assert checked.late_s == 0.0
    assert checked.plan == plan
    assert checked.excess_energy_j(frontier) == pytest.approx(
        plan.energy_j - frontier.bound_energy_j(plan.iteration_time_s)
    )


def test_slower_profiles_make_it_late_and_faster_ones_wasteful() -> None:
    frontier = solve(small_pipeline(), point_count=5)
    plan = frontier.plan(frontier.t_min_s)
    checked = recheck(plan, slowed(frontier.pipeline, 1.1), plan.iteration_time_s)
    assert checked.late_s == pytest.approx(0.1 * plan.iteration_time_s)
    faster = slowed(frontier.pipeline, 0.9)
    checked = recheck(plan, faster, plan.iteration_time_s)
    assert checked.late_s == 0.0
    again = solve(faster, point_count=5)
    assert checked.excess_energy_j(again) >= 0.0
    assert again.plan(plan.iteration_time_s).effective_energy_j < checked.plan.effective_energy_j


def test_a_missing_clock_is_named() -> None:
    pipeline = small_pipeline()
    plan = solve(pipeline, point_count=5).baseline
    without = {key: tuple(m for m in some if m.clock_mhz != 1400) for key, some in pipeline.profiles.items()}
    with pytest.raises(ProfileError, match=r"\(1000, 1200 MHz\), found 1400 MHz"):
        recheck(plan, replace(pipeline, profiles=without), 1.0)
