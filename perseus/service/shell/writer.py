"""The writer: gathers records from all machines, stores them together, and then carries out what follows.

One task does this for all jobs. Nothing leaves for an agent, a watcher or a caller before the records that it
follows from are safe. A record that can't be stored concerns its run alone: the run's callers get the error,
the run is quarantined, and the records of other runs are stored without it.
"""

import asyncio
import time
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

from perseus.metrics.distribution import Distribution
from perseus.service.domain.errors import CoordinatorError
from perseus.service.domain.records import IterationRows, record_key
from perseus.service.shell.admission import Admission
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import (
    Entry,
    EventEntry,
    JobEntry,
    NewRun,
    TelemetrySequence,
    UnstorableEntryError,
)

GATHERING_S = 0.02
"""How long work gathers before it is stored together: a commit of a hundred batches costs as much as one."""

MAX_WAITING = 1024
"""How much work may wait. Above this, readers whose messages make more work must await admission first. They
outnumber the one writer by thousands: without this bound, an overload would leave it no turn at all. It is
two full groups: one gathers while the other is stored."""

_COMMIT_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

TURN_S = 0.005
"""How long actions may keep the event loop at a time."""

WAKE_BATCH = 64
"""Coroutines that wait for work resume in the loop's next turn; thousands would make that turn a long one."""


class Work:
    """Entries to be stored, and the actions that follow. Awaiting it waits for both.

    It has a future only if somebody waits: for most of a thousand batches a second nobody does. `on_error`
    takes the exception of an action, and the next action follows; without it, the exception ends the writer.
    """

    __slots__ = ("_done", "_error", "_is_done", "_on_error", "entries", "then")

    def __init__(
        self,
        entries: list[Entry],
        then: Sequence[Callable[[], None]],
        on_error: Callable[[Exception], None] | None,
    ) -> None:
        self.entries = entries
        self.then = then
        self._on_error = on_error
        self._is_done = False
        self._error: CoordinatorError | None = None
        self._done: asyncio.Future[None] | None = None

    def __await__(self) -> Generator[Any, None, None]:
        if not self._is_done:
            if self._done is None:
                self._done = asyncio.get_running_loop().create_future()
            yield from asyncio.shield(self._done)
        if self._error is not None:
            raise self._error

    def is_of(self, job_id: str, run_number: int) -> bool:
        """Return whether it stores something of a run."""
        return any(
            isinstance(entry, EventEntry | JobEntry | NewRun)
            and (_job_id(entry), entry.run_number) == (job_id, run_number)
            for entry in self.entries
        )

    def spoil(self, error: CoordinatorError | None) -> None:
        """Drop the entries. With an error, drop the actions too, and raise it to those who wait."""
        self.entries = []
        if error is not None:
            self.then = ()
            self._error = error

    def carry_out(self, action: Callable[[], None]) -> None:
        """Carry out one of the actions, after the entries were stored."""
        try:
            action()
        except Exception as error:
            if self._on_error is None:
                raise
            self._on_error(error)

    def finish(self) -> bool:
        """Note that all actions are carried out. Return whether somebody waited for it."""
        self._is_done = True
        if self._done is None or self._done.done():
            return False
        self._done.set_result(None)
        return True


