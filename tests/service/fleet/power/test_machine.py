"""The fleet's state machine against simulated GPUs: its commands, and the resulting power."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.power import Budget, Feed, FeedStatus
from perseus.service.fleet.power import machine as machine_module
from perseus.service.fleet.power.allocation import allocate
from perseus.service.fleet.power.demand import JobDemand, PowerPoint
from perseus.service.fleet.power.machine import FleetMachine
from perseus.service.fleet.power.messages import (
    BudgetCancelled,
    BudgetSet,
    Command,
    Input,
    JobChanged,
    JobLeft,
    PowerMeasured,
    SetTargetTime,
    Tick,
)

FEED = Feed("a", ramp_down_w_per_s=200.0, ramp_up_w_per_s=100.0)


def demand(
    job_id: str, watts: float = 1000.0, *, tolerance_percent: float = 50, weight: float = 1
) -> JobDemand:
    """Return a job whose power falls twice as fast as its speed, in steps of 1 % of speed."""
    speeds = np.arange(1.0, 0.599, -0.005)
    points = tuple(PowerPoint(1 / s, float(s), {"a": float(watts * (2 * s - 1))}) for s in speeds)
    return JobDemand(job_id, points, tolerance_percent=tolerance_percent, weight=weight)


@dataclass
class Site:
    """Simulated GPUs: each job reaches its point's power a second later, apart from an error and noise.

    `held_error`: an additional error of slowed jobs.
    """

    machine: FleetMachine
    errors: Mapping[str, float] = field(default_factory=dict)
    noise: float = 0.0
    held_error: float = 0.0
    now_s: float = 0.0
    message: list[tuple[float, Command]] = field(default_factory=list)
    drawn_w: list[float] = field(default_factory=list)
    speeds: list[Mapping[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._demands: dict[str, JobDemand] = {}
        self._points: dict[str, PowerPoint] = {}
        self._reported: list[tuple[float, str, PowerPoint]] = []

    def handle(self, event: Input) -> list[Command]:
        commands = self.machine.handle(event, self.now_s)
        self.machine.validate_state()
        match event:
            case JobChanged(changed):
                self._demands[changed.job_id] = changed
                if changed.points:
                    self._points[changed.job_id] = changed.points[0]
            case JobLeft(job_id):
                del self._demands[job_id]
                self._points.pop(job_id, None)
        for command in commands:
            self.message.append((self.now_s, command))
            if isinstance(command, SetTargetTime):
                points = self._demands[command.job_id].points
                wanted_s = command.iteration_time_s or points[0].iteration_time_s
                point = next(p for p in points if p.iteration_time_s == wanted_s)
                self._reported.append((self.now_s + 1, command.job_id, point))
        return commands

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            due = [each for each in self._reported if each[0] <= self.now_s]
            self._reported = [each for each in self._reported if each[0] > self.now_s]
            drawn_w = {}
            for job_id, job in self._demands.items():
                power_w = dict(self._points[job_id].power_w if job.points else job.measured_w)
                factor = (1 + self.errors.get(job_id, 0.0)) * (
                    1 + self.noise * self._random.standard_normal()
                )
                if job.points and self._points[job_id] is not job.points[0]:
                    factor *= 1 + self.held_error
                drawn_w[job_id] = {feed: factor * watts for feed, watts in power_w.items()}
            self.drawn_w.append(sum(own["a"] for own in drawn_w.values()))
            self.speeds.append({job_id: point.speed for job_id, point in self._points.items()})
            for _, job_id, point in due:
                self._points[job_id] = point
            self.handle(PowerMeasured(1.0, drawn_w, {}))
            self.handle(Tick())

    def statuses(self) -> Iterator[FeedStatus]:
        return (command for _, command in self.message if isinstance(command, FeedStatus))

    def operating_points(self) -> list[SetTargetTime]:
        return [command for _, command in self.message if isinstance(command, SetTargetTime)]

    def means_w(self, window_s: int, begin: int, end: int | None = None) -> Sequence[float]:
        drawn_w = np.array(self.drawn_w[begin:end])
        means: list[float] = np.convolve(drawn_w, np.full(window_s, 1 / window_s), "valid").tolist()
        return means


def site(
    *jobs: JobDemand, feed: Feed = FEED, errors: Mapping[str, float] | None = None, noise: float = 0.0
) -> Site:
    made = Site(FleetMachine({"a": feed}), errors or {}, noise)
    for job in jobs:
        made.handle(JobChanged(job, 1.0))
    return made


def test_without_a_budget_there_are_no_commands() -> None:
    quiet = site(demand("x"), demand("y"))
    quiet.pass_time(30)
    assert quiet.message == []
    assert quiet.machine.wake_s(30.0) == math.inf


def test_a_budget_cuts_at_once_and_urgently_and_jobs_recover_after_its_end() -> None:
    run = site(demand("x"), demand("y"), feed=Feed("a"))
    run.pass_time(10)
    (cut, *_) = run.handle(BudgetSet(Budget("b", "a", 1500.0, 0.0, 100.0)))
    assert isinstance(cut, SetTargetTime)
    assert cut.is_urgent
    run.pass_time(150)
    assert run.drawn_w[9] == 2000
    assert max(run.drawn_w[12:100]) <= 1500
    assert run.drawn_w[-1] == 2000
    assert {p.job_id: p.iteration_time_s for p in run.operating_points()} == {"x": None, "y": None}


def test_ramps_bound_how_power_falls_and_rises() -> None:
    run = site(demand("x"), demand("y"))
    run.handle(BudgetSet(Budget("b", "a", 1000.0, 50.0, 200.0)))
    assert run.machine.wake_s(0.0) == pytest.approx(45.0)
    run.pass_time(300)
    steps_w = np.diff(run.drawn_w)
    one_point_w = 2 * 10.0  # both jobs together
    assert run.drawn_w[44] == 2000
    assert max(run.drawn_w[52:200]) <= 1000
    assert steps_w.min() >= -200 - one_point_w - 1e-6
    over_ten_s = np.array(run.drawn_w)[210:] - np.array(run.drawn_w)[200:-10]
    assert over_ten_s.max() <= 10 * 100 + one_point_w + 1e-6
    assert run.drawn_w[-1] == 2000


def test_a_power_cap_so_far_goes_on_falling_or_rising_and_is_lifted_once_all_are_known() -> None:
    falling = FleetMachine({"a": FEED}, {"a": 1400.0}, 30.0)
    falling.handle_all([BudgetSet(Budget("b", "a", 500.0, 0.0))], 0.0)
    rising = FleetMachine({"a": FEED}, {"a": 700.0}, 30.0)
    for machine, rise_w_per_s in ((falling, -200.0), (rising, 100.0)):
        machine.handle(Tick(), 0.0)
        before_w = machine.caps_w["a"]
        for now_s in range(1, 4):  # no job is known: each cap is above what all would draw
            machine.handle(Tick(), float(now_s))
            assert machine.caps_w["a"] == machine.power_cap_w("a") == before_w + rise_w_per_s * now_s
    rising.handle(Tick(), 30.0)
    assert not rising.caps_w


@pytest.mark.parametrize("feed", [FEED, Feed("a")], ids=["with ramps", "at once"])
def test_a_limit_is_kept_from_the_first_second_though_new_plans_draw_more_than_expected(
    feed: Feed,
) -> None:
    run = site(demand("x"), demand("y"), feed=feed)
    run.held_error = 0.02
    run.pass_time(30)
    run.handle(BudgetSet(Budget("b", "a", 1500.0, 30.0)))
    run.pass_time(300)
    ramp_s = 0 if feed.ramp_down_w_per_s == math.inf else (2000 - 1500) / feed.ramp_down_w_per_s
    assert max(run.drawn_w[math.ceil(30 + ramp_s) + 4 :]) <= 1500
    assert np.mean(run.drawn_w[150:]) >= 0.97 * 1500, "the margin is that of new plans"


def test_a_job_that_loses_its_plans_counts_with_its_unlimited_power() -> None:
    run = site(demand("x", weight=0.2), demand("y", 1500.0), feed=Feed("a"))
    run.handle(BudgetSet(Budget("b", "a", 1800.0, 0.0)))
    run.pass_time(60)
    assert run.machine.statuses["a"].managed_w <= 1800
    held_w = run.drawn_w[-1] - 1500
    assert held_w < 500
    reported = run.handle(JobChanged(JobDemand("x", measured_w={"a": held_w}), 1.0))
    (slower,) = [each for each in reported if isinstance(each, SetTargetTime) and each.job_id == "y"]
    assert slower.is_urgent
    status = run.machine.statuses["a"]
    assert status.unmanaged_w == pytest.approx(1000), "like its fastest plan"
    assert status.managed_w + 1000 <= 1800


def test_noise_does_not_move_plans_to_and_fro() -> None:
    run = site(demand("x"), demand("y"), demand("z"), noise=0.02)
    run.handle(BudgetSet(Budget("b", "a", 2400.0, 0.0)))
    run.pass_time(900)
    assert max(run.means_w(60, 20)) <= 2400
    after = [command for now_s, command in run.message if now_s > 120 and isinstance(command, SetTargetTime)]
    assert len(after) <= 3 * 13 / 2  # each job less than every other minute


def test_the_margin_is_as_small_as_the_noise_allows() -> None:
    """Jobs with many plans draw nearly the limit if their power is steady, and a little less if it is not."""
    speeds = np.arange(1.0, 0.6, -0.002)
    points = tuple(PowerPoint(1 / s, float(s), {"a": float(1000 * (2 * s - 1))}) for s in speeds)
    shares = []
    for noise in (0.0, 0.01):
        run = site(JobDemand("x", points), errors={"x": 0.02}, noise=noise)
        run.handle(BudgetSet(Budget("b", "a", 750.0, 0.0)))
        run.pass_time(700)
        assert max(run.means_w(60, 20)) <= 750
        shares.append(np.mean(run.drawn_w[400:]) / 750)
    assert shares[0] > 0.995
    assert 0.985 < shares[1] < shares[0]


def is_warned_of(run: Site) -> bool:
    return any(status.is_above_power_cap for status in run.statuses())


def test_power_above_a_power_cap_for_a_whole_window_is_reported_while_the_cap_still_falls() -> None:
    run = site(demand("x"), demand("y"), feed=Feed("a", ramp_down_w_per_s=5.0))
    run.handle(BudgetSet(Budget("b", "a", 1000.0, 0.0)))
    run.errors = {"x": 3.0, "y": 3.0}
    run.pass_time(59)
    assert not is_warned_of(run)
    run.pass_time(30)
    status = run.machine.statuses["a"]
    assert (status.in_transition, status.is_compliant, status.is_above_power_cap) == (True, True, True)
    run.handle(BudgetCancelled("b"))
    run.pass_time(1)
    assert not run.machine.statuses["a"].is_above_power_cap


def test_power_above_a_power_cap_is_reported_of_jobs_whose_plans_keep_changing() -> None:
    """Their expected power counts, as measurements are outdated, but not for this."""
    machine = FleetMachine({"a": Feed("a")})
    machine.handle(JobChanged(demand("x"), 1.0), 0.0)
    machine.handle(BudgetSet(Budget("b", "a", 700.0, 0.0)), 0.0)
    for now_s in range(1, 90):
        measured = PowerMeasured(1.0, {"x": {"a": 900.0}}, {}, changing=("x",), outdated=("x",))
        machine.handle_all((measured, Tick()), float(now_s))
    assert machine.statuses["a"].is_compliant
    assert machine.statuses["a"].is_above_power_cap


def test_only_power_since_the_limit_had_to_be_kept_is_judged_and_its_excess_reported() -> None:
    """The GPUs don't follow their plans."""
    run = site(demand("x"))
    run.handle(BudgetSet(Budget("b", "a", 700.0, 0.0)))
    run.errors = {"x": 3.0}
    run.pass_time(4)
    status = run.machine.statuses["a"]
    assert (status.judged_w, status.judged_mean_w, status.judged_s) == (None, None, 0.0)
    run.pass_time(30)
    status = run.machine.statuses["a"]
    assert status.judged_w == pytest.approx(sum(run.drawn_w[-10:]) / 10)
    counted = run.drawn_w[-int(status.judged_s) :]
    assert status.judged_mean_w == pytest.approx(sum(counted) / len(counted))
    run.pass_time(66)
    assert not run.machine.statuses["a"].is_compliant
    run.handle(BudgetCancelled("b"))
    run.pass_time(1)
    assert run.machine.statuses["a"].judged_w is None


