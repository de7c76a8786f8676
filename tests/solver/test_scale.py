"""Figures of any size are solved alike: no unit is preferred, and nothing is lost at the accepted bounds."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from perseus.solver import Pipeline, one_forward_one_backward, plan_at, replay, solve
from perseus.solver.bounds import MAX_ENERGY_J, MAX_TIME_S, MIN_ENERGY_J, MIN_TIME_S
from perseus.solver.graph import build_event_graph
from perseus.solver.sweep import sweep_frontier
from tests.solver.pipelines import (
    ReferenceProgram,
    little_search,
    measurements,
    pipeline_of,
    pipelines,
    published_pipeline,
    remeasured,
    replayed_iteration_time_s,
    small_pipeline,
)


def in_other_units(pipeline: Pipeline, times: float, energies: float) -> Pipeline:
    """The pipeline with all times and all energies multiplied."""

    def longer(lags_s: Mapping[Any, float]) -> Mapping[Any, float]:
        return {key: lag_s * times for key, lag_s in lags_s.items()}

    return replace(
        remeasured(pipeline, lambda m: replace(m, time_s=m.time_s * times, energy_j=m.energy_j * energies)),
        blocking_power_w=tuple(power_w * energies / times for power_w in pipeline.blocking_power_w),
        activation_lags_s=longer(pipeline.activation_lags_s),
        gradient_lags_s=longer(pipeline.gradient_lags_s),
        fixed_times_s=longer(pipeline.fixed_times_s),
        extra_lags_s=longer(pipeline.extra_lags_s),
    )


@given(pipeline=pipelines(), exponent=st.integers(-30, 24))
@little_search()
def test_a_factor_of_two_in_all_energies_is_one_in_the_result(pipeline: Pipeline, exponent: int) -> None:
    """Exactly, to the last bit: the same plans, and their energies times the factor."""
    factor = 2.0**exponent
    frontier = solve(pipeline, point_count=6)
    other = solve(in_other_units(pipeline, 1.0, factor), point_count=6)
    for own, found in zip(frontier.points, other.points, strict=True):
        assert found.energy_j == own.energy_j * factor
        assert found.effective_energy_j == own.effective_energy_j * factor
        assert found.bound_energy_j == own.bound_energy_j * factor
        assert (found.deadline_s, found.iteration_time_s) == (own.deadline_s, own.iteration_time_s)
        time_s = own.iteration_time_s
        assert other.plan_within(time_s).settings == frontier.plan_within(time_s).settings


@pytest.mark.parametrize("exponent", [-9, 3])
def test_plans_are_the_same_in_nanoseconds_and_hours(exponent: int) -> None:
    """Of many computations, whose flows are far from what 53 bits hold in one unit alone."""
    pipeline, factor = published_pipeline("a100-sxm", 4), 10.0**exponent
    with little_search():
        frontier = solve(pipeline, point_count=20)
        other = solve(in_other_units(pipeline, factor, factor), point_count=20)
    for own, found in zip(frontier.points, other.points, strict=True):
        times_s = found.deadline_s, found.iteration_time_s
        assert times_s == pytest.approx((own.deadline_s * factor, own.iteration_time_s * factor), rel=1e-12)
        energies_j = found.energy_j, found.effective_energy_j, found.bound_energy_j
        own_j = own.energy_j, own.effective_energy_j, own.bound_energy_j
        assert energies_j == pytest.approx([energy_j * factor for energy_j in own_j], rel=1e-12)
    assert other.plan_within(other.t_star_s).settings == frontier.plan_within(frontier.t_star_s).settings


FACTORS = st.floats(-9.0, 5.0).map(lambda exponent: 10.0**exponent)
POWERS = st.floats(-6.0, 7.0).map(lambda exponent: 10.0**exponent)


@given(
    pipeline=pipelines(),
    times=FACTORS,
    power=POWERS,
    shares=st.lists(st.floats(0, 1), min_size=2, max_size=2),
)
@little_search()
def test_any_factor_scales_the_frontier_and_no_plan_is_late(
    pipeline: Pipeline, times: float, power: float, shares: list[float]
) -> None:
    energies = times * power
    assume(1e-11 < energies < 1e13)
    scaled = in_other_units(pipeline, times, energies)
    frontier, other = solve(pipeline, point_count=5), solve(scaled, point_count=5)
    assert other.t_min_s == pytest.approx(frontier.t_min_s * times, rel=1e-12)
    assert other.t_slow_s == pytest.approx(frontier.t_slow_s * times, rel=1e-12)
    for share in (0.0, *shares, 1.0):
        time_s = frontier.t_min_s + share * (frontier.t_slow_s - frontier.t_min_s)
        # At T_min the curve may be steep: 1e-12 of the time may cost more than 1e-9 of the energy.
        bound_j = frontier.bound_energy_j(time_s) * energies
        assert other.bound_energy_j(time_s * times) == pytest.approx(bound_j, rel=1e-7)
        plan = other.plan(time_s * times)
        late = 1 + 1e-12
        assert plan.iteration_time_s <= time_s * times * late
        assert replayed_iteration_time_s(scaled, plan) <= time_s * times * late
        assert replay(scaled, plan.settings) == plan


@pytest.mark.parametrize(
    ("times", "energies", "blocking_power_w"),
    [
        pytest.param(1.0, MAX_ENERGY_J / 20, 0.0, id="the highest energies"),
        pytest.param(1.0, MIN_ENERGY_J, 0.0, id="the lowest energies"),
        pytest.param(MIN_TIME_S / 0.01, 1e-3, 50.0, id="the shortest times"),
        pytest.param(MAX_TIME_S / 10, 1e6, 50.0, id="the longest times"),
        pytest.param(MIN_TIME_S / 0.01, 1.0, 0.0, id="the shortest times at the highest power"),
    ],
)
def test_figures_at_the_bounds_are_solved_exactly(
    times: float, energies: float, blocking_power_w: float
) -> None:
    pipeline = small_pipeline(blocking_power_w)
    program, sweep = ReferenceProgram(pipeline), sweep_frontier(build_event_graph(pipeline))
    scaled = in_other_units(pipeline, times, energies)
    frontier = solve(scaled)
    assert frontier.bound_slack == 0
    for share in (0.001, 0.1, 0.5, 0.9, 1.0):
        time_s = sweep.t_min_s + share * (sweep.t_slow_s - sweep.t_min_s)
        waiting_j = sum(pipeline.blocking_power_w) * time_s
        expected_j = (program.min_effective_energy_j(time_s) + waiting_j) * energies
        assert frontier.bound_energy_j(time_s * times) == pytest.approx(expected_j, rel=1e-8)
        plan = plan_at(scaled, time_s * times)
        assert replayed_iteration_time_s(scaled, plan) <= time_s * times * (1 + 1e-12)


def test_a_bound_that_is_low_as_times_are_nearly_equal_says_by_how_much() -> None:
    """One clock is slower by a picosecond and saves half of the energy: nearly vertical."""
    measured = measurements((1400, 0.1, 100.0), (1300, 0.1 + 1e-12, 50.0), (1200, 0.2, 20.0))
    frontier = solve(pipeline_of(one_forward_one_backward(1, 64), measured, (50.0,)))
    fastest = frontier.points[0]
    assert fastest.energy_j == pytest.approx(128 * 100.0)
    assert fastest.bound_energy_j * (1 + frontier.bound_slack) >= fastest.energy_j * (1 - 1e-9)


def test_slopes_of_very_different_steepness_are_exact() -> None:
    """The step to the second clock is ten million times as steep as the one to the third."""
    measured = measurements((1400, 0.1, 100.0), (1300, 0.100001, 50.0), (1200, 10.0, 1.0))
    pipeline = pipeline_of(one_forward_one_backward(1, 4), measured)
    frontier, program = solve(pipeline), ReferenceProgram(pipeline)
    assert frontier.bound_slack == 0
    for time_s in (0.800002, 0.800006, 0.80001, 1.0, 40.0):
        assert frontier.bound_energy_j(time_s) == pytest.approx(
            program.min_effective_energy_j(time_s), rel=1e-6
        )
