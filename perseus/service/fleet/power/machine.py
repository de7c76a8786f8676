"""The state machine of the fleet under its budgets: it takes inputs with the time and returns commands. Pure.

Every second while anything is limited, each feed's power cap moves along its ramps, measurements correct the
feed's target, and jobs get target iteration times whose expected power keeps it:

- *Down* at once, if the expected power exceeds a target. A cut that only measurement asks for waits until the
  previous one has settled.
- *Up* with hysteresis: only once it has been worthwhile for a whole window, or while a power cap rises after
  a budget. So noise does not move plans to and fro.

Changes within the fleet (a straggler, another frontier, a job that comes or goes) are handled like a budget.

GPUs under no plan have a maximum clock. In a job with a target, it is the highest clock of the target's
plans, for GPUs that leave them; in a job without plans, `feed_watch` sets it.

One pass over the jobs adds up the expected power on all feeds, however many there are.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from perseus.service.domain.power import Budget, Feed, FeedStatus
from perseus.service.domain.slot_power import SlotPower
from perseus.service.fleet.power import budgets
from perseus.service.fleet.power.allocation import Allocation, allocate
from perseus.service.fleet.power.budgets import next_change_s, ramp_down_w_per_s
from perseus.service.fleet.power.demand import JobDemand, PowerPoint
from perseus.service.fleet.power.division import UNPLANNED_ROOM, Hull, added_up, whole_status
from perseus.service.fleet.power.feed_watch import MIN_WINDOW_S, SETTLING_TIME_S, WINDOW_ITERATIONS, FeedWatch
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
from perseus.service.fleet.power.meter import JobMeter

PERIOD_S = 1.0
"""Time between two ticks while anything is limited."""

_MIN_GAIN = 0.001
"""The gain in speed that is worth a change of plans, as a share of the sum of weights."""

_MIN_HEADROOM = 0.001
"""Headroom below this share of a target is ignored."""


class _Job:
    """A job, its power, and its target point; None if its own policy applies."""

    def __init__(self, demand: JobDemand, iteration_time_s: float) -> None:
        self._offer(demand)
        self.iteration_time_s = iteration_time_s
        self.meter = JobMeter()
        self.target_point: PowerPoint | None = None
        self.free_w: Mapping[str, float] = {}
        """Without plans: its power when no maximum clock limited it."""
        self.held_mhz: int | None = None
        """The maximum clock that it has had since before the fleet knew of it. Its power without that is
        unknown: at least in proportion to the clock."""

    def _offer(self, demand: JobDemand) -> None:
        self.demand = demand
        self._hulls: dict[str, Hull] = {}
        allowed = demand.allowed
        self._min_w = (
            {feed: min(point.power_w[feed] for point in allowed) for feed in allowed[0].power_w}
            if allowed
            else {}
        )

    @property
    def point(self) -> PowerPoint | None:
        """The point at which it runs, if it has plans."""
        return self.target_point or next(iter(self.demand.points), None)

    def corrected(self) -> JobDemand:
        """Return its demand with powers corrected by measurements."""
        if not self.demand.points:
            return replace(self.demand, measured_w=self.drawn_w())
        ratio = self.meter.ratio
        points = tuple(
            replace(point, power_w={feed: ratio * power_w for feed, power_w in point.power_w.items()})
            for point in self.demand.points
        )
        return replace(self.demand, points=points)

    def drawn_w(self) -> Mapping[str, float]:
        """Return its expected power at its present point, by feed."""
        if self.point is None:
            recent_w = self.meter.recent_w()
            if self.free_w and not self.meter.is_recent_known:
                return self.free_w
            return recent_w or self.demand.measured_w
        return {feed: self.meter.ratio * power_w for feed, power_w in self.point.power_w.items()}

    def update_free_power(self, *, is_held: bool) -> None:
        """Update its power without plans and without a maximum clock."""
        drawn_w = self.drawn_w()
        if self.held_mhz is None and not is_held:
            self.free_w = drawn_w
        elif self.meter.is_recent_known or not self.free_w:
            # It may run below its maximum clock by now, or draw more than before.
            share = min(1.0, self.held_mhz / self.demand.highest_clock_mhz) if self.held_mhz else 1.0
            self.free_w = {feed: max(w / share, self.free_w.get(feed, 0.0)) for feed, w in drawn_w.items()}

    def min_w(self) -> Mapping[str, float]:
        """Return its least power on each feed, under a plan that its owner allows."""
        return {feed: self.meter.ratio * power_w for feed, power_w in self._min_w.items()}

    def max_w(self, drawn_w: Mapping[str, float]) -> Mapping[str, float]:
        """Return its power on each feed without any limit; `drawn_w`: its expected power."""
        if self.target_point is None:
            return drawn_w
        return {feed: self.meter.ratio * power_w for feed, power_w in self.demand.points[0].power_w.items()}

    def hull(self, feed: str) -> Hull:
        """Return its hull of weighted loss over planned power on a feed."""
        if feed not in self._hulls:
            self._hulls[feed] = Hull.of(self.demand, feed)
        return self._hulls[feed]

    def take(self, changed: JobChanged) -> None:
        """Update its demand; it keeps its target, or takes the next slower point."""
        before = self.demand
        self._offer(changed.demand)
        self.iteration_time_s = changed.iteration_time_s
        if changed.demand.points:
            self.free_w, self.held_mhz = {}, None
        elif before.points:
            # No target limits it any more, so assume its fastest plan's power until more is known.
            fastest = before.points[0]
            self.free_w = {feed: self.meter.ratio * power_w for feed, power_w in fastest.power_w.items()}
            self.meter.forget_recent()
        if self.target_point is not None:
            target_s = self.target_point.iteration_time_s
            points = self.demand.points
            slower = (point for point in points if point.iteration_time_s >= target_s * (1 - 1e-9))
            self.target_point = next(slower, points[-1] if points else None)


class FleetMachine:
    """Keeps the limits of some feeds. A feed that is not configured has no ramps and no reference.

    Attributes:
        statuses: the status of each feed after the last input; empty before the first.
    """

    def __init__(
        self, feeds: Mapping[str, Feed], caps_w: Mapping[str, float] | None = None, lift_from_s: float = 0.0
    ) -> None:
        """Begin without jobs and budgets.

        `caps_w`: power caps of whole feeds, which go on from there. None of these is lifted before a time, by
        when all jobs are known.
        """
        self._watches = {
            name: FeedWatch(feed, (caps_w or {}).get(name, math.inf), lift_from_s)
            for name, feed in feeds.items()
        }
        self._budgets: dict[str, Budget] = {}
        self._jobs: dict[str, _Job] = {}
        self._allocation: Allocation | None = None
        self.statuses: Mapping[str, FeedStatus] = {}
        self._cut_s = self._ticked_s = -math.inf
        self._worth_since_s: float | None = None
        self._conflicting_counts: Mapping[str, int] = {}
        self._unmeasured_feeds: set[str] = set()
        self._handlers: dict[type, Callable[..., None]] = {
            BudgetSet: self._on_budget_set,
            BudgetCancelled: self._on_budget_cancelled,
            JobChanged: self._on_job_changed,
            JobLeft: self._on_job_left,
            PowerMeasured: self._on_power_measured,
            FeedShared: self._on_feed_shared,
            Tick: self._on_tick,
        }

    def handle(self, event: Input, now_s: float) -> list[Command]:
        """Handle an input; return the resulting commands."""
        return self.handle_all((event,), now_s)

    def handle_all(self, events: Iterable[Input], now_s: float) -> list[Command]:
        """Handle several inputs; return the resulting commands.

        The cost of an input depends only on what it changes. Decisions over all jobs are made once.
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
        # Measurements wait for the next tick: there may be many, and one decision is enough for all.
        is_new = not kinds <= {PowerMeasured, FeedShared, Tick}
        commands = [] if kinds <= {PowerMeasured} else self._steer(now_s, is_new=is_new)
        if commands:
            self._add_up()
        return commands + self._judge(now_s)

    def wake_s(self, now_s: float) -> float:
        """Return when the next `Tick` is due at the latest; infinite if none is."""
        if any(watch.power_cap_w < math.inf for watch in self._watches.values()):
            return now_s + PERIOD_S
        starts_s = [
            budget.start_s - max(0.0, self._watches[budget.feed].expected_w - budget.limit_w) / ramp_w_per_s
            for budget in self._budgets.values()
            for ramp_w_per_s in [ramp_down_w_per_s(budget, self._watches[budget.feed].feed)]
        ]
        return max(now_s, min([*starts_s, next_change_s(self._budgets.values(), now_s)], default=math.inf))

    def validate_state(self) -> None:
        """Check the invariants; tests call it after every input."""
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
        unmeasured = self._jobs.keys() - event.jobs_w.keys()
        self._unmeasured_feeds = {feed for job_id in unmeasured for feed in self._jobs[job_id].drawn_w()}
        totals_w: dict[str, float] = dict(event.others_w)
        all_drawn_w: dict[str, float] = dict(event.others_w)
        unsettled_w = dict.fromkeys(self._watches, (0.0, 0.0))
        for job_id, power_w in event.jobs_w.items():
            counted_w = power_w
            if (job := self._jobs.get(job_id)) is not None:
                planned_w = None
                if job.point is not None and job_id not in event.changing:
                    planned_w = sum(job.point.power_w.values())
                elif job.point is not None and job_id in event.outdated:
                    counted_w = job.drawn_w()
                begin_s = now_s - event.duration_s
                if job.point is not None and (planned_w is None or not job.meter.predicts(begin_s)):
                    for feed in job.point.power_w.keys() & unsettled_w.keys():
                        counted, expected = unsettled_w[feed]
                        expected += job.meter.ratio * job.point.power_w[feed]
                        unsettled_w[feed] = counted + counted_w.get(feed, 0.0), expected
                job.meter.take(
                    now_s,
                    event.duration_s,
                    power_w,
                    planned_w=planned_w,
                    iteration_time_s=job.iteration_time_s,
                )
            for feed, drawn_w in counted_w.items():
                totals_w[feed] = totals_w.get(feed, 0.0) + drawn_w
            for feed, drawn_w in power_w.items():
                all_drawn_w[feed] = all_drawn_w.get(feed, 0.0) + drawn_w
        longest_s = max((job.iteration_time_s for job in self._jobs.values()), default=0.0)
        for name, watch in self._watches.items():
            watch.take(
                now_s,
                event.duration_s,
                totals_w.get(name, 0.0),
                drawn_w=all_drawn_w.get(name, 0.0),
                others_w=event.others_w.get(name, 0.0),
                longest_iteration_s=longest_s,
                unsettled_w=unsettled_w[name],
            )

    def _on_feed_shared(self, event: FeedShared, now_s: float) -> None:
        if (watch := self._watches.get(event.feed)) is not None:
            watch.shared = event

    def _on_tick(self, event: Tick, now_s: float) -> None:
        """Set the clock shares of jobs without plans; everything else is decided after every input."""
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
        """Set new targets if they are due; `is_new`: something other than measurements has changed."""
        limited = {name: w for name, w in self._watches.items() if w.power_cap_w < math.inf}
        if not limited:
            self._allocation = None
            return self._set_targets({}, now_s)
        targets_w = {name: watch.target_w for name, watch in limited.items()}
        is_over = any(watch.expected_w > watch.tolerated_w for watch in limited.values())
        is_new |= self._allocation is None
        if not is_new and is_over and now_s < self._cut_s + SETTLING_TIME_S:
            # Either measurement or a falling power cap asks for the cut; only the latter can't wait.
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
        """Return whether to look for faster targets; every few seconds is often enough."""
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
        """Return whether running faster has been possible for long enough, and gains enough."""
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
        """Set jobs' targets to these points; jobs without one go back to their own policies."""
        commands: list[Command] = []
        for job_id, job in self._jobs.items():
            before = job.point
            target_point = None
            if job_id in operating_points:
                target_s = operating_points[job_id].iteration_time_s
                # Its first point is that of its own policy.
                target_point = next(
                    (p for p in job.demand.points[1:] if p.iteration_time_s == target_s), None
                )
            if target_point is job.target_point:
                continue
            job.target_point = target_point
            after = job.point
            if before is not None and after is not None and before != after:
                before_w, after_w = (sum(point.power_w.values()) for point in (before, after))
                change = abs(after_w - before_w) / max(before_w, after_w) if before_w else 1.0
                job.meter.changed(now_s, SETTLING_TIME_S + job.iteration_time_s, change)
            is_urgent = before is None or after is None or after.speed < before.speed
            commands.append(
                SetTargetTime(
                    job_id, None if target_point is None else target_point.iteration_time_s, is_urgent
                )
            )
        return commands

    def _judge(self, now_s: float) -> list[Command]:
        """Update the statuses of all feeds; return those to publish."""
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
        limit = watch.limit_w(self._on(name), now_s)
        allocation = self._allocation
        is_limited = limit < math.inf
        in_transition = watch.in_transition(now_s)
        # A measurement counts more than a prediction, which is made once and knows no maximum clocks.
        can_be_kept = (
            allocation is None
            or name not in allocation.excess_w
            or self._is_paying_back(name, limit)
            or (name not in self._unmeasured_feeds and watch.is_measured_within(limit))
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
            judged_mean_w=watch.judged_mean_w,
            judged_s=watch.judged_s,
            is_above_power_cap=watch.is_above_power_cap(now_s),
            conflicting_gpu_count=self._conflicting_counts.get(name, 0),
        )

    def target_time_s(self, job_id: str) -> float | None:
        """Return a job's target iteration time; None if its own policy applies."""
        job = self._jobs.get(job_id)
        return None if job is None or job.target_point is None else job.target_point.iteration_time_s

    def max_clock_mhz(self, job_id: str) -> int | None:
        """Return a job's maximum clock under no plan; None for no maximum."""
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
        """Return a feed's present power cap; infinite without a limit."""
        watch = self._watches.get(name)
        return math.inf if watch is None else watch.power_cap_w

    @property
    def caps_w(self) -> Mapping[str, float]:
        """The present power caps of whole feeds that have one."""
        return {
            name: watch.feed_cap_w for name, watch in self._watches.items() if watch.feed_cap_w < math.inf
        }

    # --- Feeds that are divided over slots ------------------------------------------------------------------

    def to_divide_w(self, now_s: float) -> dict[str, float]:
        """Return the power of each feed that is to be divided."""
        found = {name: watch.to_divide_w(self._on(name), now_s) for name, watch in self._watches.items()}
        return {name: power_w for name, power_w in found.items() if power_w < math.inf}

    def published(self, kept_version: int, now_s: float) -> SlotPower:
        """Return what a divider needs to know of these jobs, who keep a version of its division."""
        feeds = self.to_divide_w(now_s)
        hulls: dict[str, list[tuple[Hull, float, float]]] = {name: [] for name in feeds}
        fixed_w = {name: self._watches[name].others.mean_w() for name in feeds}
        for job in self._jobs.values():
            if not job.demand.points:
                for name, power_w in (job.free_w or job.drawn_w()).items():
                    if name in fixed_w:
                        fixed_w[name] += UNPLANNED_ROOM * power_w
                continue
            first_w = {name: w for name, w in job.demand.points[0].power_w.items() if name in feeds}
            for name, power_w in first_w.items():
                # A job on several limited feeds: each counts with its part of the loss.
                part = power_w / sum(first_w.values()) if power_w else 0.0
                hulls[name].append((job.hull(name), job.meter.ratio, part))
        return SlotPower(
            kept_version,
            {name: added_up(fixed_w[name], own) for name, own in hulls.items()},
            self.statuses,
            self.caps_w,
        )

    def whole_status(self, parts: Sequence[FeedStatus], now_s: float) -> FeedStatus:
        """Return the status of a whole feed from those of all slots' parts."""
        watch = self._watches[parts[0].feed]
        return whole_status(
            parts, budgets.limit_w(self._on(watch.feed.name), watch.feed, now_s), watch.feed_cap_w
        )

    # --- Power ----------------------------------------------------------------------------------------------

    def _add_up(self) -> None:
        """Add up the expected power on all feeds; power on unknown feeds counts nowhere."""
        for watch in self._watches.values():
            watch.begin_sums()
        for job_id, job in self._jobs.items():
            drawn_w = job.drawn_w()
            max_w = job.max_w(drawn_w)
            for name, power_w in drawn_w.items():
                if (known := self._watches.get(name)) is not None:
                    known.add(job_id, power_w, max_w[name], is_planned=job.point is not None)

    def _is_paying_back(self, name: str, limit: float) -> bool:
        """Return whether only the target, which lies below the limit, can't be kept."""
        assert self._allocation is not None
        return self._allocation.power_w[name] + self._watches[name].others.mean_w() <= limit

    def _on(self, name: str) -> list[Budget]:
        return [budget for budget in self._budgets.values() if budget.feed == name]

    def _clock_share(self, job: _Job) -> float:
        """Return the maximum clock of a job without plans as a share of its highest; 1 for no maximum."""
        feeds = self._watches.keys() & job.demand.measured_w
        return min((self._watches[name].clock_share for name in feeds), default=1.0)


def _summary(status: FeedStatus) -> tuple[object, ...]:
    return (
        status.limit_w,
        status.in_transition,
        status.is_compliant,
        status.is_above_power_cap,
        status.to_pause,
        status.beyond_tolerance,
        status.conflicting_gpu_count > 0,
    )