@pytest.mark.parametrize(
    ("changing", "outdated", "expected_w", "measured_w"),
    [((), (), 1500.0, 1500.0), (("x",), (), 1000.0, 1500.0), (("x",), ("x",), 1000.0, 1000.0)],
)
def test_power_under_other_plans_does_not_count_for_the_present_ones(
    changing: Sequence[str], outdated: Sequence[str], expected_w: float, measured_w: float
) -> None:
    machine = FleetMachine({"a": Feed("a")})
    machine.handle(JobChanged(demand("x"), 1.0), 0.0)
    for now_s in range(1, 60):
        measured = PowerMeasured(1.0, {"x": {"a": 1500.0}}, {}, changing, outdated)
        machine.handle(measured, float(now_s))
    status = machine.statuses["a"]
    assert status.managed_w == pytest.approx(expected_w)
    assert status.measured_w == pytest.approx(measured_w)


def test_slowed_jobs_and_the_power_without_plans_are_reported() -> None:
    run = site(demand("x"), JobDemand("z", measured_w={"a": 300.0}), feed=Feed("a"))
    run.handle(BudgetSet(Budget("b", "a", 1200.0, 0.0)))
    status = run.machine.statuses["a"]
    assert (status.held, status.unmanaged_w) == (("x",), 300.0)
    assert run.machine.target_time_s("x") is not None
    assert run.machine.target_time_s("z") is None


