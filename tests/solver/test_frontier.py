"""The solved frontier: its marks, points, look-ups, and the figures on published profiles."""

import math
import pickle
from dataclasses import replace
from itertools import pairwise

import pytest

from perseus.solver import (
    DeadlineError,
    Frontier,
    Refinement,
    SolverError,
    fastest_clock_plan,
    gpipe,
    plan_at,
    realisation,
    solve,
    sweep,
)
from perseus.solver import frontier as frontier_module
from tests.solver.pipelines import measurements, pipeline_of, published_pipeline, small_pipeline
from tests.solver.test_promises import check


@pytest.fixture(scope="module")
def a100() -> Frontier:
    return solve(published_pipeline("a100-sxm", 12))


@pytest.mark.parametrize(
    ("gpu", "microbatch_count", "saving", "at_t_min", "later", "anywhere"),
    [
        ("a100-sxm", 12, 0.156, 0.00139, 0.0015, 0.0025),
        pytest.param("a100-sxm", 24, 0.142, 0.00155, 0.0015, 0.0025, marks=pytest.mark.slow("100 plans")),
        pytest.param("a100-sxm", 48, 0.140, 0.00143, 0.0015, 0.002, marks=pytest.mark.slow("100 plans")),
        ("a40", 12, 0.118, 0.003, 0.0015, 0.005),
        pytest.param("a40", 24, 0.102, 0.0046, 0.002, 0.005, marks=pytest.mark.slow("100 plans")),
    ],
)
def test_plans_save_more_than_was_published_and_are_close_to_their_bound(
    gpu: str, microbatch_count: int, saving: float, at_t_min: float, later: float, anywhere: float
) -> None:
    """The A40's backward has a cliff, where rounding alone is up to 2.4 % above the bound.

    `saving` in the shortest iteration; `at_t_min`, `later`, `anywhere`: most energy above the bound,
    as a share.
    """
    frontier = solve(published_pipeline(gpu, microbatch_count))
    assert 1 - frontier.points[0].energy_j / frontier.baseline.energy_j > saving
    assert frontier.baseline.iteration_time_s >= frontier.t_min_s
    assert all(point.energy_j <= (1 + anywhere) * point.bound_energy_j for point in frontier.points)
    for slowdown, excess in ((1.0, at_t_min), (1.05, later), (1.1, later), (1.2, later)):
        time_s = min(slowdown * frontier.t_min_s, frontier.t_slow_s)
        plan = frontier.plan(time_s)
        assert plan.iteration_time_s <= time_s
        assert plan.energy_until_j(time_s) <= (1 + excess) * frontier.bound_energy_j(time_s)


def test_points_are_evenly_spaced_in_effective_energy_from_t_min_to_t_slow(a100: Frontier) -> None:
    """A plan from a look-up loses about a hundredth of the possible saving, at any steepness."""
    check(a100)
    assert a100.t_min_s == a100.baseline.iteration_time_s == pytest.approx(2.8365, abs=5e-5)
    assert a100.t_min_s < a100.t_star_s < a100.t_slow_s
    assert len(a100.points) == 100
    for point, time_s in ((a100.points[0], a100.t_min_s), (a100.points[-1], a100.t_slow_s)):
        assert point.iteration_time_s == point.deadline_s == time_s
    blocking_w = sum(a100.pipeline.blocking_power_w)
    bounds_j = [a100.bound_energy_j(p.deadline_s) - blocking_w * p.deadline_s for p in a100.points]
    steps_j = [earlier - later for earlier, later in pairwise(bounds_j)]
    assert max(steps_j) <= 2 * sum(steps_j) / 99  # T* has taken another point's place
    widths_s = [later.deadline_s - earlier.deadline_s for earlier, later in pairwise(a100.points)]
    assert widths_s[0] < sum(widths_s) / len(widths_s) / 3


def test_the_all_max_iteration_is_among_the_points_where_it_is_longer_than_t_min() -> None:
    pipeline = small_pipeline()
    slow = {
        key: (replace(some[0], time_s=1.02 * some[1].time_s), *some[1:])
        for key, some in pipeline.profiles.items()
    }
    frontier = solve(replace(pipeline, profiles=slow), point_count=12)
    stock_s = frontier.baseline.iteration_time_s
    assert frontier.t_min_s < stock_s < frontier.t_slow_s
    assert stock_s in [point.deadline_s for point in frontier.points]
    for time_s in (frontier.t_min_s, stock_s, frontier.t_slow_s):
        looked_up, made = frontier.plan_within(time_s), frontier.plan(time_s)
        assert made.effective_energy_j <= looked_up.effective_energy_j
        assert not frontier.is_exact(time_s) or made == looked_up
    assert all(map(frontier.is_exact, (frontier.t_min_s, frontier.t_slow_s)))
    assert not frontier.is_exact((frontier.t_min_s + stock_s) / 2)


def test_frontiers_and_refinements_can_be_sent_to_another_process(a100: Frontier) -> None:
    time_s = 1.03 * a100.t_min_s
    whole, part = pickle.dumps(a100), pickle.dumps(a100.refinement(time_s))
    assert len(whole) < 3_000_000
    assert len(part) < len(whole) / 5
    copy: Frontier = pickle.loads(whole)
    refinement: Refinement = pickle.loads(part)
    assert copy.points == a100.points
    assert refinement.deadline_s == pytest.approx(time_s)
    assert refinement.plan() == copy.plan(time_s) == a100.plan(time_s)
    assert a100.refinement(99.0).deadline_s == a100.t_slow_s


