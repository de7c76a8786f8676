"""Jobs without plans get a maximum clock only if plans alone can't keep a limit."""

from collections.abc import Sequence

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
    Input,
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


START = JobChanged(PLANNED, 1.0), JobChanged(UNPLANNED, 1.0)
CANCELLED = BudgetCancelled("b")


def budget(limit_w: float) -> BudgetSet:
    return BudgetSet(Budget("b", "a", limit_w, 0.0))


def changed(job_id: str, max_clock_mhz: int | None = None) -> JobChanged:
    """A job without plans whose power without a maximum clock is unknown."""
    unknown = JobDemand(job_id, measured_w={"a": 0.0}, highest_clock_mhz=HIGHEST_MHZ)
    return JobChanged(unknown, 1.0, max_clock_mhz=max_clock_mhz)


def restarted(limit_w: float) -> Sequence[Input]:
    """After a restart the unplanned job is known only under a maximum clock of 700 MHz."""
    return JobChanged(PLANNED, 1.0), budget(limit_w), changed("new", 700)


def planned_or_not(*points: PowerPoint) -> JobChanged:
    return JobChanged(JobDemand("new", points, {"a": 90.0}, highest_clock_mhz=HIGHEST_MHZ), 1.0)


class Fleet:
    """Jobs on one feed, second by second, with measurements of the unplanned ones."""

    def __init__(self) -> None:
        self.machine = FleetMachine({"a": Feed("a")})
        self.now_s = 0.0

    def tick(self, *events: Input, **powers_w: float) -> tuple[int | None, int | None]:
        """Let a second pass; return the maximum clocks of the planned and of the unplanned job."""
        for event in events:
            self.machine.handle(event, self.now_s)
        self.now_s += 1
        measured = {job_id: {"a": power_w} for job_id, power_w in powers_w.items()}
        self.machine.handle(PowerMeasured(1.0, measured, {}), self.now_s)
        self.machine.handle(Tick(), self.now_s)
        self.machine.validate_state()
        return self.machine.max_clock_mhz("planned"), self.machine.max_clock_mhz("new")


Clocks = tuple[int | None, int | None]
Step = tuple[Sequence[Input], int, float, Clocks | None]
"""What happens, then for how many seconds the unplanned job draws what, and the maximum clocks meanwhile."""

SCENARIOS: dict[str, list[Step]] = {
    "none without a limit": [(START, 1, 400.0, (None, None))],
    "the highest of its plans for a job with a target, and none for others": [
        ((*START, budget(800.0)), 1, 400.0, (1000, None)),
        ([CANCELLED], 1, 400.0, (None, None)),
    ],
    # The plan needs at least 400 W, which leaves 200 of 400 W.
    "it saves what plans can't, stays despite low power and ends with the limit": [
        ((*START, budget(600.0)), 1, 400.0, (1000, 700)),
        ([], 100, 200.0, (1000, 700)),
        ([CANCELLED], 1, 200.0, (None, None)),
    ],
    "the lowest without any power left": [((START[1], budget(0.0)), 1, 400.0, (None, 1))],
    "none for a job with unknown clocks": [
        ((JobChanged(JobDemand("new", measured_w={"a": 400.0}), 1.0), budget(100.0)), 1, 400.0, (None, None))
    ],
    # Its power without a maximum clock is known after the limit: 300 of 400 W are left.
    "a restart lifts none before the limit ends": [
        (restarted(600.0), 100, 80.0, (1000, 700)),
        ([CANCELLED], 1, 80.0, (None, None)),
        ([budget(700.0)], 19, 400.0, None),
        ([], 1, 400.0, (1000, 1050)),
    ],
    "one from before a restart is its job's own": [
        ((*restarted(700.0), changed("late")), 1, 80.0, (1000, 700))
    ],
    "after a restart it falls as any does": [
        (restarted(500.0), 19, 200.0, None),
        ([], 1, 200.0, (1000, 350)),
    ],
    "a plan ends the unknown state after a restart": [
        (restarted(600.0), 1, 80.0, (1000, 700)),
        ([planned_or_not(PowerPoint(1.0, 1.0, {"a": 90.0}, HIGHEST_MHZ))], 20, 90.0, None),
        ([planned_or_not()], 19, 90.0, None),
        ([], 1, 90.0, (1000, None)),
    ],
}


@pytest.mark.parametrize("steps", SCENARIOS.values(), ids=SCENARIOS)
def test_a_job_without_plans_gets_a_max_clock_only_if_plans_alone_cannot_keep_a_limit(
    steps: Sequence[Step],
) -> None:
    fleet = Fleet()
    for events, seconds, new_w, expected in steps:
        for second in range(seconds):
            found = fleet.tick(*(events if second == 0 else ()), new=new_w)
            assert expected in (None, found)
    assert fleet.machine.max_clock_mhz("late") is None


def test_measured_power_decides_whether_a_limit_is_kept_and_not_what_was_predicted() -> None:
    fleet = Fleet()
    fleet.tick(START[1], budget(300.0), new=400.0)
    status = fleet.machine.statuses["a"]
    assert (status.is_compliant, status.to_pause) == (False, ("new",)), "it draws 400 W so far"
    for _ in range(57):
        fleet.tick(new=255.0)
    status = fleet.machine.statuses["a"]
    assert status.judged_s < 60, "no whole window is measured"
    assert (status.is_compliant, status.to_pause) == (True, ())
    for _ in range(60):
        fleet.tick(new=310.0)
    assert not fleet.machine.statuses["a"].is_compliant


def test_a_predicted_excess_counts_where_a_jobs_power_is_not_measured() -> None:
    fleet = Fleet()
    fleet.tick(START[1], budget(300.0))
    for _ in range(59):
        fleet.tick()
    assert fleet.machine.statuses["a"].to_pause == ("new",)


def test_a_job_that_starts_under_a_max_clock_counts_with_its_power_there() -> None:
    fleet = Fleet()
    fleet.tick(*START, budget(600.0), new=400.0)
    fleet.tick(changed("late"), new=200.0, late=100.0)
    for _ in range(19):
        fleet.tick(new=200.0, late=100.0)
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
