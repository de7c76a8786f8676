"""Machines that keep shares of a feed: one by itself, and three together, against simulated GPUs."""

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.slots import Kill, SlottedFleet, beside_whole
from perseus.service.domain.power import Budget, Feed
from perseus.service.fleet.power.demand import JobDemand
from perseus.service.fleet.power.machine import FleetMachine
from perseus.service.fleet.power.messages import BudgetCancelled, BudgetSet, FeedShared, JobChanged, Tick
from tests.service.fleet.power.test_machine import FEED, Site, demand

SLOTS = {"u": 0, "v": 0, "w": 1, "x": 1, "y": 2, "z": 2}
"""By job."""
ERRORS = {"u": 0.03, "x": -0.02, "z": 0.02}


def shared(share: float | None, elsewhere_w: float = 0.0) -> FeedShared:
    return FeedShared("a", share, elsewhere_w, elsewhere_w)


def test_a_share_is_kept_like_a_feed_of_its_own() -> None:
    machine = FleetMachine({"a": Feed("a", limit_w=1000.0)})
    machine.handle_all([shared(0.4, 600.0), JobChanged(demand("x"), 1.0), Tick()], 0.0)
    status = machine.statuses["a"]
    assert (status.limit_w, status.power_cap_w) == (400.0, 400.0)
    assert status.managed_w <= 400
    machine.handle_all([shared(0.7, 300.0), Tick()], 1.0)
    assert machine.statuses["a"].power_cap_w == 700.0


def test_nothing_is_limited_before_the_feed_is_divided() -> None:
    machine = FleetMachine({"a": Feed("a", limit_w=400.0)})
    machine.handle_all([shared(None), JobChanged(demand("x"), 1.0), Tick()], 0.0)
    assert not machine.is_limited("a")
    assert machine.to_divide_w(0.0) == {"a": 400.0}
    assert machine.statuses["a"].limit_w is None


def test_the_ramp_is_that_of_the_whole_feed() -> None:
    """It begins at what all draw, and each share of it falls as the whole does."""
    machine = FleetMachine({"a": Feed("a", ramp_down_w_per_s=100.0)})
    machine.handle_all([shared(0.25, 3000.0), JobChanged(demand("x"), 1.0), Tick()], 0.0)
    machine.handle(BudgetSet(Budget("b", "a", 2000.0, 0.0)), 0.0)
    caps_w = []
    for second in range(1, 30):
        machine.handle_all([shared(0.25, 3000.0), Tick()], float(second))
        caps_w.append(machine.power_cap_w("a"))
    assert caps_w[:3] == [975.0, 950.0, 925.0]
    assert caps_w[-1] == 500.0


def test_a_scheduled_budget_is_divided_before_it_starts() -> None:
    machine = FleetMachine({"a": Feed("a")})
    machine.handle_all([shared(None), JobChanged(demand("x"), 1.0), Tick()], 0.0)
    machine.handle(BudgetSet(Budget("b", "a", 700.0, 60.0)), 0.0)
    assert machine.to_divide_w(1.0) == {"a": 700.0}
    machine.handle(BudgetCancelled("b"), 2.0)
    assert machine.to_divide_w(3.0) == {}


def test_what_is_published_has_the_least_and_the_most_that_jobs_draw() -> None:
    machine = FleetMachine({"a": Feed("a", limit_w=1e6)})
    plain = JobDemand("z", measured_w={"a": 100.0})
    some = [demand("x", tolerance_percent=10), demand("y", tolerance_percent=20, weight=3), plain]
    machine.handle_all([*(JobChanged(each, 1.0) for each in some), Tick()], 0.0)
    curve = machine.published(7, 0.0).curves["a"]
    assert curve.powers_w[0] == pytest.approx(800 + 600 + 105)
    assert curve.powers_w[-1] == pytest.approx(1000 + 1000 + 105)
    assert curve.losses[0] == pytest.approx(0.1 + 3 * 0.2)
    assert curve.losses[-1] == pytest.approx(0.0)
    assert curve.weight == 4


def slotted(*jobs: JobDemand, feed: Feed, kills: Sequence[Kill] = ()) -> tuple[Site, SlottedFleet]:
    machine = SlottedFleet({"a": feed}, 3, SLOTS.__getitem__, kills)
    run = Site(machine, noise=0.01, errors=ERRORS)
    for job in jobs:
        run.handle(JobChanged(job, 1.0))
    return run, machine


