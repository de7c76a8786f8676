"""A watcher's updates, step by step, without a coordinator: none comes twice, none is lost without a gap."""

import asyncio
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from perseus.service.domain.errors import DrainingError
from perseus.service.shell.watch_state import (
    PAGE_SIZE,
    QUEUE_BYTES_LIMIT,
    QUEUE_LIMIT,
    SNAPSHOT_INTERVAL_S,
    Deliver,
    DeliverJob,
    End,
    Fetch,
    Step,
    Wait,
    WatchState,
)
from perseus.service.shell.watching import Watcher
from perseus.v1 import job_pb2
from perseus.v1.event_pb2 import JOB_EVENT_TYPE_SOLVE_FAILED, JobEvent, StateChanged
from perseus.v1.job_pb2 import IterationSummary
from perseus.v1.job_service_pb2 import CaughtUp, WatchGap
from tests.service.service_fakes import Cluster, make_spec


def event(sequence: int, message: str = "") -> JobEvent:
    return JobEvent(sequence=sequence, type=JOB_EVENT_TYPE_SOLVE_FAILED, message=message)


def end(sequence: int) -> JobEvent:
    return JobEvent(sequence=sequence, state_changed=StateChanged(after=job_pb2.JOB_STATE_FINISHED))


def marker(last_sequence: int) -> CaughtUp:
    return CaughtUp(last_event_sequence=last_sequence)


def gap(first_sequence: int, last_sequence: int) -> WatchGap:
    return WatchGap(first_missed_sequence=first_sequence, last_missed_sequence=last_sequence)


def iteration(number: int) -> IterationSummary:
    return IterationSummary(iteration=number, iteration_time_s=1.0, energy_j=1.0)


def events(sequences: Iterable[int]) -> list[JobEvent]:
    return [event(sequence) for sequence in sequences]


def caught_up(last_sequence: int = 0) -> WatchState:
    """A reader who has received everything, at time 0."""
    state = WatchState(last_sequence, last_sequence, has_ended=False)
    assert steps(state) == [DeliverJob(), Deliver(marker(last_sequence))]
    state.note_snapshot(last_sequence)
    return state


def steps(state: WatchState, now_s: float = 0.0) -> list[Step]:
    """Return all steps up to one that waits."""
    found: list[Step] = []
    while not isinstance(step := state.next_step(now_s), Wait | End):
        found.append(step)
        if isinstance(step, Fetch):
            break
    return found


def test_stored_events_come_first_then_caught_up_then_news() -> None:
    state = WatchState(0, 3, has_ended=False)
    state.push(event(4))
    assert steps(state) == [DeliverJob(), Fetch(0, PAGE_SIZE)]
    state.take_page(events([1, 2, 3, 4]))
    state.push(event(5))
    reported = [*events([1, 2, 3]), marker(3), *events([4, 5])]
    assert steps(state) == [Deliver(update) for update in reported]  # type: ignore[arg-type]
    assert state.next_step(0.0) == Wait(None)


def test_large_news_is_dropped_early_and_fetched_later() -> None:
    state = caught_up()
    message = "x" * 150_000
    large = [event(sequence, message) for sequence in range(1, 11)]
    for each in large:
        state.push(each)
        assert len(state._queue) <= 1 + QUEUE_BYTES_LIMIT // (4 * len(message))
    assert steps(state)[-1] == Fetch(0, PAGE_SIZE)
    state.take_page(large)
    assert [step.update for step in steps(state) if isinstance(step, Deliver)] == large
    for sequence in range(11, 11 + QUEUE_LIMIT):
        state.push(event(sequence))
    reported = [Deliver(event(sequence)) for sequence in range(11, 11 + QUEUE_LIMIT)]
    assert steps(state) == reported, "delivered items take no room any more"


def test_an_ended_job_is_delivered_to_its_last_event() -> None:
    state = WatchState(0, 2, has_ended=True)
    assert steps(state) == [DeliverJob(), Fetch(0, PAGE_SIZE)]
    state.note_snapshot(2)
    state.take_page([end(1), event(2)])
    assert steps(state) == [Deliver(end(1)), Deliver(event(2)), Deliver(marker(2))]
    assert state.next_step(0.0) == End()