class Step(NamedTuple):
    """What is set, then for how many seconds, since when, and between which powers all draw."""

    events: list[Input]
    seconds: int
    since_s: int
    least_w: float
    most_w: float


STEPS: dict[str, tuple[Feed, list[Step]]] = {
    "a default limits a feed while no budget does": (
        Feed("a", default_w=1500.0),
        [
            Step([], 60, 5, 0, 1500),
            Step([BudgetSet(Budget("more", "a", 1800.0, 60.0, 120.0))], 60, 10, 1501, 1800),
            Step([], 60, 5, 0, 1500),
        ],
    ),
    "the lowest of several budgets counts, and one may be cancelled": (
        Feed("a"),
        [
            Step([BudgetSet(Budget(f"{w}", "a", w, 0.0)) for w in (1600.0, 1200.0)], 30, 29, 0, 1200),
            Step([BudgetCancelled("1200.0")], 30, 29, 1501, 1600),
        ],
    ),
    "jobs make room for a new job": (
        Feed("a"),
        [
            Step([JobLeft("y"), BudgetSet(Budget("b", "a", 1500.0, 0.0))], 20, 19, 1000, 1000),
            Step([JobChanged(demand("y"), 1.0)], 10, 9, 1001, 1500),
            Step([JobLeft("y")], 20, 19, 1000, 1000),
        ],
    ),
}


