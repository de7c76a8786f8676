"""Plans meet their deadlines on measured times and can't beat the bound; replays show the effect of
clocks."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import (
    Computation,
    Kind,
    Pipeline,
    ProfileError,
    Schedule,
    gpipe,
    plan_at,
    replay,
    solve,
)
from tests.solver.pipelines import (
    little_search,
    measurements,
    pipelines,
    replayed_iteration_time_s,
    small_pipeline,
)


@given(pipeline=pipelines(), share=st.floats(0, 1.2))
@little_search()
def test_plans_are_never_late_and_never_below_the_bound(pipeline: Pipeline, share: float) -> None:
    frontier = solve(pipeline, point_count=4)
    time_s = frontier.t_min_s + share * (frontier.t_slow_s - frontier.t_min_s)
    for plan in (frontier.plan(time_s), plan_at(pipeline, time_s), frontier.plan_within(time_s)):
        assert plan.iteration_time_s <= time_s + 1e-12
        assert replayed_iteration_time_s(pipeline, plan) == pytest.approx(plan.iteration_time_s, abs=1e-10)
        bound_j = frontier.bound_energy_j(plan.iteration_time_s)
        assert plan.energy_j >= bound_j - 1e-9 * (1 + abs(bound_j))
    assert frontier.plan(time_s).effective_energy_j <= frontier.plan_within(time_s).effective_energy_j


@given(pipeline=pipelines())
@little_search()
def test_a_replayed_plan_is_the_plan(pipeline: Pipeline) -> None:
    plan = plan_at(pipeline, 1e9)
    again = replay(pipeline, {p.computation: p.clock_mhz for stage in plan.stages for p in stage})
    assert again.iteration_time_s == plan.iteration_time_s
    assert again.effective_energy_j == pytest.approx(plan.effective_energy_j)
    assert again.stages == plan.stages
    for stage, order in zip(plan.stages, pipeline.schedule.orders, strict=True):
        assert [p.computation for p in stage] == [c for c in order if c.kind is not Kind.FIXED]
        for earlier, later in pairwise(stage):
            assert later.start_s >= earlier.start_s + earlier.duration_s - 1e-11


def test_replay_of_a_timeline_by_hand() -> None:
    """One microbatch over two stages, with a data load of 1 s and transfers of 0.5 and 0.25 s."""
    load = Computation(0, Kind.FIXED, 0)
    first, second = gpipe(2, 1).orders
    pipeline = Pipeline(
        Schedule(((load, *first), second)),
        {
            (stage, 0, kind): measurements((1000, 2.0, 300.0), (500, 3.0, 200.0))
            for stage in (0, 1)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        },
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


def test_replay_refuses_clocks_that_were_not_measured() -> None:
    pipeline = small_pipeline()
    clocks_mhz = dict.fromkeys(pipeline.schedule.computations, 1400)
    with pytest.raises(ProfileError, match=r"measured clocks \(1000, 1200, 1400 MHz\), found 1300 MHz"):
        replay(pipeline, clocks_mhz | {Computation(0, Kind.FORWARD, 0): 1300})
    del clocks_mhz[Computation(1, Kind.BACKWARD, 1)]
    with pytest.raises(ProfileError, match=r"stage 1 backward of microbatch 1: .* found none"):
        replay(pipeline, clocks_mhz)
