"""A power budget over three slots, replayed: whether their coordinators keep it as one coordinator does.

The coordinators' machines and the divider are real; the database between them is simulated: each sees what
the others published a second ago. In some runs a coordinator is killed under the budget: its jobs go on under
their plans, nobody serves its slot for the lease and two seconds, and another coordinator takes over from
what is stored.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks import budgets
from benchmarks.fleet_jobs import MIX, STRAGGLER, Job, frontier
from benchmarks.harness import Cell, Column, Table, main
from perseus.job_id import slot_of
from perseus.service.domain.power import DEFAULT_FEED, Budget, Feed, FeedStatus
from perseus.service.domain.slot_power import Division, KnownSlot
from perseus.service.fleet.power.allocation import allocate
from perseus.service.fleet.power.demand import JobDemand, PowerPoint
from perseus.service.fleet.power.division import Divider, divided
from perseus.service.fleet.power.feed_watch import SETTLING_TIME_S
from perseus.service.fleet.power.machine import PERIOD_S, FleetMachine
from perseus.service.fleet.power.messages import (
    BudgetCancelled,
    BudgetSet,
    Command,
    FeedShared,
    Input,
    JobChanged,
    JobLeft,
    PowerMeasured,
    SetTargetTime,
    Tick,
)
from perseus.simulation.replay import Fleet, Replay, ReplayedBudget, ReplayedJob, Straggler, replay

SLOT_COUNT = 3
CUT = 0.2
LEASE_S, TAKEOVER_S = 15.0, 2.0
_NOISE, _ERROR = 0.02, 0.03
_RANDOM_RUNS = 4
_BEGIN_S, _CUT_S, _KILL_S = 1200.0, 3600.0, 2400.0


@dataclass(frozen=True, slots=True)
class Kill:
    """The end of a slot's coordinator."""

    slot: int
    time_s: float