@pytest.mark.parametrize(("feed", "steps"), STEPS.values(), ids=STEPS)
def test_power_stays_within_what_is_set(feed: Feed, steps: list[Step]) -> None:
    run = site(demand("x"), demand("y"), feed=feed)
    for events, seconds, since_s, least_w, most_w in steps:
        for event in events:
            run.handle(event)
        run.pass_time(seconds)
        drawn_w = run.drawn_w[since_s - seconds :]
        assert least_w <= max(drawn_w) <= most_w


limits = st.lists(
    st.tuples(st.integers(1300, 2200), st.integers(0, 100), st.integers(30, 120)), min_size=1, max_size=3
)


@given(limits, st.floats(-0.05, 0.05))
def test_random_budgets_are_kept_or_reported_as_not_kept(
    some: list[tuple[int, int, int]], error: float
) -> None:
    """All budgets are known in advance; every mean over a minute under one limit keeps it."""
    run = site(demand("x"), demand("y", tolerance_percent=30), errors={"x": error, "y": error}, noise=0.01)
    run.pass_time(20)
    begin = len(run.drawn_w)
    budgets = [
        Budget(f"b{k}", "a", float(w), begin + 30.0 + s, begin + 30.0 + s + length)
        for k, (w, s, length) in enumerate(some)
    ]
    for budget in budgets:
        run.handle(BudgetSet(budget))
    run.pass_time(260)
    limit_w = np.array(
        [
            min((b.limit_w for b in budgets if b.is_in_force(t)), default=math.inf)
            for t in range(len(run.drawn_w))
        ]
    )
    changes = np.flatnonzero(np.diff(np.where(np.isfinite(limit_w), limit_w, 0.0), prepend=0.0) != 0)
    for first, last in pairwise([*changes.tolist(), len(limit_w)]):
        if limit_w[first] < math.inf and last - first > 70:
            assert max(run.means_w(60, first + 6, last)) <= limit_w[first]
    assert not is_warned_of(run)