MIX = [
    demand("u", 2000.0, tolerance_percent=5),
    demand("v", weight=2),
    demand("w"),
    demand("x", 1500.0, weight=0.5),
    demand("y", tolerance_percent=20),
    demand("z", 3000.0, weight=3),
]
STOCK_W = sum(job.points[0].power_w["a"] for job in MIX)


def lost(run: Site, since_s: int) -> float:
    """Return the weighted loss of speed since then, in percent."""
    losses = np.mean([sum(j.weight * (1 - speeds[j.job_id]) for j in MIX) for speeds in run.speeds[since_s:]])
    return float(100 * losses / sum(job.weight for job in MIX))


def run_under_budget(run: Site) -> None:
    limit_w = 0.8 * STOCK_W
    run.pass_time(30)
    run.handle(BudgetSet(Budget("b", "a", limit_w, 60.0)))
    run.pass_time(320)
    assert max(run.means_w(60, 66)) <= limit_w
    assert max(run.means_w(10, 66)) <= 1.005 * limit_w


@pytest.fixture(scope="module")
def lost_by_one() -> float:
    """What one coordinator of all jobs loses."""
    one = Site(FleetMachine({"a": FEED}), noise=0.01, errors=ERRORS)
    for job in MIX:
        one.handle(JobChanged(job, 1.0))
    run_under_budget(one)
    return lost(one, 150)


@pytest.mark.parametrize("killed", [None, 0, 1])
def test_three_coordinators_keep_a_budget_as_one_does(killed: int | None, lost_by_one: float) -> None:
    run, machine = slotted(*MIX, feed=FEED, kills=[] if killed is None else [Kill(killed, 170.0)])
    run_under_budget(run)
    assert machine.largest_sum <= 1 + 1e-9
    # Each share has a margin, and a new coordinator begins with a larger one.
    assert lost(run, 150) <= lost_by_one + (0.3 if killed is None else 0.6)
    run.handle(BudgetCancelled("b"))
    run.pass_time(60)
    assert run.drawn_w[-1] > 0.97 * STOCK_W


def test_a_job_without_plans_keeps_what_it_draws() -> None:
    plain = JobDemand("y", measured_w={"a": 500.0}, highest_clock_mhz=1400)
    run, machine = slotted(demand("u"), demand("w"), plain, feed=Feed("a"))
    run.pass_time(20)
    run.handle(BudgetSet(Budget("b", "a", 2000.0, 20.0)))
    run.pass_time(200)
    third = machine.machines[2]
    assert third is not None
    assert third.max_clock_mhz("y") is None
    assert max(run.means_w(60, 26)) <= 2000


def test_a_job_that_begins_in_an_empty_slot_gets_what_it_draws() -> None:
    run, machine = slotted(demand("u"), demand("w"), feed=Feed("a"))
    run.pass_time(20)
    run.handle(BudgetSet(Budget("b", "a", 1800.0, 20.0)))
    run.pass_time(100)
    assert machine.division.shares["a"][2] == 0
    run.handle(JobChanged(JobDemand("y", measured_w={"a": 500.0}, highest_clock_mhz=1400), 1.0))
    run.pass_time(15)
    third = machine.machines[2]
    assert third is not None
    assert third.max_clock_mhz("y") is None
    run.pass_time(100)
    assert max(run.means_w(60, 140)) <= 1800
    assert run.drawn_w[-1] > 0.95 * 1800


def test_a_limit_below_what_tolerances_allow_is_reported_by_all() -> None:
    some = [demand(job_id, tolerance_percent=5) for job_id in ("u", "w", "y")]
    run, _ = slotted(*some, feed=Feed("a"))
    run.pass_time(5)
    run.handle(BudgetSet(Budget("b", "a", 1500.0, 5.0)))
    run.pass_time(30)
    status = run.machine.statuses["a"]
    assert (status.limit_w, status.power_cap_w) == (1500.0, 1500.0)
    assert not status.is_compliant
    assert status.to_pause
    assert run.drawn_w[-1] == pytest.approx(2700, rel=0.05)


@pytest.mark.parametrize(("spread", "most"), [(0.0, 0.1), (0.3, 1.0)])
def test_shares_of_two_feeds_lose_little_more_than_one_coordinator(spread: float, most: float) -> None:
    """Those of jobs on one feed each: rounding. Others count in part on each of their feeds."""
    for seed in range(3):
        found = beside_whole(spread, {"a": 0.2, "b": 0.2}, seed)
        assert found is not None
        assert found.more is not None
        assert found.more <= most
