"""Allocations against an exhaustive search."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.errors import InvalidFieldError
from perseus.service.fleet.power.allocation import Allocation, allocate
from perseus.service.fleet.power.demand import JobDemand, PowerPoint

Choice = tuple[PowerPoint, ...]


@st.composite
def jobs(draw: st.DrawFn, feeds: Sequence[str], *, is_monotone: bool) -> list[JobDemand]:
    """Draw one to three planned jobs of one to four points, and perhaps one without plans.

    `is_monotone`: a slower point never draws more, on any feed.
    """
    made = []
    for number in range(draw(st.integers(1, 3))):
        speeds = sorted(draw(st.lists(st.integers(40, 100), min_size=1, max_size=4, unique=True)))
        powers_w = {
            feed: draw(st.lists(st.integers(0, 50), min_size=len(speeds), max_size=len(speeds)))
            for feed in feeds
        }
        if is_monotone:
            powers_w = {feed: sorted(own_w) for feed, own_w in powers_w.items()}
        points = tuple(
            PowerPoint(100 / speed, speed / 100, {feed: float(powers_w[feed][k]) for feed in feeds})
            for k, speed in reversed(list(enumerate(speeds)))
        )
        made.append(
            JobDemand(
                f"job-{number}",
                points,
                tolerance_percent=draw(st.sampled_from([0, 10, 25, 60])),
                weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
            )
        )
    if draw(st.booleans()):
        made.append(JobDemand("stock", measured_w={feeds[0]: float(draw(st.integers(0, 30)))}))
    return made


def limits(feeds: Sequence[str]) -> st.SearchStrategy[dict[str, float]]:
    return st.fixed_dictionaries({feed: st.integers(0, 150).map(float) for feed in feeds})


def choices(some: Iterable[JobDemand]) -> list[Choice]:
    """Return every choice of a point within its tolerance for each planned job."""
    within = []
    for job in some:
        if job.points:
            kept = [p for p in job.points if round(100 * p.speed) >= 100 - job.tolerance_percent]
            within.append(kept or [job.points[0]])
    return list(product(*within))


def drawn_w(some: Sequence[JobDemand], choice: Choice, feed: str) -> float:
    fixed_w = sum(job.measured_w.get(feed, 0.0) for job in some if not job.points)
    return fixed_w + sum(point.power_w[feed] for point in choice)


def loss(some: Sequence[JobDemand], choice: Choice) -> float:
    planned = [job for job in some if job.points]
    return sum(job.weight * (1 - point.speed) for job, point in zip(planned, choice, strict=True))


def keeps(some: Sequence[JobDemand], choice: Choice, limits_w: Mapping[str, float]) -> bool:
    return all(drawn_w(some, choice, feed) <= limit_w for feed, limit_w in limits_w.items())


def chosen(some: Sequence[JobDemand], allocation: Allocation) -> Choice:
    return tuple(allocation.operating_points[job.job_id] for job in some if job.points)


def check_honest(some: Sequence[JobDemand], limits_w: Mapping[str, float], allocation: Allocation) -> None:
    """Check sums and tolerances, and that every exceeded limit is reported."""
    choice = chosen(some, allocation)
    every = choices(some)
    assert choice in every
    for feed, limit_w in limits_w.items():
        assert allocation.power_w[feed] == pytest.approx(drawn_w(some, choice, feed))
        excess_w = max(0.0, allocation.power_w[feed] - limit_w)
        assert allocation.excess_w.get(feed, 0.0) == pytest.approx(excess_w, abs=1e-6)
    assert allocation.weighted_loss == pytest.approx(loss(some, choice))
    assert allocation.is_compliant == (not allocation.excess_w)
    if allocation.is_compliant:
        best = min(loss(some, each) for each in every if keeps(some, each, limits_w))
        assert allocation.bound - 1e-6 <= best <= allocation.weighted_loss + 1e-9
        assert not allocation.to_pause


def check_compliant(some: Sequence[JobDemand], limits_w: Mapping[str, float], allocation: Allocation) -> None:
    """Check that limits are kept if any choice keeps them."""
    assert allocation.is_compliant == any(keeps(some, each, limits_w) for each in choices(some))


@given(jobs(["a"], is_monotone=False), limits(["a"]))
def test_one_feed_is_optimal_up_to_one_point(some: list[JobDemand], limits_w: dict[str, float]) -> None:
    allocation = allocate(some, limits_w)
    check_honest(some, limits_w, allocation)
    check_compliant(some, limits_w, allocation)
    ranges = [
        job.weight * (max(p.speed for p in job.allowed) - min(p.speed for p in job.allowed))
        for job in some
        if job.points
    ]
    assert allocation.weighted_loss <= allocation.bound + max(ranges) + 1e-9
    if not allocation.is_compliant:
        assert allocation.power_w["a"] == min(drawn_w(some, each, "a") for each in choices(some))


@given(jobs(["a", "b", "c"], is_monotone=True), limits(["a", "b", "c"]))
def test_several_feeds_lose_at_most_one_point_each(some: list[JobDemand], limits_w: dict[str, float]) -> None:
    allocation = allocate(some, limits_w)
    check_honest(some, limits_w, allocation)
    check_compliant(some, limits_w, allocation)
    ranges = sorted(
        (job.weight * (job.allowed[0].speed - job.allowed[-1].speed) for job in some if job.points),
        reverse=True,
    )
    if allocation.is_compliant:
        assert allocation.weighted_loss <= allocation.bound + sum(ranges[: len(limits_w)]) + 1e-6
    else:
        for feed in allocation.excess_w:
            assert allocation.power_w[feed] == min(drawn_w(some, each, feed) for each in choices(some))


@given(jobs(["a", "b"], is_monotone=False), limits(["a", "b"]))
def test_reported_limits_are_true_for_any_points(some: list[JobDemand], limits_w: dict[str, float]) -> None:
    check_honest(some, limits_w, allocate(some, limits_w))


@given(jobs(["a", "b"], is_monotone=True), limits(["a", "b"]))
def test_pausing_the_named_jobs_keeps_the_limits_and_each_is_needed(
    some: list[JobDemand], limits_w: dict[str, float]
) -> None:
    allocation = allocate(some, limits_w)

    def is_kept_without(names: Iterable[str]) -> bool:
        left = [job for job in some if job.job_id not in set(names)]
        drawn = {
            feed: sum(
                (allocation.operating_points[job.job_id].power_w if job.points else job.measured_w).get(
                    feed, 0.0
                )
                for job in left
            )
            for feed in limits_w
        }
        return all(drawn[feed] <= limit_w + 1e-6 for feed, limit_w in limits_w.items())

    assert is_kept_without(allocation.to_pause)
    for job_id in allocation.to_pause:
        assert not is_kept_without(set(allocation.to_pause) - {job_id})


def line(job_id: str, watts: float, *, tolerance_percent: float = 100, weight: float = 1.0) -> JobDemand:
    """Return a job whose power falls twice as fast as its speed."""
    points = tuple(
        PowerPoint(100 / speed, speed / 100, {"a": watts * (2 * speed / 100 - 1)}) for speed in (100, 90, 80)
    )
    return JobDemand(job_id, points, tolerance_percent=tolerance_percent, weight=weight)


def speeds(allocation: Allocation) -> dict[str, float]:
    return {job_id: point.speed for job_id, point in allocation.operating_points.items()}


def test_without_a_limit_no_job_slows_down() -> None:
    assert speeds(allocate([line("x", 100), line("y", 100)], {})) == {"x": 1.0, "y": 1.0}


def test_the_job_of_less_weight_slows_down() -> None:
    allocation = allocate([line("x", 100), line("y", 100, weight=2)], {"a": 160})
    assert speeds(allocation) == {"x": 0.8, "y": 1.0}


def test_a_job_beyond_its_tolerance_is_named_and_runs_as_fast_as_it_can() -> None:
    slow = JobDemand(
        "slow",
        (PowerPoint(2.0, 0.5, {"a": 60.0}), PowerPoint(4.0, 0.25, {"a": 20.0})),
        tolerance_percent=10,
    )
    allocation = allocate([slow, line("x", 100)], {"a": 120})
    assert allocation.beyond_tolerance == ("slow",)
    assert speeds(allocation) == {"slow": 0.5, "x": 0.8}


def test_a_limit_that_cannot_be_kept_is_reported_with_the_jobs_to_pause() -> None:
    some = [line("x", 100, tolerance_percent=10), line("y", 100, tolerance_percent=0, weight=9)]
    allocation = allocate(some, {"a": 150})
    assert speeds(allocation) == {"x": 0.9, "y": 1.0}
    assert allocation.excess_w == {"a": pytest.approx(30)}
    assert allocation.to_pause == ("x",)


def test_a_paused_job_still_draws_its_idle_power() -> None:
    point = PowerPoint(1.0, 1.0, {"a": 100.0})
    some = [
        JobDemand("idles", (point,), weight=0.1, paused_power_w={"a": 95.0}),
        JobDemand("stops", (point,)),
    ]
    assert allocate(some, {"a": 150}).to_pause == ("stops",)


def test_a_feed_without_a_limit_is_unlimited() -> None:
    point = PowerPoint(1.0, 1.0, {"a": 100.0, "b": 40.0})
    assert allocate([JobDemand("x", (point,))], {"a": 200}).power_w == {"a": 100.0, "b": 40.0}


def test_points_are_checked() -> None:
    fast, slow = PowerPoint(1.0, 1.0, {"a": 2.0}), PowerPoint(2.0, 0.5, {"a": 1.0})
    with pytest.raises(InvalidFieldError, match=r"points\[1\].speed: expected 0 to 0.5, found 1.0"):
        JobDemand("x", (slow, fast))
    with pytest.raises(InvalidFieldError, match=r"points\[1\].power_w: expected the feeds a, found b"):
        JobDemand("x", (fast, PowerPoint(2.0, 0.5, {"b": 1.0})))
    with pytest.raises(InvalidFieldError, match=r"power_w\[a\]: expected 0 to 1e\+12, found nan"):
        JobDemand("x", (PowerPoint(1.0, 1.0, {"a": float("nan")}),))


def test_a_mixture_of_distant_points_is_rounded_to_a_near_one() -> None:
    """If power is linear in speed, the relaxed problem may as well mix the two ends."""
    speeds = [1 - step / 100 for step in range(41)]
    both = tuple(PowerPoint(1 / s, s, {"a": 600 * (2 * s - 1), "b": 400 * (2 * s - 1)}) for s in speeds)
    one = tuple(PowerPoint(1 / s, s, {"a": 1000 * (2 * s - 1)}) for s in speeds)
    found = allocate([JobDemand("both", both), JobDemand("one", one)], {"a": 1200.0, "b": 300.0})
    assert found.weighted_loss <= found.bound + 0.02