def test_each_of_several_feeds_is_kept() -> None:
    points = tuple(
        PowerPoint(1 / s, float(s), {"a": 600 * (2 * s - 1), "b": 400 * (2 * s - 1)})
        for s in np.arange(1.0, 0.599, -0.01).tolist()
    )
    run = site(demand("x"), JobDemand("both", points), feed=Feed("a"))
    run.handle(BudgetSet(Budget("a", "a", 1200.0, 0.0)))
    run.handle(BudgetSet(Budget("b", "b", 300.0, 0.0)))
    run.pass_time(100)
    for feed, limit_w in (("a", 1200.0), ("b", 300.0)):
        status = run.machine.statuses[feed]
        assert status.is_compliant
        assert 0.9 * limit_w < status.managed_w <= limit_w


def test_gpus_in_no_job_count() -> None:
    machine = FleetMachine({"a": Feed("a")})
    machine.handle(JobChanged(demand("x"), 1.0), 0.0)
    machine.handle(PowerMeasured(1.0, {"x": {"a": 1000.0}}, {"a": 500.0}), 1.0)
    (reported, *_) = machine.handle(BudgetSet(Budget("b", "a", 1300.0, 0.0)), 1.0)
    assert isinstance(reported, SetTargetTime)
    status = machine.statuses["a"]
    assert 0.9 * 800 < status.managed_w <= 800


JOB_COUNT = 30


def test_each_jobs_power_is_looked_up_once_for_all_feeds(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    drawn_w = machine_module._Job.drawn_w

    def counting(job: Any) -> Mapping[str, float]:
        nonlocal count
        count += 1
        return drawn_w(job)

    names = ["a", *(f"another-{number}" for number in range(15))]
    machine = FleetMachine({name: Feed(name) for name in names})
    limits_w = [BudgetSet(Budget(name, name, 750.0 * JOB_COUNT, 0.0)) for name in names]
    jobs = [JobChanged(demand(f"job-{number}"), 1.0) for number in range(JOB_COUNT)]
    machine.handle_all([*limits_w, *jobs, Tick()], 0.0)
    monkeypatch.setattr(machine_module._Job, "drawn_w", counting)
    measured_w = {f"job-{number}": {"a": 700.0} for number in range(JOB_COUNT)}
    machine.handle_all([PowerMeasured(1.0, measured_w, {}), Tick()], 1.0)
    assert 0 < count <= 2 * JOB_COUNT, "once for each of the two inputs"


def test_many_simultaneous_changes_lead_to_one_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handled one by one, each would cost a decision over all jobs."""
    count = 0

    def counting(*args: Any) -> Any:
        nonlocal count
        count += 1
        return allocate(*args)

    monkeypatch.setattr(machine_module, "allocate", counting)
    at_once, one_by_one = FleetMachine({"a": FEED}), FleetMachine({"a": FEED})
    jobs = [JobChanged(demand(f"job-{number}", 1000.0 + number), 1.0) for number in range(JOB_COUNT)]
    for machine in (at_once, one_by_one):
        machine.handle(BudgetSet(Budget("b", "a", 750.0 * JOB_COUNT, 0.0)), 0.0)
    count = 0
    commands = at_once.handle_all([*jobs, Tick()], 0.0)
    at_once.validate_state()
    assert count == 1
    for job in jobs:
        one_by_one.handle(job, 0.0)
    one_by_one.handle(Tick(), 0.0)
    reported = {each.job_id: each.iteration_time_s for each in commands if isinstance(each, SetTargetTime)}
    assert len(reported) > JOB_COUNT / 4
    for name in (f"job-{number}" for number in range(JOB_COUNT)):
        assert at_once.target_time_s(name) == one_by_one.target_time_s(name) == reported.get(name)
