"""Power budgets: clients' requests about them, and the task that keeps them.

Once a second the fleet's machine (`fleet.power.machine`) gets the changes of jobs and what they draw, in a
thread, as an allocation over many jobs takes long; and jobs (`powered_jobs`) get the target iteration times
and maximum clocks that it commands.

The task idles until a feed is configured, a budget set or feeds are watched; until then, agents are not asked
what their GPUs draw.

Where jobs are spread over slots, this coordinator keeps its share (`power_shares`): it looks every second
whether there is one, reads the budgets that slot 0's coordinator has accepted, and shows its own part.

A fault in the machine is logged, and the fleet restarts from the accepted budgets; jobs keep their targets.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

import structlog

from perseus.service.domain.bounds import check_range
from perseus.service.domain.errors import (
    BudgetNotFoundError,
    DatabaseUnreadableError,
    FeedNotFoundError,
    InvalidFieldError,
)
from perseus.service.domain.job_power import NO_POWER
from perseus.service.domain.members import ALONE, Fleet
from perseus.service.domain.power import (
    DEFAULT_FEED,
    MAX_TIME_S,
    Budget,
    BudgetRecord,
    BudgetRequest,
    Feed,
    FeedStatus,
    UnreadableBudget,
    check_budget_id,
    percent_of_reference_w,
)
from perseus.service.domain.principals import Principal
from perseus.service.domain.retention import Retention
from perseus.service.domain.slot_power import Division, SlotPower
from perseus.service.domain.specification import check_request_id
from perseus.service.fleet.power.feeds import Feeds
from perseus.service.fleet.power.machine import PERIOD_S, FleetMachine
from perseus.service.fleet.power.messages import (
    BudgetCancelled,
    BudgetSet,
    Input,
    SetTargetTime,
    Tick,
)
from perseus.service.job import views
from perseus.service.shell.agents import Agents
from perseus.service.shell.live_runs import LiveRuns
from perseus.service.shell.power_shares import PowerShares
from perseus.service.shell.powered_jobs import PoweredJobs
from perseus.service.shell.quotas import Quotas
from perseus.service.shell.writer import Writer
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import BudgetEntry, SlotPowerEntry

STEP_BACK_S = 1.0
"""A wall clock steps back by less than this in normal use; time then stands still until it catches up."""

MIN_PERIOD_S, MAX_PERIOD_S = 0.5 * PERIOD_S, 10 * PERIOD_S
"""Bounds on how long a measured power is taken to have held: the wall clock may jump."""

log = structlog.get_logger(__name__)


class Power:
    """All budgets, and the feeds with their statuses. `clock` is the wall clock."""

    def __init__(
        self,
        store: SqlStore,
        writer: Writer,
        live: LiveRuns,
        agents: Agents,
        quotas: Quotas,
        feeds: Feeds,
        retention: Retention,
        of_fleet: Fleet = ALONE,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._writer = writer
        self._live = live
        self._agents = agents
        self._quotas = quotas
        self._feeds = feeds
        self._retention = retention
        self._of_fleet = of_fleet
        self._clock = clock
        is_shared = len(of_fleet.slots) > 1 and of_fleet.served is not None
        self._power_shares = PowerShares(store, writer, of_fleet.served or 0) if is_shared else None
        self._latest_s = self._ticked_s = 0.0
        # No feed is configured, no budget known, and feeds were never watched.
        self._is_idle = True
        # The fleet knows no job yet.
        self._is_beginning = True
        self._records: dict[str, BudgetRecord] = {}
        # The power caps of feeds as they are stored.
        self._kept_caps_w: Mapping[str, float] = {}
        self._fleet = FleetMachine(feeds.all())
        self._jobs = PoweredJobs(live, feeds)
        # Of our shares, and of whole feeds where this coordinator divides them.
        self._statuses: Mapping[str, FeedStatus] = {}
        self._whole_statuses: Mapping[str, FeedStatus] = {}
        self._is_urgent: dict[str, bool] = {}
        # Inputs for the fleet at the next tick; any input starts that tick at once.
        self._inbox: list[Input] = []
        self._has_news = asyncio.Event()
        # Set when the present tick ends.
        self._tick_ended = asyncio.Event()
        self._end: Exception | None = None

    async def load(self) -> None:
        """Load the budgets that were accepted, and enforce those that are not over."""
        self._records = await self._load_budgets()
        self._kept_caps_w = await self._store.load_power_caps(self._of_fleet.served or 0)
        self._is_idle = not (self._feeds.feeds or self._records)
        self._begin(self._kept_caps_w)
        await self._drain_inbox()

    async def _load_budgets(self) -> dict[str, BudgetRecord]:
        """Return all budgets; of those that others have accepted, only the ones that are not over."""
        not_over_s = None if self._of_fleet.served == 0 else self.now_s()
        return {
            record.budget.budget_id: record
            for found in await self._store.load_budgets(not_over_s)
            for record in ([found] if isinstance(found, BudgetRecord) else self._substitutes(found))
        }

    def _substitutes(self, lost: UnreadableBudget) -> list[BudgetRecord]:
        budgets = lost.in_its_place(self._feeds.all())
        if not budgets[0].is_over(self.now_s()) and budgets[0].budget_id not in self._records:
            log.error(
                "a power budget can't be read: its limit is enforced conservatively until the budget is set "
                "again or cancelled",
                budget_ids=[budget.budget_id for budget in budgets],
                feeds=[budget.feed for budget in budgets],
                limit_w=budgets[0].limit_w,
                reason=lost.problem,
            )
        return [BudgetRecord(budget, request_id="", principal="", set_time_s=0.0) for budget in budgets]

    def _begin(self, caps_w: Mapping[str, float]) -> None:
        """Start from the budgets, and from power caps so far; the next tick adds the jobs."""
        self._fleet = FleetMachine(self._feeds.all(), caps_w, self.now_s() + self._live.rules.lease_s)
        self._jobs = PoweredJobs(self._live, self._feeds)
        self._is_beginning = True
        now_s = self.now_s()
        current = [record.budget for record in self._records.values() if not record.is_over(now_s)]
        self._inbox = [BudgetSet(budget) for budget in current]

    # ------------------------------------------------------------------ clients' requests

    async def set_budget(
        self, wanted: BudgetRequest, principal: Principal
    ) -> tuple[BudgetRecord, BudgetRecord | None]:
        """Set a budget, durably; return it and the one that it replaced, if that was not over.

        A repeated request changes nothing. One that an operator replaces keeps its owner.

        Raises:
            InvalidFieldError: the request is invalid.
            BudgetOwnerMismatchError: the identifier is that of another principal's budget.
            FeedNotFoundError: there is no such feed.
            LimitReachedError: the principal has as many budgets as it may.
            ServedElsewhereError: another coordinator keeps the budgets.
        """
        self._of_fleet.check_slot(0)
        check_budget_id(wanted.budget_id)
        check_request_id(wanted.request_id)
        known = self._records.get(wanted.budget_id)
        if known is not None:
            known.check_owner(principal)
        if known is not None and known.request_id == wanted.request_id:
            await self._writer.flush()  # it may not be stored yet
            return known, None
        now_s = self.now_s()
        start_s = now_s if wanted.start_s is None else wanted.start_s
        _check_times(start_s, wanted.end_s, now_s)
        budget = Budget(
            wanted.budget_id,
            wanted.feed,
            limit_w=self._limit_w(wanted),
            start_s=start_s,
            end_s=wanted.end_s,
            correlation_id=wanted.correlation_id,
            ramp_w_per_s=wanted.ramp_w_per_s,
        )
        owner = principal.name if known is None else known.principal or principal.name
        others = (
            record
            for budget_id, record in self._records.items()
            if budget_id != wanted.budget_id and record.principal == owner
        )
        if principal.name == owner:
            self._quotas.check_budgets(owner, sum(not record.is_over(now_s) for record in others))
        record = BudgetRecord(budget, wanted.request_id, owner, now_s, wanted.percent)
        await self._put(record, BudgetSet(budget), principal)
        return record, None if known is None or known.is_over(now_s) else known

    async def cancel_budget(self, budget_id: str, principal: Principal) -> BudgetRecord:
        """End a budget, durably; do nothing if it is over.

        Raises:
            BudgetNotFoundError: there is no such budget.
            BudgetOwnerMismatchError: it is another principal's.
            ServedElsewhereError: another coordinator keeps the budgets.
        """
        self._of_fleet.check_slot(0)
        record = self._records.get(budget_id)
        if record is None:
            raise BudgetNotFoundError(budget_id=budget_id)
        record.check_owner(principal)
        now_s = self.now_s()
        if record.is_over(now_s):
            await self._writer.flush()
            return record
        record = replace(record, cancel_time_s=now_s)
        await self._put(record, BudgetCancelled(budget_id), principal)
        return record

    def budgets(self, after_budget_id: str, feed: str = "") -> Iterator[BudgetRecord]:
        """Yield the budgets after an identifier, in order; only those on a feed if one is named.

        Raises:
            ServedElsewhereError: another coordinator keeps the budgets.
        """
        self._of_fleet.check_slot(0)
        for budget_id in sorted(self._records):
            record = self._records[budget_id]
            if budget_id > after_budget_id and feed in ("", record.budget.feed):
                yield record

    def feeds(self, name: str = "", *, of_share: bool = False) -> list[tuple[Feed, FeedStatus]]:
        """Return the feeds, by name, with their statuses; only one if it is named.

        `of_share`: of our share, also where this coordinator divides the feeds, and knows all of them.

        Raises:
            FeedNotFoundError: there is no such feed.
        """
        known = self._feeds.all()
        if name:
            self._check_feed(name)
        names = [name] if name else sorted(self._statuses)
        statuses = self._statuses if of_share else {**self._statuses, **self._whole_statuses}
        return [(known.get(each) or Feed(each), self._status(statuses[each])) for each in names]

    def _status(self, status: FeedStatus) -> FeedStatus:
        if not self._is_idle:
            return status
        # Only the power of jobs' latest iterations is known.
        runs = [
            run for run in self._live if run.machine.has_live_rank and not run.machine.record.has_finished
        ]
        powers = [self._live.read(run, views.power, lambda _: NO_POWER) for run in runs]
        measured_w = sum(power.power_w or 0.0 for power in powers)
        managed_w = sum(power.power_w or 0.0 for power in powers if power.basis is not None)
        return replace(status, measured_w=measured_w, managed_w=managed_w, unmanaged_w=measured_w - managed_w)

    def now_s(self) -> float:
        """Return the time that budgets use: the wall clock's. Only `_follow_clock` sets it back."""
        self._latest_s = self._clock() if self._is_idle else max(self._latest_s, self._clock())
        return self._latest_s

    def _follow_clock(self, changed: set[str]) -> None:
        """Restart where the wall clock was set back: it had jumped ahead and ended budgets too early."""
        if (now_s := self._clock()) < self._latest_s - STEP_BACK_S:
            log.warning("the wall clock was set back", by_s=round(self._latest_s - now_s, 1))
            self._latest_s = self._ticked_s = now_s
            self._begin(self._fleet.caps_w)
            changed.update(self._live.job_ids)

    async def watch(self, name: str = "") -> AsyncIterator[tuple[Feed, FeedStatus]]:
        """Yield feeds with their statuses, and then each that has changed, at most once a second.

        Raises:
            FeedNotFoundError: there is no such feed.
            DrainingError: the coordinator is about to stop.
        """
        published: dict[str, FeedStatus] = {}
        if self._is_idle:
            self._has_news.set()
        while self._end is None:
            ticked = self._tick_ended
            for feed, status in self.feeds(name):
                if published.get(feed.name) != status:
                    published[feed.name] = status
                    yield feed, status
            await ticked.wait()
        raise self._end

    def end(self, error: Exception) -> None:
        """End all watches."""
        self._end = error
        self._wake_readers()

    def _limit_w(self, wanted: BudgetRequest) -> float:
        self._check_feed(wanted.feed)
        if (wanted.limit_w is None) == (wanted.percent is None):
            raise InvalidFieldError(field="amount", expected="limit_w or percent", found="neither")
        if wanted.limit_w is not None:
            return wanted.limit_w
        assert wanted.percent is not None
        return percent_of_reference_w(self._feeds.all()[wanted.feed], wanted.percent)

    def _check_feed(self, feed: str) -> None:
        known = self._feeds.all()
        if feed not in known:
            raise FeedNotFoundError(feed=feed, expected=", ".join(sorted(known)))

    async def _put(self, record: BudgetRecord, event: Input, principal: Principal) -> None:
        """Keep a budget; it takes effect once it is stored."""
        self._records[record.budget.budget_id] = record
        log.info(
            "power budget cancelled" if record.cancel_time_s is not None else "power budget set",
            budget_id=record.budget.budget_id,
            feed=record.budget.feed,
            limit_w=record.budget.limit_w,
            principal=principal.name,
            owner=record.principal,
        )
        await self._writer.later([BudgetEntry(record)], [partial(self._note, event)])

    def _note(self, event: Input) -> None:
        self._inbox.append(event)
        self._has_news.set()

    # ------------------------------------------------------------------ keeping them

    async def run(self) -> None:
        """Tick once a second, and at once when a budget is set or cancelled, until cancelled."""
        is_woken = self._is_idle
        if is_woken:
            await self._woken()
            self._is_idle = False
        self._agents.ask_for_power()
        with self._live.changes() as changed:
            changed.update(self._live.job_ids)
            if not is_woken:
                self._begin(self._kept_caps_w)
                self._jobs.begin(self.now_s() + self._live.rules.lease_s)
            while True:
                self._follow_clock(changed)
                try:
                    await self._read_shares()
                    # Budgets first, by themselves: a power cap's ramp begins at the present draw of the known
                    # jobs. While no job is known, they come with the jobs.
                    if not self._is_beginning:
                        await self._drain_inbox()
                    await self._tick(changed)
                except Exception as error:
                    log.error("the fleet's machine failed, and restarts", exc_info=error)
                    self._begin(self._fleet.caps_w)
                    changed.update(self._live.job_ids)
                    await asyncio.sleep(PERIOD_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD_S):
                        await self._has_news.wait()

    async def _tick(self, changed: set[str]) -> None:
        """Give the fleet the changed jobs, emptying the set, and give the jobs the fleet's commands."""
        changed_ids = list(changed)
        changed.clear()
        found = [await self._jobs.follow(job_id) for job_id in changed_ids]
        of_jobs = (event for event in found if event is not None)
        totals = self._agents.totals(self._jobs.job_ids)
        shared = () if self._power_shares is None else self._power_shares.shared(self._feeds.all())
        measured = self._jobs.measured(self._since_tick_s(), totals)
        events = [*shared, *of_jobs, measured]
        if self._is_beginning:
            inbox, self._inbox = self._inbox, []
            await self._apply([*inbox, *events])
            self._is_beginning, events = False, []
        await self._apply([*events, Tick()])
        self._jobs.order(self._fleet, self._is_urgent, self.now_s())
        self._is_urgent.clear()
        if self._power_shares is not None:
            self._whole_statuses = await self._power_shares.publish(self._fleet, self.now_s())
        elif (caps_w := self._fleet.caps_w) != self._kept_caps_w:
            self._kept_caps_w = caps_w
            own = SlotPower(0, {}, {}, caps_w)
            await self._writer.later([SlotPowerEntry(0, self._store.lease_epoch, own, Division())])
        self._forget()
        self._wake_readers()

    async def _woken(self) -> None:
        """Wait for a reason to keep budgets."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if self._power_shares is None else PERIOD_S):
                    await self._has_news.wait()
                    return
            await self._read_shares()
            if self._records or (self._power_shares is not None and self._power_shares.is_begun):
                return

    async def _read_shares(self) -> None:
        """Take up what other coordinators have published, and the budgets that another has accepted.

        While the database can't be read, what is known of them goes on.
        """
        if self._power_shares is None:
            return
        before = self._records
        try:
            await self._power_shares.read()
            if self._of_fleet.served == 0:
                return
            self._records = await self._load_budgets()
        except DatabaseUnreadableError:
            return
        self._inbox += [BudgetCancelled(budget_id) for budget_id in before.keys() - self._records.keys()]
        self._inbox += [
            BudgetSet(record.budget)
            for budget_id, record in self._records.items()
            if record != before.get(budget_id)
        ]

    def _since_tick_s(self) -> float:
        """Return how long the present power readings have held: about a second."""
        before_s, self._ticked_s = self._ticked_s, self.now_s()
        return min(MAX_PERIOD_S, max(MIN_PERIOD_S, self._ticked_s - before_s))

    def shares(self, job_id: str) -> Mapping[str, float]:
        """Return the share of a job's GPUs on each feed; empty where nothing is known."""
        return {DEFAULT_FEED: 1.0} if self._is_idle else self._jobs.shares(job_id)

    async def _drain_inbox(self) -> None:
        self._has_news.clear()
        inbox, self._inbox = self._inbox, []
        await self._apply(inbox)

    async def _apply(self, events: Iterable[Input]) -> None:
        """Give the fleet inputs, if there are any; its targets are ordered when this tick ends."""
        commands = await asyncio.to_thread(self._fleet.handle_all, events, self.now_s())
        self._statuses = self._fleet.statuses
        for command in commands:
            match command:
                case SetTargetTime(job_id, _, is_urgent):
                    self._is_urgent[job_id] = is_urgent
                case FeedStatus():
                    is_exceeded = command.is_above_power_cap or not command.is_compliant
                    write = log.warning if is_exceeded else log.info
                    write(
                        "power feed",
                        feed=command.feed,
                        limit_w=command.limit_w,
                        power_cap_w=command.power_cap_w,
                        is_compliant=command.is_compliant,
                        is_above_power_cap=command.is_above_power_cap,
                        in_transition=command.in_transition,
                        measured_w=round(command.measured_w, 1),
                        to_pause=command.to_pause,
                        beyond_tolerance=command.beyond_tolerance,
                        conflicting_gpu_count=command.conflicting_gpu_count,
                    )

    def _forget(self) -> None:
        """Drop budgets that ended long ago, as the store does."""
        now_s = self.now_s()
        over_s = [
            (record.over_time_s, budget_id)
            for budget_id, record in self._records.items()
            if record.over_time_s is not None and record.is_over(now_s)
        ]
        over_s.sort(key=lambda pair: -pair[0])
        for later_count, (over_time_s, budget_id) in enumerate(over_s):
            if self._retention.is_budget_due(over_time_s, later_count, now_s):
                del self._records[budget_id]

    def _wake_readers(self) -> None:
        self._tick_ended.set()
        self._tick_ended = asyncio.Event()


def _check_times(start_s: float, end_s: float | None, now_s: float) -> None:
    check_range("start_time", start_s, 0, MAX_TIME_S)
    if end_s is None:
        return
    check_range("end_time", end_s, 0, MAX_TIME_S)
    if end_s <= max(start_s, now_s):
        expected = "a time after start_time and in the future"
        raise InvalidFieldError(field="end_time", expected=expected, found=f"{end_s:.3f}")
