"""The fleet under its budgets: inputs in with the time, commands out. Pure.

Every second while anything is limited, each feed's ceiling moves by its ramps, what was measured corrects the
target, and jobs are given paces so that what they will draw keeps it:

- *Down* at once: where the paces in force would draw more than a target. A cut that only measurement asks for
  waits until the one before has settled.
- *Up* with hysteresis: only when that has been worth it for as long as a window lasts, or while a ceiling
  rises after a budget. So noise does not move plans to and fro.

A change inside of it (a straggler, another frontier, a job that comes or goes) is answered as a budget is.

What is under no plan has a ceiling clock: a job with a pace that of the pace's plans, for whatever leaves
them; one without plans as `feed_watch` says.

What is expected on each feed is added up in one pass over the jobs, however many feeds there are.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from perseus.service.domain.power import Budget, Feed, FeedStatus
from perseus.service.fleet.power.allocation import Allocation, allocate
from perseus.service.fleet.power.budgets import limit_w, next_change_s, ramp_down_w_per_s
from perseus.service.fleet.power.demand import JobDemand, PowerPoint
from perseus.service.fleet.power.feed_watch import MIN_WINDOW_S, SETTLING_TIME_S, WINDOW_ITERATIONS, FeedWatch
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
from perseus.service.fleet.power.meter import JobMeter

PERIOD_S = 1.0
"""Between two looks while anything is limited."""

_MIN_GAIN = 0.002
"""Of the weights of all: a gain in speed that is worth a change of plans."""

_MIN_HEADROOM = 0.002
"""Of a target: less room than that is none."""


class _Job:
    """A job, what it draws, and the point that it was told to run at; None if its own policy counts."""

    def __init__(self, demand: JobDemand, iteration_time_s: float) -> None:
        self._offer(demand)
        self.iteration_time_s = iteration_time_s
        self.meter = JobMeter()
        self.target_point: PowerPoint | None = None
        self.free_w: Mapping[str, float] = {}
        """Without plans: what it drew when nothing held it down."""
        self.held_mhz: int | None = None
        """The ceiling that it has been under since before the fleet knew of it. What it would draw without is
        not known: at least in proportion to the clock."""

    def _offer(self, demand: JobDemand) -> None:
        self.demand = demand
        allowed = demand.allowed
        self._min_w = (
            {feed: min(point.power_w[feed] for point in allowed) for feed in allowed[0].power_w}
            if allowed
            else {}
        )

    @property
    def point(self) -> PowerPoint | None:
        """Where it runs, if it is planned."""
        return self.target_point or next(iter(self.demand.points), None)

    def corrected(self) -> JobDemand:
        """Return its demand with powers as they are measured."""
        if not self.demand.points:
            return replace(self.demand, measured_w=self.drawn_w())
        ratio = self.meter.ratio
        points = tuple(
            replace(point, power_w={feed: ratio * power_w for feed, power_w in point.power_w.items()})
            for point in self.demand.points
        )
        return replace(self.demand, points=points)

    def drawn_w(self) -> Mapping[str, float]:
        """Return what it is expected to draw where it runs now."""
        if self.point is None:
            recent_w = self.meter.recent_w()
            if self.free_w and not self.meter.is_recent_known:
                return self.free_w
            return recent_w or self.demand.measured_w
        return {feed: self.meter.ratio * power_w for feed, power_w in self.point.power_w.items()}

    def update_free_power(self, *, is_held: bool) -> None:
        """Take note of what it draws without plans, and would draw if it were not held down."""
        drawn_w = self.drawn_w()
        if self.held_mhz is None and not is_held:
            self.free_w = drawn_w
        elif self.meter.is_recent_known or not self.free_w:
            # It may have come under its ceiling, or draw more than it did.
            share = min(1.0, self.held_mhz / self.demand.highest_clock_mhz) if self.held_mhz else 1.0
            self.free_w = {feed: max(w / share, self.free_w.get(feed, 0.0)) for feed, w in drawn_w.items()}

    def min_w(self) -> Mapping[str, float]:
        """Return the least that its owner lets it draw on each feed, under a plan."""
        return {feed: self.meter.ratio * power_w for feed, power_w in self._min_w.items()}

    def max_w(self, drawn_w: Mapping[str, float]) -> Mapping[str, float]:
        """Return what it would draw on each feed if nothing limited it; `drawn_w`: what it is expected to."""
        if self.target_point is None:
            return drawn_w
        return {feed: self.meter.ratio * power_w for feed, power_w in self.demand.points[0].power_w.items()}

    def take(self, changed: JobChanged) -> None:
        """Take what it can offer now; it goes on at the pace that it was told, or the next slower one."""
        before = self.demand
        self._offer(changed.demand)
        self.iteration_time_s = changed.iteration_time_s
        if changed.demand.points:
            self.free_w, self.held_mhz = {}, None
        elif before.points:
            # No pace holds it back any more, so it draws what its fastest plan did until more is known.
            fastest = before.points[0]
            self.free_w = {feed: self.meter.ratio * power_w for feed, power_w in fastest.power_w.items()}
            self.meter.forget_recent()
        if self.target_point is not None:
            target_s = self.target_point.iteration_time_s
            points = self.demand.points
            slower = (point for point in points if point.iteration_time_s >= target_s * (1 - 1e-9))
            self.target_point = next(slower, points[-1] if points else None)


class FleetMachine:
    """Keeps the limits of some feeds. A feed that nobody has configured has no ramps and no reference.

    Attributes:
        statuses: how each feed stood when the last input had been taken; none before the first.
    """

    def __init__(self, feeds: Mapping[str, Feed]) -> None:
        self._watches = {name: FeedWatch(feed) for name, feed in feeds.items()}
        self._budgets: dict[str, Budget] = {}
        self._jobs: dict[str, _Job] = {}
        self._allocation: Allocation | None = None
        self.statuses: Mapping[str, FeedStatus] = {}
        self._cut_s = self._ticked_s = -math.inf
        self._worth_since_s: float | None = None
        self._conflicting_counts: Mapping[str, int] = {}
        self._handlers: dict[type, Callable[..., None]] = {
            BudgetSet: self._on_budget_set,
            BudgetCancelled: self._on_budget_cancelled,
            JobChanged: self._on_job_changed,
            JobLeft: self._on_job_left,
            PowerMeasured: self._on_power_measured,
            Tick: self._on_tick,
        }

    def handle(self, event: Input, now_s: float) -> list[Command]:
        """Take what has happened; return what is to be done."""
        return self.handle_all((event,), now_s)

    def handle_all(self, events: Iterable[Input], now_s: float) -> list[Command]:
        """Take all that has happened; return what is to be done.

        Each costs what it changes. What is decided over all jobs is decided once, however many have changed.
        """
        kinds = set()
        for event in events:
            self._handlers[type(event)](event, now_s)
            kinds.add(type(event))
        for budget_id in [b.budget_id for b in self._budgets.values() if b.is_over(now_s)]:
            del self._budgets[budget_id]
        self._add_up()
        for name, watch in self._watches.items():
            watch.move(self._on(name), now_s)
        # Measurements wait for the next second: there may be many, and one look is enough for all.
        is_measured_only = kinds <= {PowerMeasured}
        commands = [] if is_measured_only else self._steer(now_s, is_new=not kinds <= {PowerMeasured, Tick})
        if commands:
            self._add_up()
        return commands + self._judge(now_s)

    def wake_s(self, now_s: float) -> float:
        """Return when a `Tick` is due at the latest; infinite if nothing is to come."""
        if any(watch.power_cap_w < math.inf for watch in self._watches.values()):
            return now_s + PERIOD_S
        starts_s = [
            budget.start_s - max(0.0, self._watches[budget.feed].expected_w - budget.limit_w) / ramp_w_per_s
            for budget in self._budgets.values()
            for ramp_w_per_s in [ramp_down_w_per_s(budget, self._watches[budget.feed].feed)]
        ]
        return max(now_s, min([*starts_s, next_change_s(self._budgets.values(), now_s)], default=math.inf))

    def validate_state(self) -> None:
        """Check what always holds; tests call it after every input."""
        for budget in self._budgets.values():
            assert budget.feed in self._watches
        for job in self._jobs.values():
            assert job.target_point is None or job.target_point in job.demand.points
            if job.target_point is not None and not job.demand.is_beyond_tolerance:
                assert job.target_point in job.demand.allowed

    # --- Inputs ---------------------------------------------------------------------------------------------

    def _on_budget_set(self, event: BudgetSet, now_s: float) -> None:
        self._budgets[event.budget.budget_id] = event.budget
        self._watches.setdefault(event.budget.feed, FeedWatch(Feed(event.budget.feed)))

    def _on_budget_cancelled(self, event: BudgetCancelled, now_s: float) -> None:
        self._budgets.pop(event.budget_id, None)

    def _on_job_changed(self, event: JobChanged, now_s: float) -> None:
        job = self._jobs.get(event.demand.job_id)
        if job is None:
            job = self._jobs[event.demand.job_id] = _Job(event.demand, event.iteration_time_s)
            if event.demand.highest_clock_mhz and not event.demand.points:
                job.held_mhz = event.max_clock_mhz
        else:
            job.take(event)
            job.meter.changed(now_s, SETTLING_TIME_S + event.iteration_time_s)

    def _on_job_left(self, event: JobLeft, now_s: float) -> None:
        self._jobs.pop(event.job_id, None)

    def _on_power_measured(self, event: PowerMeasured, now_s: float) -> None:
        self._conflicting_counts = event.conflicting_counts
        totals_w: dict[str, float] = dict(event.others_w)
        for job_id, power_w in event.jobs_w.items():
            counted_w = power_w
            if (job := self._jobs.get(job_id)) is not None:
                planned_w = None
                if job.point is not None and job_id not in event.changing:
                    planned_w = sum(job.point.power_w.values())
                elif job.point is not None and job_id in event.outdated:
                    counted_w = job.drawn_w()
                job.meter.take(
                    now_s,
                    event.duration_s,
                    power_w,
                    planned_w=planned_w,
                    iteration_time_s=job.iteration_time_s,
                )
            for feed, drawn_w in counted_w.items():
                totals_w[feed] = totals_w.get(feed, 0.0) + drawn_w
        longest_s = max((job.iteration_time_s for job in self._jobs.values()), default=0.0)
        for name, watch in self._watches.items():
            watch.take(
                now_s,
                event.duration_s,
                totals_w.get(name, 0.0),
                others_w=event.others_w.get(name, 0.0),
                longest_iteration_s=longest_s,
            )

    def _on_tick(self, event: Tick, now_s: float) -> None:
        """Hold down who has no plans; what else time brings is looked at after every input."""
        limited = {name: w for name, w in self._watches.items() if w.power_cap_w < math.inf}
        for name in self._watches.keys() - limited.keys():
            self._watches[name].clock_share = 1.0
        free_w, min_w = dict.fromkeys(limited, 0.0), dict.fromkeys(limited, 0.0)
        for job in self._jobs.values():
            is_planned = bool(job.demand.points)
            if not is_planned:
                if limited.keys().isdisjoint(job.demand.measured_w):
                    job.held_mhz = None
                job.update_free_power(is_held=self._clock_share(job) < 1)
            sums_w = min_w if is_planned else free_w
            for name, power_w in (job.min_w() if is_planned else job.free_w).items():
                if name in limited:
                    sums_w[name] += power_w
        for name, watch in limited.items():
            left_w = watch.power_cap_w - watch.others.mean_w() - min_w[name]
            watch.share_clocks(free_w[name], left_w)

    # --- Decisions ------------------------------------------------------------------------------------------

    def _steer(self, now_s: float, *, is_new: bool) -> list[Command]:
        """Give jobs other paces where that is due; `is_new`: something else than measurements has changed."""
        limited = {name: w for name, w in self._watches.items() if w.power_cap_w < math.inf}
        if not limited:
            self._allocation = None
            return self._set_targets({}, now_s)
        targets_w = {name: watch.target_w for name, watch in limited.items()}
        is_over = any(watch.expected_w > targets_w[name] for name, watch in limited.items())
        is_new |= self._allocation is None
        if not is_new and is_over and now_s < self._cut_s + SETTLING_TIME_S:
            # Measurement asks for it, or a falling ceiling; only that one can't wait.
            is_over = any(watch.expected_w > watch.ramped_w for watch in limited.values())
        if not (is_new or is_over or self._has_headroom(targets_w, now_s)):
            return []
        demands = [job.corrected() for job in self._jobs.values()]
        found = allocate(demands, {n: t - limited[n].others.mean_w() for n, t in targets_w.items()})
        if not (is_new or is_over or self._is_worth_it(found, now_s)):
            return []
        self._worth_since_s = None
        self._allocation = found
        if is_over:
            self._cut_s = now_s
        return self._set_targets(found.operating_points, now_s)

    def _has_headroom(self, targets_w: Mapping[str, float], now_s: float) -> bool:
        """Whether it may be worth while to look for faster paces; every few seconds is often enough."""
        if now_s < self._ticked_s + SETTLING_TIME_S or all(
            job.target_point is None for job in self._jobs.values()
        ):
            return False
        self._ticked_s = now_s
        if any(w - self._watches[name].expected_w > _MIN_HEADROOM * w for name, w in targets_w.items()):
            return True
        self._worth_since_s = None
        return False

    def _is_worth_it(self, found: Allocation, now_s: float) -> bool:
        """Whether running faster has been possible for long enough, and enough faster."""
        total_weight = sum(job.demand.weight for job in self._jobs.values() if job.demand.points)
        loss_now = sum(
            job.demand.weight * (1 - job.point.speed) for job in self._jobs.values() if job.point is not None
        )
        if loss_now - found.weighted_loss <= _MIN_GAIN * total_weight:
            self._worth_since_s = None
            return False
        if self._worth_since_s is None:
            self._worth_since_s = now_s
        is_rising = any(now_s <= watch.rose_s + 2 * SETTLING_TIME_S for watch in self._watches.values())
        longest_s = max(job.iteration_time_s for job in self._jobs.values())
        hold_s = SETTLING_TIME_S if is_rising else max(MIN_WINDOW_S, WINDOW_ITERATIONS * longest_s)
        return now_s >= self._worth_since_s + hold_s

    def _set_targets(self, operating_points: Mapping[str, PowerPoint], now_s: float) -> list[Command]:
        """Give jobs the points of these numbers; those without one go back to their own policies."""
        commands: list[Command] = []
        for job_id, job in self._jobs.items():
            before = job.point
            target_point = None
            if job_id in operating_points:
                target_s = operating_points[job_id].iteration_time_s
                # The first of its points is what its own policy says.
                target_point = next(
                    (p for p in job.demand.points[1:] if p.iteration_time_s == target_s), None
                )
            if target_point is job.target_point:
                continue
            job.target_point = target_point
            after = job.point
            if before is not None and after is not None and before != after:
                job.meter.changed(now_s, SETTLING_TIME_S + job.iteration_time_s)
            is_urgent = before is None or after is None or after.speed < before.speed
            commands.append(
                SetTargetTime(
                    job_id, None if target_point is None else target_point.iteration_time_s, is_urgent
                )
            )
        return commands

    def _judge(self, now_s: float) -> list[Command]:
        """Find how all feeds stand; return the statuses that are to be said."""
        before, self.statuses = self.statuses, {name: self._status(name, now_s) for name in self._watches}
        return [
            status
            for name, status in self.statuses.items()
            if (
                status.limit_w is not None
                if name not in before
                else _summary(status) != _summary(before[name])
            )
        ]

    def _status(self, name: str, now_s: float) -> FeedStatus:
        watch = self._watches[name]
        limit = limit_w(self._on(name), watch.feed, now_s)
        allocation = self._allocation
        is_limited = limit < math.inf
        in_transition = watch.in_transition(now_s)
        can_be_kept = (
            allocation is None or name not in allocation.excess_w or self._is_paying_back(name, limit)
        )
        return FeedStatus(
            feed=name,
            limit_w=limit if is_limited else None,
            in_transition=in_transition,
            is_compliant=not is_limited or (can_be_kept and (in_transition or watch.is_kept())),
            to_pause=() if allocation is None or can_be_kept else allocation.to_pause,
            beyond_tolerance=tuple(
                job_id
                for job_id in (allocation.beyond_tolerance if allocation else ())
                if job_id in watch.job_ids
            ),
            measured_w=watch.measured_w,
            managed_w=watch.managed_w,
            unmanaged_w=watch.unmanaged_w,
            power_cap_w=None if watch.power_cap_w == math.inf else watch.power_cap_w,
            held=tuple(job_id for job_id in watch.job_ids if self.target_time_s(job_id)),
            judged_w=watch.judged_w,
            conflicting_gpu_count=self._conflicting_counts.get(name, 0),
        )

    def target_time_s(self, job_id: str) -> float | None:
        """Return the iteration time that a job was told last; None if its own policy counts."""
        job = self._jobs.get(job_id)
        return None if job is None or job.target_point is None else job.target_point.iteration_time_s

    def max_clock_mhz(self, job_id: str) -> int | None:
        """Return the highest clock that a job may have under no plan; None if all that it can have."""
        job = self._jobs.get(job_id)
        if job is None:
            return None
        if job.target_point is not None:
            return job.target_point.highest_clock_mhz or None
        share = self._clock_share(job)
        if job.demand.points or share == 1 or not job.demand.highest_clock_mhz:
            return job.held_mhz
        own_mhz = max(1, int(share * job.demand.highest_clock_mhz))
        return own_mhz if job.held_mhz is None else min(own_mhz, job.held_mhz)

    def is_limited(self, name: str) -> bool:
        """Return whether anything limits a feed now."""
        return self.power_cap_w(name) < math.inf

    def power_cap_w(self, name: str) -> float:
        """Return what may be drawn on a feed now; infinite where nothing limits it."""
        watch = self._watches.get(name)
        return math.inf if watch is None else watch.power_cap_w

    # --- What is drawn --------------------------------------------------------------------------------------

    def _add_up(self) -> None:
        """Add up what is expected on all feeds; what is drawn on others that nobody knows counts nowhere."""
        for watch in self._watches.values():
            watch.begin_sums()
        for job_id, job in self._jobs.items():
            drawn_w = job.drawn_w()
            max_w = job.max_w(drawn_w)
            for name, power_w in drawn_w.items():
                if (known := self._watches.get(name)) is not None:
                    known.add(job_id, power_w, max_w[name], is_planned=job.point is not None)

    def _is_paying_back(self, name: str, limit: float) -> bool:
        """Whether only the target, which lies below the limit, can't be kept."""
        assert self._allocation is not None
        return self._allocation.power_w[name] + self._watches[name].others.mean_w() <= limit

    def _on(self, name: str) -> list[Budget]:
        return [budget for budget in self._budgets.values() if budget.feed == name]

    def _clock_share(self, job: _Job) -> float:
        """Return the share of its highest clock that a job without plans may have on its feeds; 1 if all."""
        feeds = self._watches.keys() & job.demand.measured_w
        return min((self._watches[name].clock_share for name in feeds), default=1.0)


def _summary(status: FeedStatus) -> tuple[object, ...]:
    return (
        status.limit_w,
        status.in_transition,
        status.is_compliant,
        status.to_pause,
        status.beyond_tolerance,
        status.conflicting_gpu_count > 0,
    )
