"""The points of a job, read off a frontier, against plain sums."""

from dataclasses import replace

import pytest

from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.power import DEFAULT_FEED
from perseus.service.fleet.power.curve import power_points
from perseus.solver import Frontier, solve
from tests.solver.pipelines import small_pipeline

HERE = {DEFAULT_FEED: 1.0}


@pytest.fixture(scope="module", params=[(), ({1400: 65.0, 1000: 50.0},) * 2], ids=["one power", "by clock"])
def frontier(request: pytest.FixtureRequest) -> Frontier:
    return solve(replace(small_pipeline(), blocking_powers_w=request.param), point_count=12)


def test_points_are_the_frontiers(frontier: Frontier) -> None:
    points = power_points(frontier, [[HERE, HERE]] * 3, own_time_s=frontier.t_min_s)
    assert [point.iteration_time_s for point in points] == [p.iteration_time_s for p in frontier.points]
    for point, own in zip(points, frontier.points, strict=True):
        assert point.power_w[DEFAULT_FEED] == pytest.approx(3 * own.energy_j / own.iteration_time_s)
        assert point.speed == pytest.approx(frontier.t_min_s / own.iteration_time_s)


def test_the_policys_own_target_comes_first(frontier: Frontier) -> None:
    own_s = (frontier.points[4].iteration_time_s + frontier.points[5].iteration_time_s) / 2
    points = power_points(frontier, [[HERE, HERE]], own_time_s=own_s)
    assert points[0].iteration_time_s == own_s
    assert points[0].speed == 1.0
    assert points[0].power_w[DEFAULT_FEED] * own_s == pytest.approx(
        frontier.plan_within(own_s).energy_until_j(own_s)
    )
    assert len(points) == 1 + len(frontier.points) - 5


def test_stages_power_is_divided_among_feeds(frontier: Frontier) -> None:
    whole = power_points(frontier, [[HERE, HERE]] * 2, own_time_s=frontier.t_min_s)
    placement = [[{"a": 1.0}, {"b": 1.0}], [{"a": 0.5, "b": 0.5}, {"b": 1.0}]]
    divided = power_points(frontier, placement, own_time_s=frontier.t_min_s)
    for point, one in zip(divided, whole, strict=True):
        assert sum(point.power_w.values()) == pytest.approx(one.power_w[DEFAULT_FEED])
        assert point.power_w["a"] < point.power_w["b"]  # stage 1 is heavier


def test_a_stragglers_slack_is_used_before_speed_is_lost(frontier: Frontier) -> None:
    slow_s = 1.1 * frontier.t_min_s
    points = power_points(frontier, [[HERE, HERE]] * 2, own_time_s=frontier.t_min_s, slowdowns={1: 1.1})
    first = points[0]
    straggling, waiting = frontier.plan_within(frontier.t_min_s), frontier.plan_within(slow_s)
    assert (first.iteration_time_s, first.speed) == (slow_s, 1.0)
    energy_j = 1.1 * straggling.energy_j + waiting.energy_until_j(slow_s)
    assert first.power_w[DEFAULT_FEED] * slow_s == pytest.approx(energy_j)
    assert points[-1].iteration_time_s == pytest.approx(1.1 * frontier.t_slow_s)


def test_time_outside_computations_draws_blocking_power(frontier: Frontier) -> None:
    (bare, *_), (long, *_) = (
        power_points(frontier, [[HERE, HERE]], own_time_s=frontier.t_min_s, overhead_s=overhead_s)
        for overhead_s in (0.0, 0.05)
    )
    energy_j = bare.power_w[DEFAULT_FEED] * frontier.t_min_s + 0.05 * frontier.baseline.blocking_power_w
    assert long.power_w[DEFAULT_FEED] * (frontier.t_min_s + 0.05) == pytest.approx(energy_j)


def test_impossible_layouts_are_refused(frontier: Frontier) -> None:
    for placement, slowdowns, text in (
        ([], {}, "placement: expected at least one pipeline"),
        ([[HERE]], {}, r"placement\[0\]: expected 2 stages, found 1"),
        ([[HERE, HERE]], {1: 2.0}, "slowdowns: expected a pipeline from 0 to 0, found 1"),
        ([[HERE, HERE]], {0: 0.9}, r"slowdowns\[0\]: expected a finite factor of 1 or more"),
    ):
        with pytest.raises(InvalidFieldError, match=text):
            power_points(frontier, placement, own_time_s=1.0, slowdowns=slowdowns)
