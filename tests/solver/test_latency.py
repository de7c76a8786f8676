"""Replays with clock-set latency, by hand and in general; minimum dwell."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import (
    Computation,
    Kind,
    Measurement,
    Pipeline,
    Plan,
    ProfileError,
    ProfileKey,
    Schedule,
    SolverError,
    dwell,
    fastest_clock_plan,
    gpipe,
    plan_at,
    replay,
    replay_with_latency,
    solve,
)
from tests.solver.pipelines import (
    little_search,
    measurements,
    pipelines,
    published_pipeline,
    schedules,
    small_pipeline,
)

FORWARD, BACKWARD = (Kind.FORWARD, Kind.BACKWARD)


def one_stage(*clocks_mhz: int, blocking_power_w: float = 10.0) -> tuple[Pipeline, Plan]:
    """Two forwards and two backwards, each 1 s and 300 J at 1000 MHz, 2 s and 200 J at 500 MHz."""
    curve = measurements((1000, 1.0, 300.0), (500, 2.0, 200.0))
    pipeline = Pipeline(
        gpipe(1, 2), {(0, 0, kind): curve for kind in (FORWARD, BACKWARD)}, (blocking_power_w,)
    )
    return pipeline, replay(pipeline, dict(zip(pipeline.schedule.orders[0], clocks_mhz, strict=True)))


def test_a_lower_clock_comes_late_and_a_raise_in_time() -> None:
    pipeline, plan = one_stage(1000, 500, 1000, 1000)
    late = replay_with_latency(pipeline, plan, 0.25)
    # The second forward does a quarter of its work at 1000 MHz: 0.25 s + 0.75 × 2 s.
    assert late.iteration_time_s == 1.0 + 1.75 + 1.0 + 1.0
    assert late.energy_j == pytest.approx(3 * 300.0 + 0.25 * 300.0 + 0.75 * 200.0)
    assert late.effective_energy_j == pytest.approx(late.energy_j - 10.0 * 4.75)
    assert late.set_count == 2
    assert late.share_on_clock == pytest.approx(4.5 / 4.75)


def test_the_set_back_to_the_first_clock_counts() -> None:
    pipeline, plan = one_stage(1000, 1000, 1000, 500)
    assert replay_with_latency(pipeline, plan, 0.25).set_count == 2
    assert replay_with_latency(*one_stage(500, 500, 500, 500), 0.25).set_count == 0


def test_the_newest_wanted_clock_wins() -> None:
    """A raise is due before the lower clock could be issued: neither is set."""
    late = replay_with_latency(*one_stage(1000, 500, 1000, 1000), 1.5)
    assert (late.iteration_time_s, late.set_count, late.share_on_clock) == (4.0, 0, 0.75)


def test_only_one_set_is_in_progress_at_a_time() -> None:
    """The raise is due at 1.4 s, but the lower clock's set is in progress until 1.8 s: in force at 2.6 s."""
    late = replay_with_latency(*one_stage(1000, 500, 1000, 1000), 0.8)
    # Second forward: 0.8 s + 0.2 × 2 s, until 2.2 s. First backward: 0.4 s at 500 MHz, 0.8 s at 1000 MHz.
    assert late.iteration_time_s == pytest.approx(1.0 + 1.2 + 1.2 + 1.0)
    assert late.set_count == 2


def test_waiting_hides_the_latency_and_fixed_times_stay() -> None:
    """Stage 0 lowers its clock while it waits for stage 1's backward, behind a fixed 1 s."""
    load = Computation(0, Kind.FIXED, 0)
    first, second = gpipe(2, 1).orders
    curve = measurements((1000, 1.0, 300.0), (500, 2.0, 200.0))
    profiles = {(stage, 0, kind): curve for stage in (0, 1) for kind in (FORWARD, BACKWARD)}
    pipeline = Pipeline(Schedule(((load, *first), second)), profiles, (0.0, 0.0), fixed_times_s={load: 1.0})
    clocks_mhz = dict.fromkeys(pipeline.schedule.computations, 1000) | {first[1]: 500}
    plan = replay(pipeline, clocks_mhz)
    late = replay_with_latency(pipeline, plan, 1.5)
    assert late.iteration_time_s == plan.iteration_time_s == 1.0 + 1.0 + 2.0 + 2.0
    assert late.energy_j == pytest.approx(1100.0)
    assert late.share_on_clock == 1.0


def test_at_a_clock_that_was_not_measured_time_and_energy_are_interpolated() -> None:
    profiles = {
        (0, 0, FORWARD): measurements((600, 2.0, 200.0)),
        (0, 0, BACKWARD): measurements((700, 1.0, 300.0), (500, 2.0, 200.0)),
    }
    pipeline = Pipeline(gpipe(1, 1), profiles, (0.0,))
    forward, backward = pipeline.schedule.orders[0]
    late = replay_with_latency(pipeline, replay(pipeline, {forward: 600, backward: 500}), 0.75)
    # Half of the backward at 600 MHz, where it takes 1.5 s and 250 J.
    assert late.iteration_time_s == 2.0 + 0.75 + 1.0
    assert late.energy_j == pytest.approx(200.0 + 125.0 + 100.0)