class SlottedFleet(FleetMachine):
    """The machines of several coordinators, each for the jobs of one slot, in the place of one."""

    def __init__(
        self,
        feeds: Mapping[str, Feed],
        slot_count: int,
        slot_of_job: Callable[[str], int],
        kills: Sequence[Kill] = (),
    ) -> None:
        super().__init__(feeds)
        self.division = Division()
        self.largest_sum = 0.0
        """Of the shares that coordinators keep at a time."""
        self._feeds = feeds
        self._slot_of_job = slot_of_job
        self._kills = {kill.slot: kill.time_s for kill in kills}
        self.machines: list[FleetMachine | None] = [FleetMachine(feeds) for _ in range(slot_count)]
        self._kept = [Division()] * slot_count
        self._known: Sequence[KnownSlot] = [KnownSlot()] * slot_count
        self._divider = Divider(self.division)
        self._budgets_set: dict[str, BudgetSet] = {}
        self._changed: dict[str, JobChanged] = {}
        self._exchanged_s = -np.inf

    def handle_all(self, events: Iterable[Input], now_s: float) -> list[Command]:
        commands: list[Command] = []
        for event in events:
            match event:
                case BudgetSet():
                    self._budgets_set[event.budget.budget_id] = event
                case BudgetCancelled(budget_id):
                    self._budgets_set.pop(budget_id, None)
                case JobChanged():
                    self._changed[event.demand.job_id] = event
                case JobLeft(job_id):
                    self._changed.pop(job_id, None)
            if isinstance(event, Tick):
                commands += self._tick(now_s)
            else:
                for slot, machine in enumerate(self.machines):
                    if machine is not None and (own := self._of(slot, event)) is not None:
                        commands += machine.handle(own, now_s)
        before = {feed: status.is_compliant for feed, status in self.statuses.items()}
        self._show(now_s)
        changed = [s for feed, s in self.statuses.items() if s.is_compliant != before.get(feed, True)]
        return [command for command in commands if isinstance(command, SetTargetTime)] + changed

    def _of(self, slot: int, event: Input) -> Input | None:
        """Return what an event is for a slot; None if it is another's."""
        match event:
            case PowerMeasured():
                jobs_w = {name: w for name, w in event.jobs_w.items() if self._slot_of_job(name) == slot}
                return replace(event, jobs_w=jobs_w, others_w=event.others_w if slot == 0 else {})
            case JobChanged(demand):
                return event if self._slot_of_job(demand.job_id) == slot else None
            case JobLeft(job_id):
                return event if self._slot_of_job(job_id) == slot else None
        return event

    def _tick(self, now_s: float) -> list[Command]:
        """Let each coordinator read, tick and publish; what it publishes, others read in the next tick."""
        if now_s < self._exchanged_s + PERIOD_S - 1e-6:
            return []
        self._exchanged_s = now_s
        read, division = list(self._known), self.division
        published = list(read)
        commands: list[Command] = []
        for slot in range(len(self.machines)):
            commands += self._end_or_take_over(slot, now_s)
            if (machine := self.machines[slot]) is None:
                published[slot] = replace(read[slot], is_served=now_s < self._kills[slot] + LEASE_S)
                continue
            self._kept[slot] = division
            shared = [
                FeedShared(
                    feed,
                    division.shares[feed][slot] if feed in division.shares else None,
                    sum(k.power.drawn_w(feed) for n, k in enumerate(read) if n != slot and k.power),
                    sum(k.power.max_w(feed) for n, k in enumerate(read) if n != slot and k.power),
                )
                for feed in self._feeds
            ]
            commands += machine.handle_all([*shared, Tick()], now_s)
            published[slot] = KnownSlot(machine.published(division.version, now_s), True, True)
            if slot == 0:
                known = [published[0], *read[1:]]
                self.division = self._divider.divide(known, machine.to_divide_w(now_s), now_s)
        self._known = published
        for feed in self._feeds:
            kept = [some.shares[feed][slot] for slot, some in enumerate(self._kept) if feed in some.shares]
            self.largest_sum = max(self.largest_sum, sum(kept))
        return commands

    def _end_or_take_over(self, slot: int, now_s: float) -> list[Command]:
        killed_s = self._kills.get(slot, np.inf)
        if killed_s <= now_s < killed_s + LEASE_S + TAKEOVER_S:
            self.machines[slot] = None
        elif self.machines[slot] is None:
            machine = self.machines[slot] = FleetMachine(self._feeds)
            if slot == 0:
                self._divider = Divider(self.division)
            own = [event for event in self._changed.values() if self._of(slot, event) is not None]
            shares = self.division.shares
            shared = [FeedShared(feed, shares[feed][slot], 0.0, 0.0) for feed in shares]
            machine.handle_all([*shared, *self._budgets_set.values(), *own], now_s)
            ids = [event.demand.job_id for event in own]
            return [SetTargetTime(job_id, machine.target_time_s(job_id), is_urgent=True) for job_id in ids]
        return []

    def _show(self, now_s: float) -> None:
        """Show the feeds as the coordinator of slot 0 does."""
        first = self.machines[0]
        if first is not None and first.statuses and all(known.power for known in self._known):
            self.statuses = {feed: first.whole_status(self._parts(feed), now_s) for feed in first.statuses}

    def _parts(self, feed: str) -> list[FeedStatus]:
        return [known.power.statuses[feed] for known in self._known if known.power]

    def wake_s(self, now_s: float) -> float:
        return now_s + PERIOD_S

    def power_cap_w(self, name: str) -> float:
        return sum(machine.power_cap_w(name) for machine in self.machines if machine is not None)


@dataclass(frozen=True, slots=True)
class Figures:
    """How a budget was kept: means over windows in percent of the limit, speed lost in percent of all."""

    worst_10s: float
    worst_60s: float
    drawn: float
    lost: float
    changes: float
    division_count: int
    largest_sum: float