def test_t_star_is_where_the_bound_is_least(a100: Frontier) -> None:
    min_j = a100.bound_energy_j(a100.t_star_s)
    width_s = a100.t_slow_s - a100.t_min_s
    for k in range(200):
        assert a100.bound_energy_j(a100.t_min_s + k / 199 * width_s) >= min_j


def test_look_up_takes_the_slowest_plan_in_time(a100: Frontier) -> None:
    for index in (0, 1, 50, 99):
        time_s = a100.points[index].iteration_time_s
        assert a100.plan_within(time_s).iteration_time_s == time_s
    between_s = a100.points[51].iteration_time_s - 1e-9
    assert a100.plan_within(between_s).iteration_time_s == a100.points[50].iteration_time_s


def test_beyond_t_slow_is_the_plan_of_t_slow(a100: Frontier) -> None:
    for plan in (a100.plan(99.0), a100.plan(math.inf), plan_at(a100.pipeline, 99.0)):
        assert plan.iteration_time_s == a100.t_slow_s
        assert plan.effective_energy_j == pytest.approx(a100.points[-1].effective_energy_j)


@pytest.mark.parametrize("time_s", [2.8, 0.0, -1.0, math.nan, -math.inf])
def test_impossible_deadlines_name_t_min(a100: Frontier, time_s: float) -> None:
    for attempt in (a100.plan, a100.plan_within, a100.bound_energy_j, lambda t: plan_at(a100.pipeline, t)):
        with pytest.raises(DeadlineError, match=r"at least T_min, 2\.8365107\d* s, found") as caught:
            attempt(time_s)
        assert float(caught.value.details["t_min_s"]) == a100.t_min_s


def test_t_min_summed_in_another_order_is_still_t_min(a100: Frontier) -> None:
    assert a100.plan(a100.t_min_s - 1e-10).iteration_time_s == a100.t_min_s


def test_progress_rises_to_one_also_while_plans_are_realised() -> None:
    seen: list[float] = []
    solve(published_pipeline("a40", 12), point_count=3, on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert len({share for share in seen if share < 0.6}) > 10
    assert len({share for share in seen if 0.6 < share < 1}) > 10  # the sweep ends at 0.6


class CancelledError(Exception):
    """Enough."""


@pytest.mark.parametrize("share", [0.1, 0.7, 0.9])
@pytest.mark.slow("solves a published problem for each share of it")
def test_the_progress_callback_can_end_the_work(share: float) -> None:
    def cancel(done: float) -> None:
        if done > share:
            raise CancelledError

    pipeline = published_pipeline("a40", 12)
    with pytest.raises(CancelledError):
        solve(pipeline, point_count=5, on_progress=cancel)
    with pytest.raises(CancelledError):
        plan_at(pipeline, fastest_clock_plan(pipeline).iteration_time_s, on_progress=cancel)


def test_single_clock_has_a_single_point() -> None:
    frontier = solve(pipeline_of(gpipe(1, 2), measurements((1000, 0.5, 100.0)), (10.0,)))
    assert frontier.t_min_s == frontier.t_star_s == frontier.t_slow_s == 2.0
    assert [point.energy_j for point in frontier.points] == [pytest.approx(400.0)]
    assert frontier.plan_within(5.0) == frontier.baseline


def test_a_hull_tolerance_loosens_the_bound_by_at_most_its_value(a100: Frontier) -> None:
    coarse = solve(a100.pipeline, point_count=3, hull_tolerance=0.003)
    assert (coarse.t_min_s, coarse.t_slow_s) == (a100.t_min_s, a100.t_slow_s)
    for share in (0.0, 0.01, 0.2, 0.7, 1.0):
        time_s = a100.t_min_s + share * (a100.t_slow_s - a100.t_min_s)
        assert 0.997 <= coarse.bound_energy_j(time_s) / a100.bound_energy_j(time_s) <= 1 + 1e-9


def test_large_problems_get_a_tolerance_and_plans_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit for large problems is lowered here; the code paths are the same."""
    for module in (frontier_module, realisation):
        monkeypatch.setattr(module, "MANY_COMPUTATIONS", 100)
    monkeypatch.setattr(sweep, "MAX_BYTES", 20_000)
    monkeypatch.setattr(realisation, "SEARCH_OF_LARGE", replace(realisation.SEARCH_OF_LARGE, max_cells=1000))
    pipeline = published_pipeline("a40", 12)
    seen: list[float] = []
    frontier = solve(pipeline, point_count=20, on_progress=seen.append)
    assert frontier.hull_tolerance == 0.002
    assert 0 < frontier.bound_slack < 0.002
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    check(frontier)
    asked_s = 1.03 * frontier.t_min_s
    plan = frontier.plan(asked_s)
    assert plan.iteration_time_s <= asked_s
    assert frontier.bound_energy_j(asked_s) <= plan.energy_until_j(asked_s)
    assert plan.effective_energy_j <= frontier.plan_within(asked_s).effective_energy_j
    assert plan_at(pipeline, asked_s).iteration_time_s <= asked_s
    assert solve(pipeline, point_count=3, hull_tolerance=0.0).hull_tolerance == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"point_count": 2}, "point_count: expected at least 3, found 2"),
        *(({"hull_tolerance": share}, "hull_tolerance: expected a share") for share in (-0.1, 1.0, math.nan)),
        *(({"confidence": part}, "confidence: expected a probability") for part in (0.4, 1.0, math.nan)),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(SolverError, match=message):
        solve(small_pipeline(), **settings)  # type: ignore[arg-type]
