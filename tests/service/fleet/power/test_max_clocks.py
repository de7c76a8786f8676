"""Jobs without plans get a maximum clock only if plans alone can't keep a limit."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.power import Budget, Feed
from perseus.service.fleet.power.demand import JobDemand, PowerPoint
from perseus.service.fleet.power.feed_watch import CLOCK_STEP, FeedWatch
from perseus.service.fleet.power.machine import FleetMachine
from perseus.service.fleet.power.messages import (
    BudgetCancelled,
    BudgetSet,
    JobChanged,
    PowerMeasured,
    Tick,
)

HIGHEST_MHZ = 1400
UNPLANNED = JobDemand("new", measured_w={"a": 400.0}, highest_clock_mhz=HIGHEST_MHZ)
PLANNED = JobDemand(
    "planned",
    (PowerPoint(1.0, 1.0, {"a": 600.0}, 1400), PowerPoint(1.25, 0.8, {"a": 400.0}, 1000)),
    tolerance_percent=25,
    highest_clock_mhz=HIGHEST_MHZ,
)


def budget(limit_w: float) -> BudgetSet:
    return BudgetSet(Budget("b", "a", limit_w, 0.0))


class Fleet:
    """Two jobs on one feed, second by second, with measurements of the unplanned one."""

    def __init__(self, *demands: JobDemand) -> None:
        self.machine = FleetMachine({"a": Feed("a")})
        self.now_s = 0.0
        for demand in demands:
            self.machine.handle(JobChanged(demand, 1.0), self.now_s)

    def tick(self, new_w: float = 400.0) -> tuple[int | None, int | None]:
        """Let a second pass; return the maximum clocks of the planned and of the unplanned job."""
        self.now_s += 1
        self.machine.handle(PowerMeasured(1.0, {"new": {"a": new_w}}, {}), self.now_s)
        self.machine.handle(Tick(), self.now_s)
        self.machine.validate_state()
        return self.machine.max_clock_mhz("planned"), self.machine.max_clock_mhz("new")


def test_there_is_no_max_clock_without_a_limit() -> None:
    assert Fleet(PLANNED, UNPLANNED).tick() == (None, None)


def test_a_job_with_a_target_has_the_highest_clock_of_its_plans_and_others_none() -> None:
    fleet = Fleet(PLANNED, UNPLANNED)
    fleet.machine.handle(budget(800.0), fleet.now_s)
    assert fleet.tick() == (1000, None)
    fleet.machine.handle(BudgetCancelled("b"), fleet.now_s)
    assert fleet.tick() == (None, None)


def test_power_that_plans_cannot_save_is_saved_by_max_clocks() -> None:
    fleet = Fleet(PLANNED, UNPLANNED)
    fleet.machine.handle(budget(600.0), fleet.now_s)
    assert fleet.tick() == (1000, 700)  # the plan needs at least 400 W, which leaves 200 of 400 W


def test_measured_power_decides_whether_a_limit_is_kept_and_not_what_was_predicted() -> None:
    fleet = Fleet(UNPLANNED)
    fleet.machine.handle(budget(300.0), fleet.now_s)
    fleet.tick()
    status = fleet.machine.statuses["a"]
    assert (status.is_compliant, status.to_pause) == (False, ("new",)), "it draws 400 W so far"
    for _ in range(57):
        fleet.tick(new_w=255.0)
    status = fleet.machine.statuses["a"]
    assert status.judged_s < 60, "no whole window is measured"
    assert (status.is_compliant, status.to_pause) == (True, ())
    for _ in range(60):
        fleet.tick(new_w=310.0)
    assert not fleet.machine.statuses["a"].is_compliant


def test_a_predicted_excess_counts_where_a_jobs_power_is_not_measured() -> None:
    fleet = Fleet(replace(UNPLANNED, job_id="unmeasured"))
    fleet.machine.handle(budget(300.0), fleet.now_s)
    for _ in range(60):
        fleet.now_s += 1
        fleet.machine.handle(PowerMeasured(1.0, {}, {}), fleet.now_s)
        fleet.machine.handle(Tick(), fleet.now_s)
    assert fleet.machine.statuses["a"].to_pause == ("unmeasured",)


def test_a_max_clock_stays_despite_low_power_and_ends_with_the_limit() -> None:
    fleet = Fleet(PLANNED, UNPLANNED)
    fleet.machine.handle(budget(600.0), fleet.now_s)
    fleet.tick()
    for _ in range(100):
        assert fleet.tick(new_w=200.0) == (1000, 700)
    fleet.machine.handle(BudgetCancelled("b"), fleet.now_s)
    assert fleet.tick(new_w=200.0)[1] is None


class Restarted(Fleet):
    """The same after a restart, which knows the unplanned job only under a maximum clock of 700 MHz."""

    def __init__(self, limit_w: float) -> None:
        super().__init__(PLANNED)
        self.machine.handle(budget(limit_w), self.now_s)
        unknown = JobDemand("new", measured_w={"a": 0.0}, highest_clock_mhz=HIGHEST_MHZ)
        self.machine.handle(JobChanged(unknown, 1.0, max_clock_mhz=700), self.now_s)


def test_a_restart_lifts_no_max_clock_before_the_limit_ends() -> None:
    fleet = Restarted(600.0)
    for _ in range(100):
        assert fleet.tick(new_w=80.0) == (1000, 700)
    fleet.machine.handle(BudgetCancelled("b"), fleet.now_s)
    assert fleet.tick(new_w=80.0)[1] is None
    fleet.machine.handle(budget(700.0), fleet.now_s)
    for _ in range(20):
        max_clocks = fleet.tick(new_w=400.0)
    assert max_clocks == (1000, 1050), "its power without a maximum clock is known now: 300 of 400 W are left"


def test_a_max_clock_from_before_a_restart_is_its_jobs_own() -> None:
    fleet = Restarted(700.0)
    late = JobDemand("late", measured_w={"a": 0.0}, highest_clock_mhz=HIGHEST_MHZ)
    fleet.machine.handle(JobChanged(late, 1.0), fleet.now_s)
    assert fleet.tick(new_w=80.0) == (1000, 700)
    assert fleet.machine.max_clock_mhz("late") is None


def test_after_a_restart_a_max_clock_falls_as_any_does() -> None:
    fleet = Restarted(500.0)
    for _ in range(20):
        max_clocks = fleet.tick(new_w=200.0)
    assert max_clocks == (1000, 350)


def test_a_plan_ends_the_unknown_state_after_a_restart() -> None:
    fleet = Restarted(600.0)
    fleet.tick(new_w=80.0)
    point = PowerPoint(1.0, 1.0, {"a": 90.0}, HIGHEST_MHZ)
    for points in ((point,), ()):
        demand = JobDemand("new", points, {"a": 90.0}, highest_clock_mhz=HIGHEST_MHZ)
        fleet.machine.handle(JobChanged(demand, 1.0), fleet.now_s)
        for _ in range(20):
            max_clocks = fleet.tick(new_w=90.0)
    assert max_clocks == (1000, None)


def test_without_any_power_left_the_max_clock_is_the_lowest() -> None:
    fleet = Fleet(UNPLANNED)
    fleet.machine.handle(budget(0.0), fleet.now_s)
    assert fleet.tick() == (None, 1)


def test_a_job_with_unknown_clocks_has_no_max_clock() -> None:
    fleet = Fleet(JobDemand("new", measured_w={"a": 400.0}))
    fleet.machine.handle(budget(100.0), fleet.now_s)
    assert fleet.tick() == (None, None)


def test_a_job_that_starts_under_a_max_clock_counts_with_its_power_there() -> None:
    fleet = Fleet(PLANNED, UNPLANNED)
    fleet.machine.handle(budget(600.0), fleet.now_s)
    fleet.tick()
    late = JobDemand("late", measured_w={"a": 0.0}, highest_clock_mhz=HIGHEST_MHZ)
    fleet.machine.handle(JobChanged(late, 1.0), fleet.now_s)
    for _ in range(20):
        fleet.now_s += 1
        fleet.machine.handle(PowerMeasured(1.0, {"new": {"a": 200.0}, "late": {"a": 100.0}}, {}), fleet.now_s)
        fleet.machine.handle(Tick(), fleet.now_s)
    share = 200 / (400 + 100)
    assert fleet.machine.max_clock_mhz("late") == pytest.approx(share * HIGHEST_MHZ, abs=1)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6)), min_size=1))
def test_a_share_never_exceeds_the_power_left_and_moves_by_steps(ticks: list[tuple[float, float]]) -> None:
    watch = FeedWatch(Feed("a"))
    for free_w, left_w in ticks:
        before = watch.clock_share
        watch.share_clocks(free_w, left_w)
        share = watch.clock_share
        assert 0 <= share <= 1
        assert share * free_w <= max(0.0, left_w) * (1 + 1e-9) or free_w == 0
        assert share == before or share < before or share > before + 0.9 * CLOCK_STEP
        assert share == pytest.approx(round(share / CLOCK_STEP) * CLOCK_STEP)


def test_noise_moves_no_max_clock() -> None:
    watch = FeedWatch(Feed("a"))
    seen = []
    for left_w in (520, 480, 520, 540, 480, 520, 549, 480):
        watch.share_clocks(1000.0, float(left_w))
        seen.append(watch.clock_share)
    assert seen[1:] == pytest.approx([0.45] * 7)
