"""Power budgets: what clients ask of them, and the one task that keeps them.

Once a second the fleet's machine (`fleet.power.machine`) is told what has changed of jobs and what they draw,
and jobs are told the paces that it wants. A job's pace is compared with the one that it has, so whatever got
lost on the way, in a restart or a quarantine, is put right with the next look. Of jobs that nothing happened
to nothing is asked.

A fault in it is logged, and the fleet begun anew from the budgets that were accepted; jobs keep their paces.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import structlog

from perseus.service.domain.bounds import check_range
from perseus.service.domain.errors import (
    BudgetNotFoundError,
    CoordinatorError,
    FeedNotFoundError,
    InvalidFieldError,
)
from perseus.service.domain.inputs import PaceOrdered
from perseus.service.domain.job_power import CurveBasis, JobPower
from perseus.service.domain.power import (
    MAX_TIME_S,
    Budget,
    BudgetRecord,
    Feed,
    FeedStatus,
    WantedBudget,
    check_budget_id,
    percent_of_reference_w,
)
from perseus.service.domain.retention import Retention
from perseus.service.domain.specification import check_request_id
from perseus.service.fleet.power.curve import StageFeeds, power_points
from perseus.service.fleet.power.demand import JobDemand, PowerPoint
from perseus.service.fleet.power.feeds import Feeds, placement, shares
from perseus.service.fleet.power.machine import PERIOD_S, FleetMachine
from perseus.service.fleet.power.messages import (
    BudgetCancelled,
    BudgetSet,
    Input,
    JobChanged,
    JobLeft,
    PowerMeasured,
    SetPace,
    Tick,
)
from perseus.service.shell.live_runs import LiveRun, LiveRuns
from perseus.service.shell.quotas import Quotas
from perseus.service.shell.writer import Writer
from perseus.service.storage.store import BudgetEntry, JobStore

LEAST_PERIOD_S, MOST_PERIOD_S = 0.5 * PERIOD_S, 10 * PERIOD_S
"""For how long a power is believed to have held: the wall clock may jump."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Known:
    """A job as the fleet knows it."""

    run_number: int
    power: JobPower
    placement: Sequence[Sequence[StageFeeds]]
    shares: Mapping[str, float]
    points: tuple[PowerPoint, ...] = ()

    def drawn_w(self) -> dict[str, float]:
        power_w = self.power.power_w or 0.0
        return {feed: share * power_w for feed, share in self.shares.items()}

    def changed(self, job_id: str) -> JobChanged:
        terms = self.power.terms
        demand = JobDemand(job_id, self.points, self.drawn_w(), terms.tolerance_percent, terms.weight)
        return JobChanged(demand, self.power.iteration_time_s)