def cut(jobs: Sequence[Job], *, slot_count: int, kills: Sequence[Kill] = (), seed: int = 18) -> Figures:
    """Replay a budget for an hour, and judge it."""
    fleet = _fleet(jobs, seed)
    machine = None
    if slot_count > 1:
        numbers = {job.job_id: n for n, job in enumerate(jobs)}
        by_number = len(jobs) <= len(MIX)  # few jobs would not spread evenly
        machine = SlottedFleet(
            fleet.feeds,
            slot_count,
            lambda job_id: numbers[job_id] % slot_count if by_number else slot_of(job_id, slot_count),
            kills,
        )
    done = replay(fleet, machine=machine)
    division_count, largest_sum = (
        (0, 1.0) if machine is None else (machine.division.version, machine.largest_sum)
    )
    return _judged(jobs, fleet, done, division_count, largest_sum)


def _fleet(jobs: Sequence[Job], seed: int) -> Fleet:
    random = np.random.default_rng(seed)
    end_s = _BEGIN_S + _CUT_S
    replayed = [
        ReplayedJob(
            job.job_id,
            frontier(job.gpu),
            job.pipeline_count,
            DEFAULT_FEED,
            job.tolerance_percent,
            job.weight,
            0.0,
            end_s,
            stragglers=[Straggler(0, STRAGGLER, 0.0, end_s)] if job.has_straggler else [],
            power_error=float(random.uniform(-_ERROR, _ERROR)),
        )
        for job in jobs
    ]
    errors = {each.job_id: each.power_error for each in replayed}
    stock_w = sum(job.stock_power_w() * (1 + errors[job.job_id]) for job in jobs)
    feed = Feed(DEFAULT_FEED, stock_w, ramp_down_w_per_s=stock_w / 60, ramp_up_w_per_s=stock_w / 300)
    budget = Budget("cut", DEFAULT_FEED, (1 - CUT) * stock_w, _BEGIN_S, end_s)
    known = ReplayedBudget(budget, _BEGIN_S - 600)
    return Fleet(0.0, end_s, {DEFAULT_FEED: feed}, replayed, [known], noise=_NOISE, seed=seed)


def _judged(
    jobs: Sequence[Job], fleet: Fleet, done: Replay, division_count: int, largest_sum: float
) -> Figures:
    limit_w = fleet.budgets[0].budget.limit_w
    seconds = np.arange(_BEGIN_S + SETTLING_TIME_S + 1, _BEGIN_S + _CUT_S + 1)
    index = np.searchsorted(done.times_s, seconds - 1e-6)
    drawn_w = done.feeds_w[DEFAULT_FEED][index]
    losses = changes = 0.0
    for job in jobs:
        points = job.points()
        stock_s = frontier(job.gpu).baseline.iteration_time_s
        full_speed = stock_s / points[0].iteration_time_s
        speeds = done.speeds[job.job_id][index]
        losses += job.weight * float(np.mean(1 - speeds / full_speed))
        changes += float(np.count_nonzero(np.diff(speeds)))
    worst_10s, worst_60s = (
        100 * float(np.convolve(drawn_w, np.full(n, 1 / n), "valid").max()) / limit_w for n in (10, 60)
    )
    return Figures(
        worst_10s,
        worst_60s,
        drawn=100 * float(drawn_w.mean()) / limit_w,
        lost=100 * losses / sum(job.weight for job in jobs),
        changes=changes / len(jobs) / (_CUT_S / 3600),
        division_count=division_count,
        largest_sum=largest_sum,
    )


def many(times: int) -> list[Job]:
    """Return the mix several times, each with names of its own."""
    return [replace(job, job_id=f"{job.job_id}-{number}") for number in range(times) for job in MIX]


@dataclass(frozen=True, slots=True)
class Beside:
    """Weighted speed lost under limits, in percent: by one coordinator, and in points more by three.

    `more`, `more_drawn`: with divided feeds, and with shares by drawn power; None if these keep no limit that
    one coordinator keeps.
    """

    whole: float
    more: float | None
    more_drawn: float | None