@given(pipeline=pipelines(), share=st.floats(0, 1))
@little_search()
def test_without_latency_it_is_the_replay(pipeline: Pipeline, share: float) -> None:
    slowest = plan_at(pipeline, 1e9)
    fastest_s = solve(pipeline, point_count=3).t_min_s
    plan = plan_at(pipeline, fastest_s + share * (slowest.iteration_time_s - fastest_s))
    late = replay_with_latency(pipeline, plan, 0.0)
    assert late.iteration_time_s == plan.iteration_time_s
    assert late.energy_j == pytest.approx(plan.energy_j, abs=1e-9)
    assert late.share_on_clock == 1.0


@given(pipeline=pipelines(), latency_s=st.sampled_from([0.0, 0.003, 0.02, 1.0]))
@little_search()
def test_a_dwelled_plan_is_never_slower(pipeline: Pipeline, latency_s: float) -> None:
    plan = plan_at(pipeline, solve(pipeline, point_count=3).t_min_s * 1.1)
    dwelled = dwell(pipeline, plan, latency_s)
    assert dwelled.iteration_time_s <= plan.iteration_time_s
    if not latency_s:
        assert dwelled.effective_energy_j <= plan.effective_energy_j + 1e-9


@st.composite
def monotone_pipelines(draw: st.DrawFn) -> Pipeline:
    """Each kind of computation measured at the same clocks, a higher one never slower."""
    schedule = draw(schedules())
    times_s = st.integers(10, 1000).map(lambda tenths_ms: tenths_ms / 10_000)
    keys = sorted({(c.stage, c.chunk, c.kind) for c in schedule.computations if c.kind is not Kind.FIXED})
    profiles: dict[ProfileKey, tuple[Measurement, ...]] = {}
    for key in keys:
        falling_s = sorted((draw(times_s) for _ in range(4)), reverse=True)
        profiles[key] = tuple(
            Measurement(1000 + 15 * k, time_s, draw(st.floats(0.5, 60.0)))
            for k, time_s in enumerate(falling_s)
        )
    fixed_times_s = {c: 0.01 for c in schedule.computations if c.kind is Kind.FIXED}
    return Pipeline(schedule, profiles, (60.0,) * schedule.stage_count, fixed_times_s=fixed_times_s)


@given(pipeline=monotone_pipelines(), latency_s=st.sampled_from([0.003, 0.02, 0.2]), slowdown=st.floats(1, 2))
@little_search()
def test_a_dwelled_plan_is_not_slowed_by_latency(
    pipeline: Pipeline, latency_s: float, slowdown: float
) -> None:
    plan = plan_at(pipeline, solve(pipeline, point_count=3).t_min_s * slowdown)
    late = replay_with_latency(pipeline, dwell(pipeline, plan, latency_s), latency_s)
    assert late.iteration_time_s <= plan.iteration_time_s + 1e-9


def test_dwell_merges_runs_that_are_too_short_to_switch() -> None:
    """1 s computations and a latency of 1.5 s: only runs of three or more could have a clock of their own."""
    pipeline, plan = one_stage(1000, 500, 1000, 1000)
    assert set(dwell(pipeline, plan, 1.5).clocks_mhz.values()) == {1000}
    assert dwell(pipeline, plan, 0.1).clocks_mhz == plan.clocks_mhz


def test_dwell_spends_the_slack_that_merging_leaves() -> None:
    """All at 1000 MHz would leave 1 of 5 s; all at 800 MHz takes them."""
    curve = measurements((1000, 1.0, 300.0), (800, 1.25, 250.0), (500, 2.0, 200.0))
    pipeline = Pipeline(gpipe(1, 2), {(0, 0, kind): curve for kind in (FORWARD, BACKWARD)}, (10.0,))
    clocks_mhz = dict(zip(pipeline.schedule.orders[0], (1000, 500, 1000, 1000), strict=True))
    dwelled = dwell(pipeline, replay(pipeline, clocks_mhz), 1.5)
    assert set(dwelled.clocks_mhz.values()) == {800}
    assert dwelled.iteration_time_s == 5.0


def test_impossible_latencies_and_plans_are_refused() -> None:
    pipeline, plan = one_stage(1000, 500, 1000, 1000)
    for latency_s in (-0.1, math.nan, math.inf):
        for attempt in (replay_with_latency, dwell):
            with pytest.raises(SolverError, match="latency_s: expected a finite number of 0 or more, found"):
                attempt(pipeline, plan, latency_s)
    other = replay(small_pipeline(), dict.fromkeys(small_pipeline().schedule.computations, 1400))
    with pytest.raises(ProfileError, match=r"measured clocks \(500, 1000 MHz\), found 1400 MHz"):
        replay_with_latency(pipeline, other, 0.01)


@pytest.mark.parametrize(("gpu", "max_energy"), [("a100-sxm", 0.011), ("a40", 0.004)])
def test_latency_on_published_profiles(gpu: str, max_energy: float) -> None:
    pipeline = published_pipeline(gpu, 12)
    plan = plan_at(pipeline, fastest_clock_plan(pipeline).iteration_time_s)
    late = replay_with_latency(pipeline, dwell(pipeline, plan, 0.02), 0.02)
    assert late.iteration_time_s <= 1.002 * plan.iteration_time_s
    assert late.share_on_clock >= 0.9
    assert late.energy_j <= (1 + max_energy) * plan.energy_j
