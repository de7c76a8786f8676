"""The next step of a watcher. Pure: it takes news, pages of events and the time, and returns steps.

Theory of operation
===================

Events reach a reader in two ways: in pages from the store, and as news through a queue that is bounded in
number and bytes. Two numbers decide which way an event takes:

- the *cursor* is the last event that the reader received, or that it is known to have missed;
- the *horizon* is the last event that has to come from the store: first the last one there was when the watch
  began, and after the queue overflowed, the last one that was dropped.

While the cursor is below the horizon, pages are fetched; after that the queue is used, without the events
that a page contained. News is published once it is stored, so dropped events can be fetched. Iterations are
not stored: dropped ones are counted, and the reader gets a `WatchGap`. It also gets one where stored
sequences have a hole: those events were deleted before the reader came to them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from perseus.v1 import job_pb2
from perseus.v1.event_pb2 import JobEvent
from perseus.v1.job_service_pb2 import CaughtUp, WatchGap

WatchItem = JobEvent | job_pb2.IterationSummary

QUEUE_LIMIT = 1024
QUEUE_BYTES_LIMIT = 4 * 2**20
PAGE_SIZE = 256

_PLAIN_BYTES = 512

SNAPSHOT_INTERVAL_S = 1.0
"""The shortest time between two snapshots of the job."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Deliver an update to the reader."""

    update: WatchItem | CaughtUp | WatchGap


@dataclass(frozen=True, slots=True)
class DeliverJob:
    """Deliver the job as it is now, and call `note_snapshot` with its last event."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch up to `limit` stored events above a sequence, and pass them to `take_page`."""

    after_sequence: int
    limit: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for news or a change of the job, at most until this time if there is one."""

    until_s: float | None


@dataclass(frozen=True, slots=True)
class End:
    """The job has ended, and the reader has received everything."""


Step = Deliver | DeliverJob | Fetch | Wait | End


class WatchState:
    """One reader's way through the events and iterations of a job.

    Args:
        after_sequence: events up to this one are not wanted.
        last_sequence: the last event there is. All later ones must be pushed.
        has_ended: whether the job's end is among the events up to it.
        queue_limit: how much news may wait for the reader; when it is exceeded, the queue is dropped.
        page_size: how many events are fetched at a time.
    """

    def __init__(
        self,
        after_sequence: int,
        last_sequence: int,
        has_ended: bool,
        queue_limit: int = QUEUE_LIMIT,
        page_size: int = PAGE_SIZE,
    ) -> None:
        self._queue_limit = queue_limit
        self._page_size = page_size
        self._cursor = after_sequence
        self._horizon = last_sequence
        self._fetched_horizon = 0
        self._first_horizon: int | None = last_sequence
        """None once the reader received `CaughtUp`."""
        self._end_sequence = last_sequence if has_ended else None
        self._page: deque[JobEvent | WatchGap] = deque()
        self._queue: deque[WatchItem] = deque()
        self._queue_bytes = 0
        self._missed_iteration_count = 0
        self._is_job_changed = True
        self._snapshot_sequence = 0
        self._next_snapshot_s = float("-inf")

    def push(self, item: WatchItem) -> None:
        """Queue news. Events must come in order, each once it is stored."""
        self._queue_bytes += (size := _size(item))
        if len(self._queue) >= self._queue_limit or self._queue_bytes > QUEUE_BYTES_LIMIT:
            self._drop_queue()
            self._queue_bytes = size
        if isinstance(item, JobEvent) and item.state_changed.after == job_pb2.JOB_STATE_FINISHED:
            self._end_sequence = item.sequence
        self._queue.append(item)

    def change_job(self) -> None:
        """Note that the job has changed."""
        self._is_job_changed = True

    def note_snapshot(self, last_event_sequence: int) -> None:
        """Note the last event that the delivered snapshot shows."""
        self._snapshot_sequence = last_event_sequence

    def take_page(self, events: Sequence[JobEvent]) -> None:
        """Take the fetched events in order; fewer than asked for mean that there are no more."""
        position = self._cursor
        for event in events:
            sequence = event.sequence
            if sequence > position + 1:
                self._page.append(_gap(position + 1, sequence - 1))
            self._page.append(event)
            position = sequence
        # Events that were dropped while the page was on its way are not missing.
        if len(events) < self._page_size and position < self._fetched_horizon:
            self._page.append(_gap(position + 1, self._fetched_horizon))

    def next_step(self, now_s: float) -> Step:
        """Return the next step, and take it as done."""
        if self._is_snapshot_due() and now_s >= self._next_snapshot_s:
            self._is_job_changed = False
            self._next_snapshot_s = now_s + SNAPSHOT_INTERVAL_S
            return DeliverJob()
        if self._first_horizon is not None and self._cursor >= self._first_horizon:
            caught_up = CaughtUp(last_event_sequence=self._first_horizon)
            self._first_horizon = None
            return Deliver(caught_up)
        if self._page:
            return self._deliver_page()
        if self._cursor < self._horizon:
            self._fetched_horizon = self._horizon
            return Fetch(self._cursor, self._page_size)
        if self._missed_iteration_count:
            gap = WatchGap(missed_iteration_count=self._missed_iteration_count)
            self._missed_iteration_count = 0
            return Deliver(gap)
        while self._queue:
            item = self._queue.popleft()
            self._queue_bytes -= _size(item)
            if isinstance(item, job_pb2.IterationSummary):
                return Deliver(item)
            if item.sequence > self._cursor:
                self._cursor = item.sequence
                return Deliver(item)
        if self._is_snapshot_due():
            return Wait(self._next_snapshot_s)
        return Wait(None) if self._end_sequence is None else End()

    def _is_snapshot_due(self) -> bool:
        """Return whether the job has changed, or its end was not shown yet."""
        return self._is_job_changed or self._snapshot_sequence < (self._end_sequence or 0)

    def _deliver_page(self) -> Deliver:
        update = self._page.popleft()
        self._cursor = update.last_missed_sequence if isinstance(update, WatchGap) else update.sequence
        return Deliver(update)

    def _drop_queue(self) -> None:
        for item in self._queue:
            if isinstance(item, JobEvent):
                self._horizon = item.sequence
            else:
                self._missed_iteration_count += 1
        self._queue.clear()


def _gap(first_sequence: int, last_sequence: int) -> WatchGap:
    return WatchGap(first_missed_sequence=first_sequence, last_missed_sequence=last_sequence)


def _size(item: WatchItem) -> int:
    """Estimate the bytes that news takes: a message takes at most a few times its size on the wire."""
    return _PLAIN_BYTES if isinstance(item, job_pb2.IterationSummary) else _PLAIN_BYTES + 4 * item.ByteSize()
