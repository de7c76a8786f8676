"""One lag for all transfers: found from two plans' times, or ruled out."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import (
    Computation,
    Kind,
    Pipeline,
    PipelineError,
    Plan,
    Schedule,
    common_lag_s,
    explaining_lag_s,
    fastest_clock_plan,
    one_forward_one_backward,
    plan_at,
    replay,
    solve,
    with_lag,
)
from tests.solver.pipelines import little_search, pipeline_of, pipelines, small_pipeline

PS_S = 1e-12
WITHOUT_EXTRA_LAGS = pipelines().map(lambda pipeline: replace(pipeline, extra_lags_s={}))
LAGS_S = st.integers(0, 40).map(lambda tenths_ms: tenths_ms / 10_000)


@st.composite
def stretchable(draw: st.DrawFn) -> Pipeline:
    """1F1B with unequal stages: plans stretch the light ones until they have no slack."""
    weights = draw(st.lists(st.sampled_from([1.0, 1.15, 1.3, 1.5]), min_size=2, max_size=4, unique=True))
    measured = small_pipeline().profiles
    profiles = {
        (stage, 0, kind): tuple(
            replace(m, time_s=weight * m.time_s, energy_j=weight * m.energy_j) for m in measured[0, 0, kind]
        )
        for stage, weight in enumerate(weights)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    schedule = one_forward_one_backward(len(weights), draw(st.integers(3, 8)))
    return Pipeline(schedule, profiles, (50.0,) * len(weights))


def plans(pipeline: Pipeline) -> tuple[Plan, Plan]:
    """The plan of T_min, and all-max."""
    frontier = solve(pipeline, point_count=3)
    return frontier.plan(frontier.t_min_s), frontier.baseline


def time_s(pipeline: Pipeline, plan: Plan, lag_s: float) -> float:
    return replay(with_lag(pipeline, lag_s), plan.clocks_mhz).iteration_time_s


def excess_s(pipeline: Pipeline, slow: Plan, fast: Plan, lag_s: float) -> float:
    return time_s(pipeline, slow, lag_s) - time_s(pipeline, fast, lag_s)


def longest_lag_s(pipeline: Pipeline, fast: Plan, max_s: float) -> float:
    """The longest lag with which the plan's iteration time is within the limit."""
    possible_s, impossible_s = 0.0, 2 * max_s
    while impossible_s - possible_s > PS_S:
        middle_s = (possible_s + impossible_s) / 2
        if time_s(pipeline, fast, middle_s) > max_s:
            impossible_s = middle_s
        else:
            possible_s = middle_s
    return possible_s


def has_transfers(pipeline: Pipeline) -> bool:
    return with_lag(pipeline, 1.0).activation_lags_s != {}


@given(st.one_of(stretchable(), WITHOUT_EXTRA_LAGS), LAGS_S, LAGS_S, st.floats(0.0, 0.1))
@little_search()
def test_the_found_lag_replays_to_the_measured_times(
    pipeline: Pipeline, assumed_s: float, more_s: float, rest_s: float
) -> None:
    pipeline, real_s = with_lag(pipeline, assumed_s), assumed_s + more_s
    slow, fast = plans(pipeline)
    measured_s = rest_s + time_s(pipeline, fast, real_s)
    wanted_s = excess_s(pipeline, slow, fast, real_s)
    found_s = explaining_lag_s(pipeline, slow, wanted_s + measured_s, fast, measured_s)
    if not has_transfers(pipeline):
        assert found_s is None
    elif found_s is None:
        # It may only be missed if the plans move together again as the lag grows.
        longest_s = longest_lag_s(pipeline, fast, 1.01 * measured_s)
        assert excess_s(pipeline, slow, fast, longest_s) < wanted_s
    else:
        assert common_lag_s(pipeline) <= found_s
        assert time_s(pipeline, fast, found_s) <= 1.01 * measured_s + PS_S
        # The time per lag is a count of transfers: to the picosecond of the lag, a few of the time.
        found_excess_s = excess_s(pipeline, slow, fast, found_s)
        if found_s > common_lag_s(pipeline):
            assert found_excess_s == pytest.approx(wanted_s, abs=100 * PS_S)
        else:
            assert found_excess_s >= wanted_s - 100 * PS_S


def test_lags_that_make_all_max_longer_than_measured_are_ruled_out() -> None:
    pipeline = replace(small_pipeline(), schedule=one_forward_one_backward(2, 6))
    fast = fastest_clock_plan(pipeline)
    slow = plan_at(pipeline, fast.iteration_time_s)
    wanted_s = excess_s(pipeline, slow, fast, 0.004)
    assert wanted_s > 0.001
    with_s, without_s = (time_s(pipeline, fast, lag_s) for lag_s in (0.004, 0.0))
    assert explaining_lag_s(pipeline, slow, with_s + wanted_s, fast, with_s) == pytest.approx(0.004)
    assert explaining_lag_s(pipeline, slow, without_s + wanted_s, fast, without_s) is None
    too_short_s = 0.98 * without_s
    assert explaining_lag_s(pipeline, slow, too_short_s, fast, too_short_s) is None


@given(WITHOUT_EXTRA_LAGS, LAGS_S)
def test_one_lag_applies_to_all_transfers(pipeline: Pipeline, lag_s: float) -> None:
    lagged = with_lag(pipeline, lag_s)
    assert common_lag_s(lagged) == (lag_s if has_transfers(pipeline) else 0.0)
    assert with_lag(lagged, lag_s) == lagged
    assert with_lag(lagged, 0.0) == with_lag(pipeline, 0.0)


def test_a_lag_applies_along_the_path_and_back() -> None:
    places = ((0, 0), (1, 0), (1, 1), (2, 0), (0, 1))
    there_and_back = [(Kind.FORWARD, place) for place in places]
    there_and_back += [(Kind.BACKWARD, place) for place in reversed(places)]
    orders = tuple(
        tuple(Computation(stage, kind, 0, chunk) for kind, (at, chunk) in there_and_back if at == stage)
        for stage in range(3)
    )
    lagged = with_lag(pipeline_of(Schedule(orders, (places,))), 0.5)
    assert lagged.activation_lags_s == {(0, 1): 0.5, (1, 2): 0.5, (2, 0): 0.5}
    assert lagged.gradient_lags_s == {(1, 0): 0.5, (2, 1): 0.5, (0, 2): 0.5}


@pytest.mark.parametrize("lag_s", [-0.1, math.nan, math.inf])
def test_an_impossible_lag_is_refused(lag_s: float) -> None:
    with pytest.raises(PipelineError, match="activation_lags_s, stages 0 → 1"):
        with_lag(small_pipeline(), lag_s)


def test_different_lags_and_extra_lags_are_refused() -> None:
    pipeline = small_pipeline()
    uneven = replace(pipeline, activation_lags_s={(0, 1): 0.1}, gradient_lags_s={(1, 0): 0.2})
    with pytest.raises(PipelineError, match=r"expected one lag for all, found 0\.1 to 0\.2 s"):
        common_lag_s(uneven)
    pair = (Computation(1, Kind.FORWARD, 0), Computation(0, Kind.FORWARD, 1))
    with pytest.raises(PipelineError, match="extra_lags_s: expected none, found 1"):
        common_lag_s(replace(pipeline, extra_lags_s={pair: 0.1}))