def beside_whole(spread: float, cuts: Mapping[str, float], seed: int) -> Beside | None:
    """Compare three coordinators of 24 artificial jobs on two feeds with one; None if that keeps no limit.

    `spread`: the part of the jobs that are on both feeds; `cuts`: by limited feed.
    """
    random = np.random.default_rng(seed)
    jobs = [_artificial(f"job-{number}", spread, random) for number in range(24)]
    stock_w = {feed: sum(job.points[0].power_w.get(feed, 0.0) for job in jobs) for feed in ("a", "b")}
    limits_w = {feed: (1 - less) * stock_w[feed] for feed, less in cuts.items()}
    slots = [jobs[slot::SLOT_COUNT] for slot in range(SLOT_COUNT)]
    curves = []
    for own in slots:
        machine = FleetMachine({feed: Feed(feed, limit_w=limit_w) for feed, limit_w in limits_w.items()})
        machine.handle_all([*(JobChanged(job, 1.0) for job in own), Tick()], 0.0)
        curves.append(machine.published(0, 0.0).curves)
    shares = {feed: divided([own[feed] for own in curves], limit_w) for feed, limit_w in limits_w.items()}
    drawn = {
        feed: [sum(job.points[0].power_w.get(feed, 0.0) for job in own) / stock_w[feed] for own in slots]
        for feed in limits_w
    }
    percent = 100 / sum(job.weight for job in jobs)
    whole = allocate(jobs, limits_w)
    if not whole.is_compliant:
        return None

    def more(some: Mapping[str, Sequence[float]]) -> float | None:
        parts = [
            allocate(own, {feed: some[feed][slot] * limits_w[feed] for feed in limits_w})
            for slot, own in enumerate(slots)
        ]
        if not all(part.is_compliant for part in parts):
            return None
        return percent * (sum(part.weighted_loss for part in parts) - whole.weighted_loss)

    return Beside(percent * whole.weighted_loss, more(shares), more(drawn))


def _artificial(job_id: str, spread: float, random: np.random.Generator) -> JobDemand:
    speeds = np.arange(1.0, 0.599, -0.01)
    watts, exponent = random.uniform(500, 3000), random.uniform(1.5, 3.0)
    part = random.uniform(0.1, 0.9) if random.random() < spread else float(random.integers(2))
    parts = {feed: share for feed, share in (("a", part), ("b", 1 - part)) if share}
    points = tuple(
        PowerPoint(1 / s, s, {feed: share * watts * s**exponent for feed, share in parts.items()})
        for s in speeds.tolist()
    )
    tolerance_percent, weight = random.choice([5.0, 10.0, 20.0, 40.0]), random.choice([0.5, 1.0, 2.0, 3.0])
    return JobDemand(job_id, points, tolerance_percent=float(tolerance_percent), weight=float(weight))


def _two_feeds() -> Table:
    rows: list[tuple[Cell, ...]] = []
    for spread in (0.0, 0.3, 1.0):
        for cuts in ({"a": 0.2, "b": 0.2}, {"a": 0.1, "b": 0.25}, {"a": 0.2}):
            found = [each for seed in range(40) if (each := beside_whole(spread, cuts, seed)) is not None]
            less = " / ".join(f"{100 * cuts[feed]:.0f}" if feed in cuts else "–" for feed in ("a", "b"))
            cells: list[Cell] = [
                round(100 * spread),
                less,
                len(found),
                sum(x.whole for x in found) / len(found),
            ]
            for kept in ([x.more for x in found], [x.more_drawn for x in found]):
                more = [each for each in kept if each is not None]
                cells += [sum(more) / len(more), max(more), len(kept) - len(more)]
            rows.append(tuple(cells))
    return Table(
        "24 artificial jobs on two feeds: weighted speed lost, %",
        (
            Column("jobs on both feeds, %", "d"),
            Column("less power, %"),
            Column("mixes", "d"),
            Column("one coordinator", ".2f"),
            Column("three: more, points", ".2f"),
            Column("at most", ".2f"),
            Column("limits not kept", "d"),
            Column("by drawn power: more, points", ".2f"),
            Column("at most", ".2f"),
            Column("limits not kept", "d"),
        ),
        tuple(rows),
        "Random mixes whose limits one coordinator keeps, without margins and measurements. By drawn power: "
        "each of the three coordinators has the part of the limit that its jobs draw of the feed at stock.",
    )


