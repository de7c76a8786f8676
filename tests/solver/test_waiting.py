"""Blocking power by clock: what plans cost, against a sum by hand and one from a plan's timeline."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import (
    Computation,
    Kind,
    Pipeline,
    PipelineError,
    Plan,
    gpipe,
    plan_at,
    replay,
    replay_with_latency,
    solve,
)
from tests.solver.pipelines import little_search, measurements, pipelines, small_pipeline


@st.composite
def pipelines_by_clock(draw: st.DrawFn) -> Pipeline:
    """Pipelines whose blocking power is known at one to three clocks, and rises by any amounts."""
    pipeline = draw(pipelines())
    by_clock = []
    for least_w in pipeline.blocking_power_w:
        clocks_mhz = sorted(draw(st.sets(st.integers(990, 1070), min_size=1, max_size=3)))
        powers_w = sorted(least_w + draw(st.floats(0.0, 50.0)) for _ in clocks_mhz)
        by_clock.append(dict(zip(clocks_mhz, powers_w, strict=True)))
    return replace(pipeline, blocking_powers_w=tuple(by_clock))


def at_w(by_clock: dict[int, float], clock_mhz: int) -> float:
    known = sorted(by_clock.items())
    for (low_mhz, low_w), (high_mhz, high_w) in pairwise(known):
        if low_mhz <= clock_mhz <= high_mhz:
            return low_w + (high_w - low_w) * (clock_mhz - low_mhz) / (high_mhz - low_mhz)
    return known[0][1] if clock_mhz < known[0][0] else known[-1][1]


def energy_j(pipeline: Pipeline, plan: Plan, until_s: float) -> float:
    """Follow each GPU through the iteration, wait by wait."""
    total_j = 0.0
    for planned, by_clock in zip(plan.stages, pipeline.blocking_powers_w, strict=True):
        now_s, before_mhz = 0.0, planned[0].clock_mhz if planned else 0
        for p in planned:
            c = p.computation
            (m,) = (m for m in pipeline.profiles[c.stage, c.chunk, c.kind] if m.clock_mhz == p.clock_mhz)
            total_j += at_w(dict(by_clock), min(before_mhz, p.clock_mhz)) * (p.start_s - now_s) + m.energy_j
            now_s, before_mhz = p.start_s + p.duration_s, p.clock_mhz
        total_j += by_clock[max(by_clock)] * (until_s - now_s)
    return total_j


def test_a_wait_draws_the_power_of_the_lower_clock_and_the_last_one_that_of_stock() -> None:
    """Forward at 1000 MHz from 1 s to 2 s, backward at 500 MHz from 4 s to 6 s, then 3 s more."""
    curve = measurements((1000, 1.0, 300.0), (500, 2.0, 200.0))
    profiles = {(0, 0, kind): curve for kind in (Kind.FORWARD, Kind.BACKWARD)}
    schedule = gpipe(1, 1)
    forward, backward = schedule.orders[0]
    before = Computation(0, Kind.FIXED, 0)
    schedule = replace(schedule, orders=((before, forward, backward),))
    pipeline = Pipeline(
        schedule,
        profiles,
        (60.0,),
        fixed_times_s={before: 1.0},
        extra_lags_s={(forward, backward): 2.0},
        blocking_powers_w=({1000: 80.0, 500: 60.0},),
    )
    plan = replay(pipeline, {forward: 1000, backward: 500})
    assert plan.energy_until_j(9.0) == pytest.approx(80 * 1 + 300 + 60 * 2 + 200 + 80 * 3)
    late = replay_with_latency(pipeline, plan, 0.5)
    assert late.energy_j == pytest.approx(80 * 1 + 300 + 80 * 0.5 + 60 * 1.5 + 200)
    raised = replay(pipeline, {forward: 500, backward: 1000})
    assert raised.energy_j == pytest.approx(60 * 1 + 200 + 60 * 2 + 300)
    # A clock in between draws a power in between.
    shifted = replace(pipeline, blocking_powers_w=({1000: 80.0, 400: 60.0},))
    assert replay(shifted, {forward: 1000, backward: 500}).energy_j == pytest.approx(
        plan.energy_j + 2 * 20 / 6
    )


@given(pipeline=pipelines_by_clock(), share=st.floats(0, 1), until=st.floats(1, 2))
@little_search()
def test_energies_are_those_of_the_timeline(pipeline: Pipeline, share: float, until: float) -> None:
    slowest, fastest = plan_at(pipeline, 1e9), solve(pipeline, point_count=3).baseline
    times_s = sorted((fastest.iteration_time_s, slowest.iteration_time_s))
    frontier = solve(pipeline, point_count=5)
    for plan in (slowest, fastest, frontier.plan_within(times_s[0] + share * (times_s[1] - times_s[0]))):
        until_s = until * plan.iteration_time_s
        assert plan.energy_until_j(until_s) == pytest.approx(energy_j(pipeline, plan, until_s))
        assert replay(pipeline, plan.clocks_mhz).energy_j == pytest.approx(plan.energy_j)
        if not pipeline.fixed_times_s:  # a clock is lowered after them, too
            assert replay_with_latency(pipeline, plan, 0.0).energy_j == pytest.approx(plan.energy_j)


@given(pipeline=pipelines_by_clock(), set_latency_s=st.sampled_from([0.0, 0.003]))
@little_search()
def test_no_point_is_below_its_bound_or_above_a_faster_one(pipeline: Pipeline, set_latency_s: float) -> None:
    frontier = solve(pipeline, point_count=8, set_latency_s=set_latency_s)
    for point in frontier.points:
        assert point.bound_energy_j <= point.energy_j + 1e-9
        plan = frontier.plan_within(point.iteration_time_s)
        assert plan.effective_energy_j == pytest.approx(point.effective_energy_j, rel=1e-12)
    for earlier, later in pairwise(frontier.points):
        assert earlier.effective_energy_j >= later.effective_energy_j


def test_one_value_at_all_clocks_is_that_value() -> None:
    pipeline = small_pipeline(50.0)
    flat = replace(pipeline, blocking_powers_w=({1000: 50.0, 1400: 50.0}, {1400: 50.0}))
    assert solve(flat, point_count=5).points == solve(pipeline, point_count=5).points


@pytest.mark.parametrize(
    ("powers_w", "refused"),
    [
        (({1000: 50.0},), "expected none, or those of each of 2 stages, found 1"),
        (({1000: 50.0}, {}), "stage 1: expected a power at one clock or more, found none"),
        (({1000: 50.0}, {1000: 49.0}), "stage 1: expected 50 to .* W at 1 to .* MHz, found 49 W at 1000 MHz"),
        (({1000: 50.0}, {0: 50.0}), "stage 1: .* found 50 W at 0 MHz"),
    ],
)
def test_impossible_powers_are_refused(powers_w: tuple[dict[int, float], ...], refused: str) -> None:
    with pytest.raises(PipelineError, match=refused):
        replace(small_pipeline(50.0), blocking_powers_w=powers_w)