def test_the_watch_ends_after_the_last_event_and_a_snapshot_that_shows_it() -> None:
    state = caught_up()
    state.push(end(1))
    assert steps(state) == [Deliver(end(1))]
    assert state.next_step(0.5) == Wait(SNAPSHOT_INTERVAL_S)
    assert state.next_step(SNAPSHOT_INTERVAL_S) == DeliverJob()
    state.note_snapshot(1)
    assert state.next_step(SNAPSHOT_INTERVAL_S) == End()


def test_the_job_is_delivered_when_it_changes_but_not_more_often_than_its_interval() -> None:
    state = caught_up()
    for _ in range(100):
        state.change_job()
        assert state.next_step(0.9) == Wait(SNAPSHOT_INTERVAL_S)
    assert state.next_step(1.0) == DeliverJob()
    assert state.next_step(1.0) == Wait(None)
    state.change_job()
    assert state.next_step(1.5) == Wait(1.0 + SNAPSHOT_INTERVAL_S)
    state.push(event(1))
    assert state.next_step(1.5) == Deliver(event(1)), "events do not wait for it"
    assert state.next_step(7.0) == DeliverJob()


def test_events_that_overflow_during_a_fetch_are_not_missing() -> None:
    state = WatchState(0, 1, has_ended=False)
    assert steps(state)[-1] == Fetch(0, PAGE_SIZE)
    for sequence in range(2, QUEUE_LIMIT + 3):
        state.push(event(sequence))
    state.take_page([event(1)])
    assert steps(state) == [Deliver(event(1)), Deliver(marker(1)), Fetch(1, PAGE_SIZE)]


