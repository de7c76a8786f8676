"""To the solver a setting is only a label: the effect of renamed and added settings on plans."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import (
    MeasuredSetting,
    Measurement,
    Pipeline,
    ProfileKey,
    Setting,
    plan_at,
    solve,
)
from perseus.solver.setting import Further
from tests.solver.pipelines import little_search, pipelines, remeasured, small_pipeline

HERE: Further = (("kernel", "here"),)
ADDED: Further = (("kernel", "added"),)


def with_further(m: Measurement, further: Further, clock_mhz: int | None = None) -> MeasuredSetting:
    return MeasuredSetting(clock_mhz or m.clock_mhz, m.time_s, m.energy_j, further=further)


def beside_its_clock(m: Measurement) -> Setting:
    return Setting(m.clock_mhz, (("kernel", f"of {m.clock_mhz} MHz"), ("power_limit_w", float(m.clock_mhz))))


def instead_of_its_clock(m: Measurement) -> Setting:
    """All measurements at one clock, distinguished by a setting that was the clock."""
    return Setting(1000, (("kernel", f"{m.clock_mhz:05}"),))


@pytest.mark.parametrize("rename", [beside_its_clock, instead_of_its_clock])
@given(pipeline=pipelines(), share=st.floats(0.0, 1.0))
@little_search()
def test_a_name_changes_no_plan(
    rename: Callable[[Measurement], Setting], pipeline: Pipeline, share: float
) -> None:
    renamed = remeasured(pipeline, lambda m: with_further(m, rename(m).further, rename(m).clock_mhz))
    frontier = solve(pipeline, point_count=3)
    deadline_s = (1 - share) * frontier.t_min_s + share * frontier.t_slow_s
    named, plain = plan_at(renamed, deadline_s), plan_at(pipeline, deadline_s)
    assert named.effective_energy_j == plain.effective_energy_j
    for of_stage, of_plain in zip(named.stages, plain.stages, strict=True):
        assert [(p.computation, p.start_s, p.duration_s) for p in of_stage] == [
            (p.computation, p.start_s, p.duration_s) for p in of_plain
        ]
    names = {m.clock_mhz: rename(m) for some in pipeline.profiles.values() for m in some}
    assert named.settings == {c: names[mhz] for c, mhz in plain.clocks_mhz.items()}
    if rename is beside_its_clock:
        other = solve(renamed, point_count=3)
        assert other.points == frontier.points
        for plan, same in (
            (other.plan(deadline_s), frontier.plan(deadline_s)),
            (other.plan_within(deadline_s), frontier.plan_within(deadline_s)),
        ):
            assert plan.settings == {c: names[mhz] for c, mhz in same.clocks_mhz.items()}


@given(pipeline=pipelines(), is_dominated=st.booleans(), data=st.data())
@little_search()
def test_an_additional_setting_never_makes_the_frontier_worse_and_a_dominated_one_changes_nothing(
    pipeline: Pipeline, is_dominated: bool, data: st.DataObject
) -> None:
    """Dominated: longer than another, and dearer by more than the blocking power of the extra time."""
    pipeline = remeasured(pipeline, lambda m: with_further(m, HERE))
    profiles: dict[ProfileKey, tuple[Measurement, ...]] = {}
    for key, some in pipeline.profiles.items():
        m = data.draw(st.sampled_from(some))
        time_s, energy_j = data.draw(st.integers(10, 1000)) / 10_000, data.draw(st.floats(0.5, 60.0))
        if is_dominated:
            share = data.draw(st.sampled_from([1.0, 1e-3]))
            energy_j = m.energy_j + share * (energy_j + pipeline.blocking_power_w[key[0]] * time_s)
            time_s = m.time_s + share * time_s
        profiles[key] = (*some, MeasuredSetting(m.clock_mhz, time_s, energy_j, further=ADDED))
    more, before = (solve(each, point_count=3) for each in (replace(pipeline, profiles=profiles), pipeline))
    assert more.t_min_s <= before.t_min_s
    assert more.baseline.iteration_time_s <= before.baseline.iteration_time_s
    for point in before.points:
        bound_j = before.bound_energy_j(point.deadline_s)
        # Slopes are whole microwatts, rounded down.
        assert more.bound_energy_j(point.deadline_s) <= bound_j + 1e-4
        assert more.plan(point.deadline_s).iteration_time_s <= point.deadline_s * (1 + 1e-12)
        if is_dominated:
            assert more.plan(point.deadline_s) == before.plan(point.deadline_s)
            assert more.plan_within(point.deadline_s) == before.plan_within(point.deadline_s)
    if is_dominated:
        assert (more.points, more.baseline) == (before.points, before.baseline)


def test_a_better_setting_is_taken() -> None:
    """A copy of each option that is a fifth cheaper at the same time: the bound falls by a fifth."""

    def further(m: Measurement, further: Further, factor: float) -> MeasuredSetting:
        return MeasuredSetting(m.clock_mhz, m.time_s, factor * m.energy_j, further=further)

    clocks = small_pipeline(0.0)
    pipeline = remeasured(clocks, lambda m: further(m, HERE, 1.0))
    better = {
        key: (*some, *(further(m, ADDED, 0.8) for m in some)) for key, some in pipeline.profiles.items()
    }
    before, found = (solve(each, point_count=3) for each in (pipeline, replace(pipeline, profiles=better)))
    assert found.t_min_s == before.t_min_s
    for point in before.points:
        assert found.bound_energy_j(point.deadline_s) == pytest.approx(
            0.8 * before.bound_energy_j(point.deadline_s)
        )
        plan = found.plan(point.deadline_s)
        assert {planned.further for stage in plan.stages for planned in stage} == {ADDED}
