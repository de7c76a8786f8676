"""To the solver a setting is only a label: the effect of renamed and added settings on plans."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import (
    Frontier,
    MeasuredSetting,
    Measurement,
    Pipeline,
    ProfileKey,
    Setting,
    fastest_clock_plan,
    plan_at,
    solve,
)
from perseus.solver.setting import Further
from tests.solver.pipelines import little_search, pipelines, remeasured, small_pipeline

HERE: Further = (("kernel", "here"),)
ADDED: Further = (("kernel", "added"),)


def with_further(m: Measurement, further: Further, clock_mhz: int | None = None) -> MeasuredSetting:
    return MeasuredSetting(clock_mhz or m.clock_mhz, m.time_s, m.energy_j, further=further)


def with_added(pipeline: Pipeline, added: dict[ProfileKey, MeasuredSetting]) -> Pipeline:
    profiles = {key: (*some, added[key]) if key in added else some for key, some in pipeline.profiles.items()}
    return replace(pipeline, profiles=profiles)


def assert_same(found: Frontier, expected: Frontier) -> None:
    assert found.points == expected.points
    assert found.baseline == expected.baseline
    for point in expected.points:
        assert found.plan(point.deadline_s) == expected.plan(point.deadline_s)
        assert found.plan_within(point.deadline_s) == expected.plan_within(point.deadline_s)


@given(pipelines())
@little_search()
def test_a_name_beside_each_clock_changes_no_plan(pipeline: Pipeline) -> None:
    def rename(m: Measurement) -> MeasuredSetting:
        return with_further(m, (("kernel", f"of {m.clock_mhz} MHz"), ("power_limit_w", float(m.clock_mhz))))

    found, expected = solve(remeasured(pipeline, rename), point_count=3), solve(pipeline, point_count=3)
    assert found.points == expected.points
    for point in expected.points:
        for plan, same in (
            (found.plan(point.deadline_s), expected.plan(point.deadline_s)),
            (found.plan_within(point.deadline_s), expected.plan_within(point.deadline_s)),
            (found.baseline, expected.baseline),
        ):
            assert [[p[:4] for p in stage] for stage in plan.stages] == [
                [p[:4] for p in stage] for stage in same.stages
            ]
            assert plan.settings == {
                c: Setting(mhz, (("kernel", f"of {mhz} MHz"), ("power_limit_w", float(mhz))))
                for c, mhz in same.clocks_mhz.items()
            }


@given(pipelines(), st.floats(0.0, 1.0))
@little_search()
def test_settings_that_share_a_clock_are_distinguished(pipeline: Pipeline, share: float) -> None:
    """All measurements of a computation at one clock, distinguished by a setting that was the clock."""
    same_clock = remeasured(
        pipeline, lambda m: with_further(m, (("kernel", f"{m.clock_mhz:05}"),), clock_mhz=1000)
    )
    frontier = solve(pipeline, point_count=3)
    deadline_s = (1 - share) * frontier.t_min_s + share * frontier.t_slow_s
    found, expected = plan_at(same_clock, deadline_s), plan_at(pipeline, deadline_s)
    assert found.iteration_time_s == expected.iteration_time_s
    assert found.effective_energy_j == expected.effective_energy_j
    for of_stage, of_expected in zip(found.stages, expected.stages, strict=True):
        assert [(p.computation, p.start_s, p.duration_s) for p in of_stage] == [
            (p.computation, p.start_s, p.duration_s) for p in of_expected
        ]


@given(pipelines(), st.data())
@little_search()
def test_a_dominated_setting_changes_nothing(pipeline: Pipeline, data: st.DataObject) -> None:
    """Longer, and dearer by more than the blocking power of the extra time."""
    pipeline = remeasured(pipeline, lambda m: with_further(m, HERE))
    added: dict[ProfileKey, MeasuredSetting] = {}
    for key, some in pipeline.profiles.items():
        better = data.draw(st.sampled_from(some))
        longer_s = data.draw(st.floats(1e-6, 1.0))
        dearer_j = pipeline.blocking_power_w[key[0]] * longer_s + data.draw(st.floats(1e-6, 10.0))
        added[key] = MeasuredSetting(
            better.clock_mhz, better.time_s + longer_s, better.energy_j + dearer_j, further=ADDED
        )
    assert_same(solve(with_added(pipeline, added), point_count=3), solve(pipeline, point_count=3))


@given(pipelines(), st.data())
@little_search()
def test_an_additional_setting_never_makes_the_frontier_worse(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    pipeline = remeasured(pipeline, lambda m: with_further(m, HERE))
    added = {
        key: MeasuredSetting(
            data.draw(st.sampled_from(some)).clock_mhz,
            data.draw(st.integers(10, 1000)) / 10_000,
            data.draw(st.floats(0.5, 60.0)),
            further=ADDED,
        )
        for key, some in pipeline.profiles.items()
    }
    more = with_added(pipeline, added)
    found, before = solve(more, point_count=3), solve(pipeline, point_count=3)
    assert found.t_min_s <= before.t_min_s
    assert fastest_clock_plan(more).iteration_time_s <= before.baseline.iteration_time_s
    for point in before.points:
        bound_j = before.bound_energy_j(point.deadline_s)
        # Slopes are whole microwatts, rounded down.
        assert found.bound_energy_j(point.deadline_s) <= bound_j + 1e-4
        assert found.plan(point.deadline_s).iteration_time_s <= point.deadline_s * (1 + 1e-12)


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