class Writer:
    """The one writer of a store.

    Attributes:
        quarantine_unstorable: called with the job and run number of an unstorable record, and the error;
            returns the error for the run's callers, or None if the run is quarantined already: then its work
            is done without being stored.
        commits: the durations of commits.
        entry_count: how many entries they stored.
        waiting_count: how much work waits to be stored and carried out.
        admission: makes the readers of agents' streams wait while that is too much.
    """

    def __init__(self, store: SqlStore) -> None:
        self.quarantine_unstorable: Callable[[str, int, Exception], CoordinatorError | None] | None = None
        self.commits = Distribution(_COMMIT_BOUNDS_S)
        self.entry_count = 0
        self._store = store
        self._work: list[Work] = []
        self._has_work = asyncio.Event()
        self.waiting_count = 0
        self._has_many_actions = False
        self.admission = Admission(
            lambda: self.waiting_count <= MAX_WAITING and not self._has_many_actions, time.monotonic
        )
        # Since when the oldest unfinished work waits, if there is any.
        self._waiting_since_s: float | None = None

    async def run(self) -> None:
        """Store entries and carry out actions, until cancelled.

        Raises:
            Exception: the store failed. Nothing can be guaranteed any more: stop.
        """
        while True:
            await self._has_work.wait()
            await asyncio.sleep(GATHERING_S)
            self._has_work.clear()
            work, self._work = self._work, []
            taken_s = time.monotonic()
            while entries := [entry for item in work for entry in item.entries]:
                latest, begun_s = _latest(entries), time.monotonic()
                try:
                    await self._store.write(latest)
                    self.commits.add(time.monotonic() - begun_s)
                    self.entry_count += len(latest)
                    break
                except UnstorableEntryError as error:
                    self._spoil(work, error)
            await self._carry_out(work)
            self._waiting_since_s = taken_s if self._work else None
            self.admission.resume()

    async def _carry_out(self, work: Sequence[Work]) -> None:
        """Carry out all actions, in turns: health and leases must not wait for thousands of offers.

        Only more of agents' messages must: the offers change what those will be about.
        """
        turn_ends_s, woken_count = time.monotonic() + TURN_S, 0
        for item in work:
            for action in item.then:
                item.carry_out(action)
                if time.monotonic() >= turn_ends_s:
                    self._has_many_actions = True
                    await asyncio.sleep(0)
                    turn_ends_s, woken_count = time.monotonic() + TURN_S, 0
            woken_count += item.finish()
            self.waiting_count -= 1
            if woken_count >= WAKE_BATCH:
                await asyncio.sleep(0)
                turn_ends_s, woken_count = time.monotonic() + TURN_S, 0
        self._has_many_actions = False

    def _spoil(self, work: Sequence[Work], error: UnstorableEntryError) -> None:
        """Drop the work of the run that an error is about; its work under quarantine comes later."""
        wanted = [*work, *self._work]
        spoiled = [item for item in wanted if item.is_of(error.job_id, error.run_number)]
        if self.quarantine_unstorable is None or not spoiled:
            raise error
        refusal = self.quarantine_unstorable(error.job_id, error.run_number, error)
        for item in spoiled:
            item.spoil(refusal)

    def late_s(self) -> float:
        """How long the oldest unfinished work has waited, seconds."""
        return 0.0 if self._waiting_since_s is None else time.monotonic() - self._waiting_since_s

    def later(
        self,
        entries: list[Entry],
        then: Sequence[Callable[[], None]] = (),
        on_error: Callable[[Exception], None] | None = None,
    ) -> Work:
        """Schedule entries to be stored and actions to follow; await the work to wait for both.

        `on_error` takes the exception of an action; without it, the exception ends the writer.
        """
        if self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        work = Work(entries, then, on_error)
        self._work.append(work)
        self.waiting_count += 1
        self._has_work.set()
        return work

    async def flush(self) -> None:
        """Wait until all work scheduled so far is stored and carried out."""
        await self.later([])


def _job_id(entry: EventEntry | JobEntry | NewRun) -> str:
    return entry.spec.job_id if isinstance(entry, NewRun) else entry.job_id


def _latest(entries: Sequence[Entry]) -> list[Entry]:
    """Drop records that a later one replaces, so that a burst is written once."""
    seen: set[Hashable] = set()
    last: list[Entry] = []
    for entry in reversed(entries):
        key: Hashable
        if isinstance(entry, JobEntry):
            if isinstance(entry.record, IterationRows):  # most are, and none replaces another
                last.append(entry)
                continue
            key = (entry.job_id, entry.run_number, record_key(entry.record))
        elif isinstance(entry, TelemetrySequence):
            key = entry.instance_id
        else:
            last.append(entry)
            continue
        if key not in seen:
            seen.add(key)
            last.append(entry)
    last.reverse()
    return last