class Power:
    """All budgets, the feeds, and how they stand. `clock` is the wall clock."""

    def __init__(
        self,
        store: JobStore,
        writer: Writer,
        live: LiveRuns,
        quotas: Quotas,
        feeds: Feeds,
        retention: Retention,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._writer = writer
        self._live = live
        self._quotas = quotas
        self._feeds = feeds
        self._retention = retention
        self._clock = clock
        self._latest_s = self._looked_s = 0.0
        self._records: dict[str, BudgetRecord] = {}
        self._fleet = FleetMachine(feeds.all())
        self._jobs: dict[str, _Known] = {}
        self._is_urgent: dict[str, bool] = {}
        # Jobs that can't be reckoned with, which the log has told of.
        self._left_out: set[str] = set()
        # What the fleet is to be told with the next look, which is at once if there is any.
        self._inbox: deque[Input] = deque()
        self._has_news = asyncio.Event()
        self._readers: set[asyncio.Event] = set()
        self._end: Exception | None = None

    async def load(self) -> None:
        """Load the budgets that were accepted, and enforce those that are not over."""
        self._records = {record.budget.budget_id: record for record in await self._store.load_budgets()}
        self._begin()

    def _begin(self) -> None:
        """Begin with the budgets alone."""
        self._fleet, self._jobs = FleetMachine(self._feeds.all()), {}
        now_s = self.now_s()
        current = (record.budget for record in self._records.values() if not record.is_over(now_s))
        self._inbox = deque(map(BudgetSet, current))

    # ------------------------------------------------------------------ what clients ask

    async def set_budget(self, wanted: WantedBudget, principal: str) -> BudgetRecord:
        """Set a budget, durably, or replace the one of its identifier; the same request again does nothing.

        Raises:
            InvalidFieldError: it can't be.
            FeedNotFoundError: there is no such feed.
            LimitReachedError: the principal has as many as it may.
        """
        check_budget_id(wanted.budget_id)
        check_request_id(wanted.request_id)
        known = self._records.get(wanted.budget_id)
        if known is not None and known.request_id == wanted.request_id:
            await self._writer.flush()  # it may be on its way to the store
            return known
        now_s = self.now_s()
        start_s = now_s if wanted.start_s is None else wanted.start_s
        _check_times(start_s, wanted.end_s, now_s)
        budget = Budget(
            wanted.budget_id,
            wanted.feed,
            self._limit_w(wanted),
            start_s,
            wanted.end_s,
            wanted.correlation_id,
            wanted.ramp_w_per_s,
        )
        others = (
            record
            for budget_id, record in self._records.items()
            if budget_id != wanted.budget_id and record.principal == principal
        )
        self._quotas.check_budgets(principal, sum(not record.is_over(now_s) for record in others))
        record = BudgetRecord(budget, wanted.request_id, principal, now_s, wanted.percent)
        await self._put(record, BudgetSet(budget))
        return record

    async def cancel_budget(self, budget_id: str) -> BudgetRecord:
        """End a budget, durably; nothing happens if it is over.

        Raises:
            BudgetNotFoundError: there is none.
        """
        record = self._records.get(budget_id)
        if record is None:
            raise BudgetNotFoundError(budget_id=budget_id)
        now_s = self.now_s()
        if record.is_over(now_s):
            await self._writer.flush()
            return record
        record = replace(record, cancel_time_s=now_s)
        await self._put(record, BudgetCancelled(budget_id))
        return record

    def budgets(self, after_budget_id: str, feed: str = "") -> Iterator[BudgetRecord]:
        """Yield the budgets that follow an identifier, in order; those on a feed, if one is named."""
        for budget_id in sorted(self._records):
            record = self._records[budget_id]
            if budget_id > after_budget_id and feed in ("", record.budget.feed):
                yield record

    def feeds(self, name: str = "") -> list[tuple[Feed, FeedStatus]]:
        """Return the feeds, by name, and how they stand; one, if it is named.

        Raises:
            FeedNotFoundError: there is no such feed.
        """
        known, now_s = self._feeds.all(), self.now_s()
        if name:
            self._check_feed(name)
        names = [name] if name else sorted(self._fleet.feeds)
        return [(known.get(each) or Feed(each), self._fleet.status(each, now_s)) for each in names]

    def now_s(self) -> float:
        """Return the time by which budgets begin and end: the wall clock's, which never goes back here."""
        self._latest_s = max(self._latest_s, self._clock())
        return self._latest_s

    async def watch(self, name: str = "") -> AsyncIterator[tuple[Feed, FeedStatus]]:
        """Yield feeds and how they stand, and then each that has changed, at most once a second.

        Raises:
            FeedNotFoundError: there is no such feed.
            DrainingError: the coordinator is about to stop.
        """
        told: dict[str, FeedStatus] = {}
        looked = asyncio.Event()
        self._readers.add(looked)
        try:
            while True:
                looked.clear()
                if self._end is not None:
                    raise self._end
                for feed, status in self.feeds(name):
                    if told.get(feed.name) != status:
                        told[feed.name] = status
                        yield feed, status
                await looked.wait()
        finally:
            self._readers.discard(looked)

    def end(self, error: Exception) -> None:
        """End all who watch."""
        self._end = error
        self._wake_readers()

    def _limit_w(self, wanted: WantedBudget) -> float:
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

    async def _put(self, record: BudgetRecord, event: Input) -> None:
        """Keep a budget; it counts once it is stored."""
        self._records[record.budget.budget_id] = record
        log.info(
            "power budget cancelled" if record.cancel_time_s is not None else "power budget set",
            budget_id=record.budget.budget_id,
            feed=record.budget.feed,
            limit_w=record.budget.limit_w,
            principal=record.principal,
        )
        await self._writer.later([BudgetEntry(record)], [partial(self._note, event)])

    def _note(self, event: Input) -> None:
        self._inbox.append(event)
        self._has_news.set()

    # ------------------------------------------------------------------ keeping them

    async def run(self) -> None:
        """Look once a second, and at once where a budget is set or cancelled, until cancelled."""
        with self._live.changes() as changed:
            changed.update(self._live.job_ids)
            while True:
                self._has_news.clear()
                try:
                    await self._look(changed)
                except Exception as error:
                    log.error("the fleet's machine failed, and begins anew", exc_info=error)
                    self._begin()
                    changed.update(self._live.job_ids)
                    await asyncio.sleep(PERIOD_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD_S):
                        await self._has_news.wait()

    async def _look(self, changed: set[str]) -> None:
        """Tell the fleet what has changed, which empties the set, and the jobs what follows."""
        while self._inbox:
            self._tell(self._inbox.popleft())
        looked_at = list(changed)
        changed.clear()
        for job_id in looked_at:
            await self._follow(job_id)
        drawn_w = {job_id: known.drawn_w() for job_id, known in self._jobs.items()}
        changing = {job_id for job_id, known in self._jobs.items() if known.power.is_changing}
        outdated = {job_id for job_id in changing if self._jobs[job_id].power.is_in_force}
        self._tell(PowerMeasured(self._since_look_s(), drawn_w, {}, changing, outdated))
        self._tell(Tick())
        for job_id in list(self._jobs):
            self._order(job_id)
        self._is_urgent.clear()
        self._forget()
        self._wake_readers()

    def _since_look_s(self) -> float:
        """Return for how long what is known to be drawn has held: about a second."""
        before_s, self._looked_s = self._looked_s, self.now_s()
        return min(MOST_PERIOD_S, max(LEAST_PERIOD_S, self._looked_s - before_s))

    async def _follow(self, job_id: str) -> None:
        """Tell the fleet of a job that something happened to; one whose figures can't be is left out."""
        run = self._live.get(job_id)
        if run is None or run.machine.has_finished or not run.machine.has_live_rank:
            self._leave(job_id)
            return
        try:
            await self._update(job_id, run)
            self._left_out.discard(job_id)
        except Exception as error:
            self._leave(job_id)
            if job_id not in self._left_out:
                self._left_out.add(job_id)
                log.error("a job is left out of power budgets", job_id=job_id, exc_info=error)

    def _leave(self, job_id: str) -> None:
        if self._jobs.pop(job_id, None) is not None:
            self._tell(JobLeft(job_id))

    async def _update(self, job_id: str, run: LiveRun) -> None:
        power = self._live.read(run, lambda machine: machine.power())
        known = self._jobs.get(job_id)
        if power.power_w is None and known is not None:
            power = replace(power, power_w=known.power.power_w)  # it goes on to draw what it drew
        if known is None or (known.run_number, known.power.placement_count) != (
            run.number,
            power.placement_count,
        ):
            placed = self._placed(run)
            known_now = _Known(run.number, power, placed, shares(placed))
            known_now.points = await self._points(power.basis, placed)
        else:
            known_now = replace(known, power=power)
            if _is_new(power.basis, known.power.basis):
                known_now.points = await self._points(power.basis, known.placement)
        changed = known_now.changed(job_id)
        self._jobs[job_id] = known_now
        if known is None or known_now.points is not known.points or power.terms != known.power.terms:
            self._tell(changed)

    def _placed(self, run: LiveRun) -> Sequence[Sequence[StageFeeds]]:
        counts = run.machine.spec.parallelism
        hostnames = self._live.read(run, lambda machine: machine.hostnames())
        return placement(self._feeds, hostnames, counts.stage_count, counts.tensor_count)

    async def _points(
        self, basis: CurveBasis | None, placed: Sequence[Sequence[StageFeeds]]
    ) -> tuple[PowerPoint, ...]:
        """Return the points of a curve: in a thread, as that adds up every plan of the frontier."""
        if basis is None:
            return ()
        return await asyncio.to_thread(
            power_points,
            basis.frontier,
            placed,
            own_time_s=basis.own_time_s,
            slowdowns=basis.slowdowns,
            overhead_s=basis.overhead_s,
        )

    def _tell(self, event: Input) -> None:
        """Let the fleet take an input; its paces are ordered when this look ends."""
        for command in self._fleet.handle(event, self.now_s()):
            match command:
                case SetPace(job_id, _, is_urgent):
                    self._is_urgent[job_id] = is_urgent
                case FeedStatus():
                    log.info(
                        "power feed",
                        feed=command.feed,
                        limit_w=command.limit_w,
                        is_compliant=command.is_compliant,
                        in_transition=command.in_transition,
                        measured_w=round(command.measured_w, 1),
                        to_pause=command.to_pause,
                        beyond_tolerance=command.beyond_tolerance,
                    )

    def _order(self, job_id: str) -> None:
        """Order the pace that the fleet wants of a planned job, if it has another."""
        power, run = self._jobs[job_id].power, self._live.get(job_id)
        pace_s = self._fleet.pace_s(job_id)
        if run is None or power.basis is None or pace_s == power.pace_s:
            return
        is_urgent = self._is_urgent.get(job_id, pace_s is not None)
        with suppress(CoordinatorError):  # it has ended, or is quarantined: the next look finds it so
            self._live.handle(run, PaceOrdered(pace_s, is_urgent))

    def _forget(self) -> None:
        """Forget budgets that ended long ago, as the store does."""
        now_s = self.now_s()
        over_s = {
            budget_id: record.over_time_s
            for budget_id, record in self._records.items()
            if record.over_time_s is not None and record.is_over(now_s)
        }
        for budget_id in self._retention.budgets_due(over_s, now_s):
            del self._records[budget_id]

    def _wake_readers(self) -> None:
        for looked in self._readers:
            looked.set()


def _check_times(start_s: float, end_s: float | None, now_s: float) -> None:
    check_range("start_time", start_s, 0, MAX_TIME_S)
    if end_s is None:
        return
    check_range("end_time", end_s, 0, MAX_TIME_S)
    if end_s <= max(start_s, now_s):
        expected = "a time after start_time, and to come"
        raise InvalidFieldError(field="end_time", expected=expected, found=f"{end_s:.3f}")


def _is_new(basis: CurveBasis | None, before: CurveBasis | None) -> bool:
    return before is not None if basis is None else not basis.is_same(before)
