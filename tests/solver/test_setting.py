"""Settings of more than a clock: their validity, and their use in the solver's parts."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import (
    Kind,
    MeasuredSetting,
    Measurement,
    Pipeline,
    ProfileError,
    ProfileKey,
    Setting,
    dwell,
    fastest_clock_plan,
    interpolate_clocks,
    merge_measurements,
    one_forward_one_backward,
    plan_at,
    recheck,
    replay,
    replay_with_latency,
    shrink,
    shrink_profiles,
    solve,
)
from perseus.solver.setting import Further, further_of
from perseus.solver.study import Replicas, emulate, envpipe, zeus_global, zeus_per_stage
from tests.solver.pipelines import little_search, pipelines, remeasured

UNLIMITED: Further = (("power_limit_w", 400.0),)
LIMITED: Further = (("power_limit_w", 300.0),)


def limited_pipeline() -> Pipeline:
    """Two stages, two microbatches, the second stage heavier; two clocks without and with a power limit."""
    profiles: dict[ProfileKey, tuple[Measurement, ...]] = {}
    for stage, weight in ((0, 1.0), (1, 1.5)):
        for kind, work in ((Kind.FORWARD, 1.0), (Kind.BACKWARD, 2.0)):
            scale = weight * work
            profiles[stage, 0, kind] = (
                MeasuredSetting(1400, 0.010 * scale, 4.0 * scale, further=UNLIMITED),
                MeasuredSetting(1400, 0.011 * scale, 3.3 * scale, further=LIMITED),
                MeasuredSetting(1000, 0.012 * scale, 3.1 * scale, further=UNLIMITED),
                MeasuredSetting(1000, 0.014 * scale, 2.9 * scale, further=LIMITED),
            )
    return Pipeline(one_forward_one_backward(2, 2), profiles, (50.0, 50.0))


@pytest.mark.parametrize(
    ("further", "message"),
    [
        ((), "expected a setting beside the clock, found none"),
        ((("power_limit_w", "300"),), r"power_limit_w: expected a finite number of watts .*, found '300'"),
        (
            (("power_limit_w", float("nan")),),
            "power_limit_w: expected a finite number of watts .*, found nan",
        ),
        ((("memory_clock_mhz", float("inf")),), "expected a finite number of MHz .*, found inf"),
        ((("kernel", ""),), "kernel: expected a printable text of 1 to 200 characters, found ''"),
        ((("kernel", "a\x1b[2J"),), "kernel: expected a printable text"),
        ((("kernel", " a"),), "kernel: expected a printable text"),
        ((("kernel", "a" * 201),), "kernel: expected a printable text"),
        ((("kernel", 3.0),), "kernel: expected a printable text"),
        ((("", "a"),), "expected a printable name of at most 100 characters without spaces .*, found ''"),
        ((("k" * 101, "a"),), "expected a printable name of at most 100 characters"),
        ((("ker\nnel", "a"),), "expected a printable name"),
        ((("clock_mhz", 1400.0),), "clock_mhz: expected another name, as computations have a clock_mhz"),
        ((("kernel", "a"), ("kernel", "b")), "expected each name once, found kernel again"),
    ],
)
def test_invalid_further_settings_are_refused(further: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        MeasuredSetting(1400, 0.01, 4.0, further=further)


def test_a_measured_setting_is_checked_like_any_measurement() -> None:
    with pytest.raises(ProfileError, match="time_s: expected a positive, finite number, found -1"):
        MeasuredSetting(1400, -1.0, 4.0, further=LIMITED)


def test_a_settings_name_has_its_clock_and_further_settings() -> None:
    assert str(Setting(1400, (("power_limit_w", 300.0), ("kernel", "split")))) == (
        "1400 MHz, power_limit_w 300, kernel split"
    )


def test_all_max_is_the_fastest_setting_at_the_highest_clock() -> None:
    plan = fastest_clock_plan(limited_pipeline())
    assert set(plan.settings.values()) == {Setting(1400, UNLIMITED)}
    assert set(plan.clocks_mhz.values()) == {1400}


def beside_its_clock(m: Measurement) -> Setting:
    return Setting(m.clock_mhz, (("kernel", f"of {m.clock_mhz} MHz"), ("power_limit_w", float(m.clock_mhz))))


def instead_of_its_clock(m: Measurement) -> Setting:
    """All measurements at one clock, by a setting that was the clock: of equal ones, the highest is first."""
    return Setting(1000, (("kernel", f"{10_000 - m.clock_mhz:05}"),))


@pytest.mark.parametrize("rename", [beside_its_clock, instead_of_its_clock])
@given(pipeline=pipelines(), share=st.floats(0.0, 1.0))
@little_search()
def test_a_name_changes_no_plan(
    rename: Callable[[Measurement], Setting], pipeline: Pipeline, share: float
) -> None:
    """To the solver a setting is only a label."""

    def renamed_as_setting(m: Measurement) -> MeasuredSetting:
        clock_mhz, further = rename(m)
        return MeasuredSetting(clock_mhz, m.time_s, m.energy_j, further=further)

    renamed = remeasured(pipeline, renamed_as_setting)
    frontier = solve(pipeline, point_count=3)
    deadline_s = (1 - share) * frontier.t_min_s + share * frontier.t_slow_s
    named, plain = plan_at(renamed, deadline_s), plan_at(pipeline, deadline_s)
    assert named.effective_energy_j == plain.effective_energy_j
    for of_stage, of_plain in zip(named.stages, plain.stages, strict=True):
        assert [(p.computation, p.start_s, p.duration_s) for p in of_stage] == [
            (p.computation, p.start_s, p.duration_s) for p in of_plain
        ]
    names = {m.clock_mhz: rename(m) for some in pipeline.profiles.values() for m in some}
    assert plain.settings == plain.clocks_mhz
    assert named.settings == {c: names[mhz] for c, mhz in plain.clocks_mhz.items()}
    if rename is beside_its_clock:
        other = solve(renamed, point_count=3)
        assert other.points == frontier.points
        for plan, same in (
            (other.plan(deadline_s), frontier.plan(deadline_s)),
            (other.plan_within(deadline_s), frontier.plan_within(deadline_s)),
        ):
            assert plan.settings == {c: names[mhz] for c, mhz in same.clocks_mhz.items()}


@given(st.lists(st.sampled_from([(), LIMITED, UNLIMITED]), min_size=12, max_size=12))
@little_search()
def test_clocks_and_settings_may_be_mixed(given_further: list[Further]) -> None:
    """Some measurements have a clock alone; plans of all kinds have the chosen settings everywhere."""
    pipeline, left = limited_pipeline(), iter(given_further)
    profiles: dict[ProfileKey, tuple[Measurement, ...]] = {}
    for key, some in pipeline.profiles.items():
        measured: dict[int | Setting, Measurement] = {}
        for m in some[:3]:
            further = next(left)
            again = (
                MeasuredSetting(m.clock_mhz, m.time_s, m.energy_j, further=further)
                if further
                else Measurement(m.clock_mhz, m.time_s, m.energy_j)
            )
            measured[again.setting] = again
        profiles[key] = tuple(measured.values())
    pipeline = replace(pipeline, profiles=profiles)
    frontier = solve(pipeline, point_count=4)
    for time_s, plan_for in product(
        [point.iteration_time_s for point in frontier.points], (frontier.plan_within, frontier.plan)
    ):
        plan = plan_for(time_s)
        assert replay(pipeline, plan.settings) == plan
        assert recheck(plan, pipeline, time_s).plan == plan
        emulated = emulate(pipeline, [Replicas(plan)])
        assert emulated.iteration_time_s == plan.iteration_time_s
        assert emulated.energy_j == pytest.approx(plan.energy_j)
        assert [further_of(setting) for setting in plan.settings.values()] == [
            planned.further for stage in plan.stages for planned in stage
        ]


def test_an_unmeasured_setting_is_refused_and_the_measured_ones_listed() -> None:
    pipeline = limited_pipeline()
    settings = dict(fastest_clock_plan(pipeline).settings)
    first = next(iter(settings))
    for wrong, found in ((1400, "1400 MHz"), (Setting(1400, (("power_limit_w", 1.0),)), "1400 MHz, power")):
        with pytest.raises(
            ProfileError, match=rf"measured settings \(1000 MHz, power_limit_w 300; .*\), found {found}"
        ):
            replay(pipeline, {**settings, first: wrong})


def test_a_setting_that_is_measured_twice_is_refused() -> None:
    pipeline = limited_pipeline()
    profiles = {key: (*some, some[0]) for key, some in pipeline.profiles.items()}
    with pytest.raises(
        ProfileError, match="expected one measurement per setting, found 2 at 1400 MHz, power_limit_w 400"
    ):
        replace(pipeline, profiles=profiles)


def test_repeated_measurements_are_merged_setting_by_setting() -> None:
    merged = merge_measurements(
        [
            MeasuredSetting(1400, 0.03, 4.0, further=UNLIMITED),
            MeasuredSetting(1400, 0.02, 3.0, further=LIMITED),
            MeasuredSetting(1400, 0.01, 2.0, further=UNLIMITED),
        ]
    )
    assert [(m.setting, m.time_s) for m in merged] == [
        (Setting(1400, LIMITED), 0.02),
        (Setting(1400, UNLIMITED), pytest.approx(0.02)),
    ]


def noisy_curve(further: Further, factor: float) -> list[MeasuredSetting]:
    clocks_mhz = range(900, 1500, 75)
    noise = [1.02, 0.97, 1.03, 0.99, 1.01, 0.98, 1.02, 0.98]
    return [
        MeasuredSetting(mhz, factor * n * 10 / mhz, 4.0 * n, factor * 0.2 / mhz, 0.1, further=further)
        for mhz, n in zip(clocks_mhz, noise, strict=True)
    ]


def test_computations_inform_each_other_at_the_same_further_settings() -> None:
    forward, backward = (0, 0, Kind.FORWARD), (0, 0, Kind.BACKWARD)
    limited = {forward: noisy_curve(LIMITED, 1.0), backward: noisy_curve(LIMITED, 2.0)}
    unlimited = {forward: noisy_curve(UNLIMITED, 3.0), backward: noisy_curve(UNLIMITED, 5.0)}
    both = {key: (*limited[key], *unlimited[key]) for key in limited}
    found = shrink_profiles(both)
    for alone in (limited, unlimited):
        expected = shrink_profiles({key: tuple(some) for key, some in alone.items()})
        for key in both:
            settings = {m.setting for m in alone[key]}
            assert tuple(m for m in found[key] if m.setting in settings) == expected[key]
    assert shrink(both[forward]) == shrink_profiles({forward: both[forward]})[forward]


def test_a_margin_works_for_settings_as_for_clocks() -> None:
    pipeline = limited_pipeline()
    noisy = remeasured(pipeline, lambda m: replace(m, time_se_s=0.02 * m.time_s))
    frontier = solve(noisy, confidence=0.95)
    assert frontier.margin is not None
    assert frontier.margin.time_share > 0
    assert set(frontier.plan(frontier.t_slow_s).settings.values()) <= {
        m.setting for some in pipeline.profiles.values() for m in some
    }


def test_functions_for_clocks_alone_refuse_settings() -> None:
    pipeline = limited_pipeline()
    plan = fastest_clock_plan(pipeline)
    for refused in (
        lambda: replay_with_latency(pipeline, plan, 0.0),
        lambda: dwell(pipeline, plan, 0.01),
        lambda: solve(pipeline, set_latency_s=0.01),
        lambda: interpolate_clocks(pipeline.profiles[0, 0, Kind.FORWARD], [1200]),
    ):
        with pytest.raises(ProfileError, match=r"expected clocks alone .*, found .* power_limit_w"):
            refused()


def test_baselines_choose_among_settings() -> None:
    pipeline = limited_pipeline()
    for plans in (zeus_global(pipeline), zeus_per_stage(pipeline)):
        used = [
            {setting for c, setting in plan.settings.items() if c.stage == stage}
            for plan in plans
            for stage in (0, 1)
        ]
        assert all(len(of_stage) == 1 for of_stage in used)
        assert {Setting(1400, LIMITED)} in used
        assert {Setting(1000, LIMITED)} in used
    plan = envpipe(pipeline)
    assert plan.iteration_time_s == fastest_clock_plan(pipeline).iteration_time_s
    assert Setting(1000, LIMITED) in plan.settings.values()