def _random_budgets() -> Table:
    rows: list[tuple[Cell, ...]] = []
    numbers = {job.job_id: number for number, job in enumerate(MIX)}
    for run_number in range(_RANDOM_RUNS):
        fleet = budgets.random_fleet(run_number)
        for who, machine in (
            ("one coordinator", None),
            ("three", SlottedFleet(fleet.feeds, SLOT_COUNT, lambda job_id: numbers[job_id] % SLOT_COUNT)),
        ):
            done = replay(fleet, machine=machine)
            found = budgets.judge(fleet, done)
            lost = sum(
                job.weight * (1 - float(np.average(done.speeds[job.job_id], weights=done.durations_s)))
                for job in MIX
            )
            rows.append(
                (
                    run_number,
                    who,
                    found.windows,
                    found.above,
                    100 * found.worst,
                    found.infeasible,
                    found.reported,
                    100 * lost / sum(job.weight for job in MIX),
                    found.changes / 8 / len(MIX),
                    None if machine is None else machine.division.version / 8,
                )
            )
    return Table(
        "Twenty random budgets in eight hours, six jobs, by one coordinator and by three",
        (
            Column("run", "d"),
            Column("coordinators"),
            Column("means of a window", "d"),
            Column("above a feasible limit", "d"),
            Column("worst, % of the limit", ".2f"),
            Column("infeasible limits", "d"),
            Column("reported", "d"),
            Column("weighted speed lost, %", ".3f"),
            Column("plan changes, per job and hour", ".1f"),
            Column("divisions, per hour", ".1f"),
        ),
        tuple(rows),
        "The first runs of `budgets`, whose windows these are; speed is relative to stock.",
    )


RUNS = (
    ("one coordinator", 1, ()),
    ("three", SLOT_COUNT, ()),
    ("three, slot 0's killed", SLOT_COUNT, (Kill(0, _KILL_S),)),
    ("three, slot 1's killed", SLOT_COUNT, (Kill(1, _KILL_S),)),
)


def run() -> Sequence[Table]:
    rows: list[tuple[Cell, ...]] = []
    for name, jobs in (("6", MIX), ("24", many(4))):
        for who, slot_count, kills in RUNS:
            found = cut(jobs, slot_count=slot_count, kills=kills)
            rows.append(
                (
                    name,
                    who,
                    found.worst_10s,
                    found.worst_60s,
                    found.drawn,
                    found.lost,
                    found.changes,
                    found.division_count,
                    found.largest_sum,
                )
            )
    return [
        _two_feeds(),
        _random_budgets(),
        Table(
            f"{100 * CUT:.0f} % less power for an hour, by one coordinator and by three",
            (
                Column("jobs"),
                Column("coordinators"),
                Column("worst 10 s, % of the limit", ".2f"),
                Column("worst minute, %", ".2f"),
                Column("drawn, %", ".2f"),
                Column("weighted speed lost, %", ".3f"),
                Column("plan changes, per job and hour", ".1f"),
                Column("divisions", "d"),
                Column("largest sum of shares", ".4f"),
            ),
            tuple(rows),
            "Means from 5 s after the budget's start. A killed coordinator's slot is served again after "
            f"{LEASE_S + TAKEOVER_S:.0f} s. GPUs are simulated: no power was measured.",
        ),
    ]


if __name__ == "__main__":
    main("slots", run)
