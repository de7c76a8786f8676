"""Target times, and plans with computations without a clock."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.model import NoSlowdown, NoSlowdownBasis, Straggler
from perseus.service.domain.specification import Deadline, OperatingPolicy
from perseus.service.job.planning.operating_point import (
    missed_policy,
    no_slowdown,
    planned_clocks,
    straggler_time_s,
    target_times_s,
)
from perseus.solver import Frontier, Kind, Measurement, Pipeline, one_forward_one_backward, solve
from tests.service.frontiers import FRONTIER


def test_a_plan_has_the_fixed_computations_in_their_places_without_a_clock() -> None:
    target_s = 1.1 * FRONTIER.t_min_s
    plan = planned_clocks(FRONTIER.plan_within(target_s), FRONTIER, target_s, at_stock=()).plan
    for order, stage in zip(FRONTIER.pipeline.schedule.orders, plan.stages, strict=True):
        assert tuple(planned.computation for planned in stage) == order
        for planned in stage:
            assert (planned.clock_mhz == 0) == (planned.computation.kind is Kind.FIXED)
        for before, after in pairwise(stage):
            assert after.start_s >= before.start_s + before.duration_s - 1e-9
    ends_s = [stage[-1].start_s + stage[-1].duration_s for stage in plan.stages]
    assert abs(max(ends_s) - plan.iteration_time_s) < 1e-9


@given(
    percent=st.floats(0, 100),
    stragglers=st.dictionaries(st.integers(0, 4), st.floats(1, 10), max_size=5),
)
def test_targets_follow_the_policy_and_the_slowest_straggler(
    percent: float, stragglers: dict[int, float]
) -> None:
    times_s = {
        p: straggler_time_s(Straggler(p, None, f), FRONTIER, 0.0, FRONTIER.t_min_s)
        for p, f in stragglers.items()
    }
    targets_s = target_times_s(FRONTIER, OperatingPolicy(percent), 0.0, times_s, 5)
    own_s = min(FRONTIER.t_min_s * (1 + percent / 100), FRONTIER.t_star_s)
    for pipeline, target_s in enumerate(targets_s):
        assert target_s >= FRONTIER.t_min_s
        if pipeline in stragglers or not stragglers:
            assert target_s == own_s
        else:
            assert target_s == max(own_s, min(FRONTIER.t_slow_s, max(times_s.values())))


@given(st.floats(0.01, 10), st.floats(0, 10))
def test_seconds_are_put_on_the_frontiers_scale(measured_s: float, baseline_s: float) -> None:
    """What the baseline takes longer than it is predicted is overhead."""
    time_s = straggler_time_s(Straggler(0, measured_s), FRONTIER, baseline_s, FRONTIER.t_min_s)
    overhead_s = max(0.0, baseline_s - FRONTIER.baseline.iteration_time_s)
    assert time_s == pytest.approx(max(FRONTIER.t_min_s, measured_s - overhead_s))


def own_time_s(policy: OperatingPolicy, baseline_time_s: float = 0.0) -> float:
    (time_s,) = target_times_s(FRONTIER, policy, baseline_time_s, {}, 1)
    return time_s


def test_a_deadline_sets_the_target_of_whole_iterations() -> None:
    overhead_s = 0.1
    baseline_s = FRONTIER.baseline.iteration_time_s + overhead_s
    middle_s = (FRONTIER.t_min_s + FRONTIER.t_star_s) / 2
    assert FRONTIER.t_min_s < middle_s < FRONTIER.t_star_s
    deadline = Deadline(50, 50 * (middle_s + overhead_s))
    assert own_time_s(OperatingPolicy(deadline=deadline), baseline_s) == pytest.approx(middle_s)
    assert own_time_s(OperatingPolicy(deadline=Deadline(50, 1e-3)), baseline_s) == FRONTIER.t_min_s
    assert own_time_s(OperatingPolicy(deadline=Deadline(1, 1e6)), baseline_s) == FRONTIER.t_star_s


@given(st.floats(1, 1000))
def test_a_power_limit_gives_the_shortest_iteration_time_that_keeps_it(cap_w: float) -> None:
    planned_s = own_time_s(OperatingPolicy(max_average_power_w=cap_w))
    powers_w = {point.iteration_time_s: point.energy_j / point.iteration_time_s for point in FRONTIER.points}
    keeping_s = [time_s for time_s, power_w in powers_w.items() if power_w <= cap_w]
    assert planned_s == (min(keeping_s) if keeping_s else FRONTIER.points[-1].iteration_time_s)


@pytest.fixture(scope="module")
def slow_at_the_top() -> Frontier:
    """Return a frontier whose stage 1 is heavier, and slightly slower at its highest clock."""
    profiles = {
        (stage, 0, kind): tuple(
            Measurement(mhz, time_s * weight * work, energy_j * weight * work)
            for mhz, time_s, energy_j in (
                (1410, 0.1005, 42.0),
                (1395, 0.1000, 40.0),
                (1200, 0.112, 34.0),
                (1000, 0.130, 31.0),
            )
        )
        for stage, weight in ((0, 1.0), (1, 1.3))
        for kind, work in ((Kind.FORWARD, 1.0), (Kind.BACKWARD, 2.0))
    }
    return solve(Pipeline(one_forward_one_backward(2, 6), profiles, (50.0, 50.0)), point_count=12)


def test_no_slowdown_is_relative_to_stock_not_to_t_min(slow_at_the_top: Frontier) -> None:
    stock_s = slow_at_the_top.baseline.iteration_time_s
    assert stock_s == pytest.approx(1.005 * slow_at_the_top.t_min_s)
    assert no_slowdown(slow_at_the_top, 0.0) == NoSlowdown(stock_s, NoSlowdownBasis.ALL_MAX)
    (own_s,) = target_times_s(slow_at_the_top, OperatingPolicy(), 0.0, {}, 1)
    assert own_s == min(stock_s, slow_at_the_top.t_star_s)
    saved_j = slow_at_the_top.plan_within(slow_at_the_top.t_min_s).energy_j
    assert slow_at_the_top.plan_within(own_s).energy_j < saved_j


def test_a_measured_baseline_only_lowers_the_time_without_slowdown(
    slow_at_the_top: Frontier,
) -> None:
    stock_s, t_min_s = slow_at_the_top.baseline.iteration_time_s, slow_at_the_top.t_min_s
    between_s = (stock_s + t_min_s) / 2
    assert no_slowdown(slow_at_the_top, between_s) == NoSlowdown(between_s, NoSlowdownBasis.BASELINE)
    assert no_slowdown(slow_at_the_top, 0.5 * t_min_s) == NoSlowdown(t_min_s, NoSlowdownBasis.BASELINE)
    assert no_slowdown(slow_at_the_top, 2 * stock_s) == NoSlowdown(stock_s, NoSlowdownBasis.ALL_MAX)


def test_a_deadline_that_no_plan_meets_is_missed() -> None:
    stock_s = FRONTIER.baseline.iteration_time_s + 0.5
    shortest_s = FRONTIER.t_min_s + 0.5
    kept, missed = (OperatingPolicy(deadline=Deadline(10, 10 * share * shortest_s)) for share in (1.0, 0.9))
    assert missed_policy(FRONTIER, kept, stock_s) == ""
    text = missed_policy(FRONTIER, missed, stock_s)
    assert f"{0.9 * shortest_s:.3f} s an iteration" in text
    assert text.endswith(f"the fastest plan takes {shortest_s:.3f} s")


def test_a_power_that_no_plan_keeps_is_missed() -> None:
    least_w = min(point.energy_j / point.iteration_time_s for point in FRONTIER.points)
    assert missed_policy(FRONTIER, OperatingPolicy(max_average_power_w=least_w), 0.0) == ""
    text = missed_policy(FRONTIER, OperatingPolicy(max_average_power_w=0.5 * least_w), 0.0)
    assert text.endswith(f"the plan of least power draws {least_w:.0f} W")
    assert missed_policy(FRONTIER, OperatingPolicy(5.0), 0.0) == ""
