"""Replays with clock-set latency, by hand and in general; minimum dwell, and frontiers that keep it."""

import math
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import (
    Kind,
    Measurement,
    Pipeline,
    Plan,
    ProfileError,
    ProfileKey,
    SolverError,
    dwell,
    fastest_clock_plan,
    gpipe,
    plan_at,
    replay,
    replay_with_latency,
    solve,
)
from perseus.solver.dwelled_plans import dwelled_count
from tests.solver.pipelines import (
    clocked,
    little_search,
    measurements,
    pipeline_of,
    pipelines,
    published_pipeline,
    schedules,
    small_pipeline,
)

FORWARD, BACKWARD = (Kind.FORWARD, Kind.BACKWARD)


def one_stage(*clocks_mhz: int) -> tuple[Pipeline, Plan]:
    """Two forwards and two backwards, each 1 s and 300 J at 1000 MHz, 2 s and 200 J at 500 MHz; 10 W."""
    pipeline = pipeline_of(gpipe(1, 2), blocking_power_w=(10.0,))
    return pipeline, replay(pipeline, dict(zip(pipeline.schedule.orders[0], clocks_mhz, strict=True)))


@pytest.mark.parametrize(
    ("clocks_mhz", "latency_s", "iteration_time_s", "set_count"),
    [
        # The second forward does a quarter of its work at 1000 MHz: 0.25 s + 0.75 × 2 s.
        pytest.param(
            (1000, 500, 1000, 1000), 0.25, 1 + 1.75 + 1 + 1, 2, id="lowered late and raised in time"
        ),
        pytest.param((1000, 1000, 1000, 500), 0.25, 3 + 1.75, 2, id="the set back to the first clock counts"),
        pytest.param((500, 500, 500, 500), 0.25, 8.0, 0, id="one clock"),
        pytest.param((1000, 500, 1000, 1000), 1.5, 4.0, 0, id="a raise is due before the lower clock is set"),
        # The raise is due at 1.4 s, but the lower clock's set is in progress until 1.8 s: in force at 2.6 s.
        # Second forward: 0.8 s + 0.2 × 2 s, until 2.2 s. First backward: 0.4 s at 500 MHz, 0.8 s at 1000 MHz.
        pytest.param((1000, 500, 1000, 1000), 0.8, 1 + 1.2 + 1.2 + 1, 2, id="one set at a time"),
    ],
)
def test_clocks_come_late_by_the_latency(
    clocks_mhz: tuple[int, ...], latency_s: float, iteration_time_s: float, set_count: int
) -> None:
    late = replay_with_latency(*one_stage(*clocks_mhz), latency_s)
    assert late.iteration_time_s == pytest.approx(iteration_time_s)
    assert late.set_count == set_count


def test_energy_and_time_on_the_planned_clock_are_shares_of_the_work() -> None:
    late = replay_with_latency(*one_stage(1000, 500, 1000, 1000), 0.25)
    assert late.energy_j == pytest.approx(3 * 300.0 + 0.25 * 300.0 + 0.75 * 200.0)
    assert late.effective_energy_j == pytest.approx(late.energy_j - 10.0 * 4.75)
    assert late.share_on_clock == pytest.approx(4.5 / 4.75)
    assert replay_with_latency(*one_stage(1000, 500, 1000, 1000), 1.5).share_on_clock == 0.75


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
    keys = sorted({(c.stage, c.chunk, c.kind) for c in clocked(schedule)})
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
    pipeline = pipeline_of(gpipe(1, 2), curve, (10.0,))
    clocks_mhz = dict(zip(pipeline.schedule.orders[0], (1000, 500, 1000, 1000), strict=True))
    dwelled = dwell(pipeline, replay(pipeline, clocks_mhz), 1.5)
    assert set(dwelled.clocks_mhz.values()) == {800}
    assert dwelled.iteration_time_s == 5.0


def test_impossible_latencies_and_plans_are_refused() -> None:
    pipeline, plan = one_stage(1000, 500, 1000, 1000)
    for latency_s in (-0.1, math.nan, math.inf):
        for attempt in (
            lambda s: replay_with_latency(pipeline, plan, s),
            lambda s: dwell(pipeline, plan, s),
            lambda s: solve(pipeline, set_latency_s=s),
        ):
            with pytest.raises(SolverError, match="latency_s: expected a finite number of 0 or more, found"):
                attempt(latency_s)
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


def shortest_run_s(plan: Plan) -> float:
    """The shortest time that a clock is kept, except those at the iteration's end."""
    shortest_s = float("inf")
    for stage in plan.stages:
        starts_s = [next(run).start_s for _, run in groupby(stage, key=lambda planned: planned.clock_mhz)]
        for earlier_s, later_s in pairwise(starts_s):
            shortest_s = min(shortest_s, later_s - earlier_s)
    return shortest_s


@pytest.mark.slow("plans of the published model are dwelled")
def test_the_larger_the_latency_the_fewer_clocks_a_frontier_s_plans_have() -> None:
    """A small one changes no plan; a large one makes computations share clocks, at a cost that is said."""
    pipeline = published_pipeline("a100-sxm", 12)
    instant, small, large = (solve(pipeline, point_count=8, set_latency_s=each) for each in (0.0, 0.001, 0.2))
    at_once, kept, plan = (each.plan_within(each.t_min_s) for each in (instant, small, large))
    assert all(point.latency_cost_j == 0.0 for point in instant.points)
    assert kept.clocks_mhz == at_once.clocks_mhz
    assert 0 < small.points[0].latency_cost_percent < 0.1
    assert shortest_run_s(at_once) < 2 * 0.2 <= shortest_run_s(plan)
    assert plan.iteration_time_s <= instant.t_min_s
    assert instant.points[0].energy_j < plan.energy_j < large.baseline.energy_j
    point = large.points[0]
    assert point.latency_cost_j >= plan.energy_until_j(point.deadline_s) - instant.points[0].energy_j
    assert large.point_within(large.t_min_s) == point


def test_large_pipelines_have_fewer_plans_with_a_dwell() -> None:
    assert [dwelled_count(size) for size in (4, 768, 3_000, 65_536)] == [20, 20, 10, 1]