class Watching(RuleBasedStateMachine):
    """Any interleaving of news, deletions, overflow, fetches and reading."""

    @initialize(after=st.integers(0, 4), before=st.integers(0, 6))
    def begin(self, after: int, before: int) -> None:
        self.after = after
        self.stored: dict[int, JobEvent] = {n: event(n) for n in range(1, before + 1)}
        self.last = self.first_last = before
        self.deleted: set[int] = set()
        self.has_ended = False
        self.state = WatchState(after, before, has_ended=False, queue_limit=4, page_size=3)
        self.now_s = 0.0
        self.page: list[JobEvent] | None = None
        self.iteration_count = 0
        self.reported: list[object] = []
        self.snapshot_times_s: list[float] = []

    def push(self, happened: JobEvent) -> None:
        self.last = happened.sequence
        self.stored[self.last] = happened
        self.state.push(happened)

    @rule(count=st.integers(1, 8))
    def something_happens(self, count: int) -> None:
        for _ in range(count):
            self.push(event(self.last + 1))
        self.state.change_job()

    @rule(count=st.integers(1, 6))
    def iterations_end(self, count: int) -> None:
        for _ in range(count):
            self.state.push(iteration(self.iteration_count))
            self.iteration_count += 1

    @rule(count=st.integers(1, 5))
    def events_are_deleted(self, count: int) -> None:
        for sequence in sorted(self.stored)[:count]:
            del self.stored[sequence]
            self.deleted.add(sequence)

    @rule()
    def the_job_ends(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self.push(end(self.last + 1))
            self.state.change_job()

    @rule(passed_s=st.integers(0, 8).map(lambda quarters: quarters / 4))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s

    @precondition(lambda self: self.page is None)
    @rule(count=st.integers(1, 8))
    def the_reader_goes_on(self, count: int) -> None:
        for _ in range(count):
            if self.page is None:
                self.step()

    @precondition(lambda self: self.page is not None)
    @rule()
    def the_page_arrives(self) -> None:
        assert self.page is not None
        self.state.take_page(self.page)
        self.page = None

    def step(self) -> Step:
        match step := self.state.next_step(self.now_s):
            case Deliver(update):
                self.reported.append(update)
            case DeliverJob():
                self.snapshot_times_s.append(self.now_s)
                self.state.note_snapshot(self.last)
            case Fetch(after, limit):
                self.page = [self.stored[n] for n in sorted(self.stored) if n > after][:limit]
        return step

    def teardown(self) -> None:
        """Let the reader read to the end: it then has received everything."""
        if not hasattr(self, "state"):
            return
        for _ in range(10_000):
            if self.page is not None:
                self.the_page_arrives()
            step = self.step()
            if isinstance(step, Wait):
                if step.until_s is None:
                    break
                assert step.until_s > self.now_s
                self.now_s = step.until_s
            if isinstance(step, End):
                break
        assert isinstance(step, End) == self.has_ended
        self.order_is_kept()
        known = self.known()
        assert known == list(range(self.after + 1, self.last + 1))
        reported = [update.sequence for update in self.reported if isinstance(update, JobEvent)]
        assert set(range(self.after + 1, self.last + 1)) - set(reported) <= self.deleted
        missed = sum(
            update.missed_iteration_count for update in self.reported if isinstance(update, WatchGap)
        )
        iterations = [update.iteration for update in self.reported if isinstance(update, IterationSummary)]
        assert len(iterations) + missed == self.iteration_count
        assert self.reported.count(marker(self.first_last)) == 1

    def known(self) -> list[int]:
        """Return the sequences that were delivered, or reported as missing, in order."""
        found: list[int] = []
        for update in self.reported:
            if isinstance(update, JobEvent):
                found.append(update.sequence)
            elif isinstance(update, WatchGap) and update.first_missed_sequence:
                found += range(update.first_missed_sequence, update.last_missed_sequence + 1)
        return found

    @invariant()
    def order_is_kept(self) -> None:
        if not hasattr(self, "state"):
            return
        known = self.known()
        assert known == list(range(self.after + 1, self.after + 1 + len(known)))
        iterations = [update.iteration for update in self.reported if isinstance(update, IterationSummary)]
        assert iterations == sorted(set(iterations))
        markers = [n for n, update in enumerate(self.reported) if isinstance(update, CaughtUp)]
        assert len(markers) <= 1
        for place in markers:
            reported = [u.sequence for u in self.reported[:place] if isinstance(u, JobEvent)]
            assert all(sequence <= self.first_last for sequence in reported)
        between_s = zip(self.snapshot_times_s, self.snapshot_times_s[1:], strict=False)
        assert all(after_s - before_s >= SNAPSHOT_INTERVAL_S for before_s, after_s in between_s)


TestWatching = Watching.TestCase
TestWatching.settings = settings(stateful_step_count=40)


# ---------------------------------------------------------------------- a watcher takes these steps

VIEW = Cluster(make_spec()).job(is_full=True)
STORED = events([1, 2, 3])


async def fetch(after_sequence: int, limit: int) -> Sequence[JobEvent]:
    return STORED[after_sequence:][:limit]


async def test_a_reader_gets_stored_events_and_wakes_up_for_news() -> None:
    watcher = Watcher(WatchState(0, 2, has_ended=False))
    updates = watcher.follow(lambda: VIEW, fetch)
    assert [await anext(updates) for _ in range(4)] == [VIEW, *STORED[:2], marker(2)]
    assert await anext(updates) == STORED[2], "which was in the page already"
    waiting = asyncio.ensure_future(anext(updates))
    await asyncio.sleep(0)
    assert not waiting.done()
    watcher.push(STORED[2])
    watcher.push(event(4))
    assert await waiting == event(4)


async def test_a_reader_gets_the_reason_for_the_end_of_a_watch() -> None:
    watcher = Watcher(WatchState(3, 3, has_ended=False))
    updates = watcher.follow(lambda: VIEW, fetch)
    assert [await anext(updates), await anext(updates)] == [VIEW, marker(3)]
    waiting = asyncio.ensure_future(anext(updates))
    await asyncio.sleep(0)
    watcher.end(DrainingError())
    with pytest.raises(DrainingError):
        await waiting
