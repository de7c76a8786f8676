"""Replays by hand: their timeline, the energy of waiting at each clock, and what can't be replayed."""

from dataclasses import replace

import pytest

from perseus.solver import (
    Computation,
    Kind,
    PipelineError,
    ProfileError,
    Schedule,
    gpipe,
    recheck,
    replay,
    replay_with_latency,
    solve,
)
from tests.solver.pipelines import measurements, pipeline_of, remeasured, small_pipeline


def test_replay_of_a_timeline_by_hand() -> None:
    """One microbatch over two stages, with a data load of 1 s and transfers of 0.5 and 0.25 s."""
    load = Computation(0, Kind.FIXED, 0)
    first, second = gpipe(2, 1).orders
    pipeline = pipeline_of(
        Schedule(((load, *first), second)),
        measurements((1000, 2.0, 300.0), (500, 3.0, 200.0)),
        (10.0, 20.0),
        activation_lags_s={(0, 1): 0.5},
        gradient_lags_s={(1, 0): 0.25},
        fixed_times_s={load: 1.0},
    )
    clocks_mhz = {c: 1000 for order in (first, second) for c in order} | {second[1]: 500}
    plan = replay(pipeline, clocks_mhz)
    assert [[(p.start_s, p.duration_s, p.clock_mhz) for p in stage] for stage in plan.stages] == [
        [(1.0, 2.0, 1000), (8.75, 2.0, 1000)],
        [(3.5, 2.0, 1000), (5.5, 3.0, 500)],
    ]
    assert plan.iteration_time_s == 10.75
    busy_j = 3 * 300.0 + 200.0
    waiting_j = 10.0 * (10.75 - 4.0) + 20.0 * (10.75 - 5.0)
    assert plan.energy_j == pytest.approx(busy_j + waiting_j)
    assert plan.energy_until_j(20.75) == pytest.approx(busy_j + waiting_j + 10 * 30.0)
    assert plan.energy_until_j(10.0) == plan.energy_j


def test_a_wait_draws_the_power_of_the_lower_clock_and_the_last_one_that_of_stock() -> None:
    """Forward at 1000 MHz from 1 s to 2 s, backward at 500 MHz from 4 s to 6 s, then 3 s more."""
    forward, backward = gpipe(1, 1).orders[0]
    before = Computation(0, Kind.FIXED, 0)
    pipeline = pipeline_of(
        Schedule(((before, forward, backward),)),
        blocking_power_w=(60.0,),
        fixed_times_s={before: 1.0},
        extra_lags_s={(forward, backward): 2.0},
        blocking_powers_w=({1000: 80.0, 500: 60.0},),
    )
    plan = replay(pipeline, {forward: 1000, backward: 500})
    assert plan.energy_until_j(9.0) == pytest.approx(80 * 1 + 300 + 60 * 2 + 200 + 80 * 3)
    late = replay_with_latency(pipeline, plan, 0.5)
    assert (late.iteration_time_s, late.share_on_clock) == (6.0, 1.0), "it waits for longer than the latency"
    assert late.energy_j == pytest.approx(80 * 1 + 300 + 80 * 0.5 + 60 * 1.5 + 200)
    raised = replay(pipeline, {forward: 500, backward: 1000})
    assert raised.energy_j == pytest.approx(60 * 1 + 200 + 60 * 2 + 300)
    # A clock in between draws a power in between.
    shifted = replace(pipeline, blocking_powers_w=({1000: 80.0, 400: 60.0},))
    assert replay(shifted, {forward: 1000, backward: 500}).energy_j == pytest.approx(
        plan.energy_j + 2 * 20 / 6
    )


def test_one_blocking_power_at_all_clocks_is_that_power() -> None:
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
def test_impossible_blocking_powers_are_refused(powers_w: tuple[dict[int, float], ...], refused: str) -> None:
    with pytest.raises(PipelineError, match=refused):
        replace(small_pipeline(50.0), blocking_powers_w=powers_w)


def test_replay_refuses_clocks_that_were_not_measured() -> None:
    pipeline = small_pipeline()
    clocks_mhz = dict.fromkeys(pipeline.schedule.computations, 1400)
    with pytest.raises(ProfileError, match=r"measured clocks \(1000, 1200, 1400 MHz\), found 1300 MHz"):
        replay(pipeline, clocks_mhz | {Computation(0, Kind.FORWARD, 0): 1300})
    del clocks_mhz[Computation(1, Kind.BACKWARD, 1)]
    with pytest.raises(ProfileError, match=r"stage 1 backward of microbatch 1: .* found none"):
        replay(pipeline, clocks_mhz)


@pytest.mark.parametrize(("factor", "late_share"), [(1.0, 0.0), (1.1, 0.1), (0.9, 0.0)])
def test_a_plan_in_force_is_rechecked_on_new_profiles(factor: float, late_share: float) -> None:
    frontier = solve(small_pipeline(), point_count=5)
    plan = frontier.plan(frontier.t_min_s)
    changed = remeasured(
        frontier.pipeline, lambda m: replace(m, time_s=factor * m.time_s, energy_j=factor * m.energy_j)
    )
    checked = recheck(plan, changed, plan.iteration_time_s)
    assert checked.late_s == pytest.approx(late_share * plan.iteration_time_s)
    assert checked.plan.settings == plan.settings
    again = solve(changed, point_count=5)
    assert checked.excess_energy_j(again) == pytest.approx(
        factor * plan.energy_j - again.bound_energy_j(factor * plan.iteration_time_s)
    )
