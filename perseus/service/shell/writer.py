"""What the machines want stored, and what follows once it is: gathered, written together, then carried out.

One task does this for all jobs. Nothing leaves for an agent, a watcher or a caller before the records that it
follows from are safe. Where a run wants something stored that can't be, that concerns this run alone: its
callers are told, it is put aside, and the others' is stored without it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

from perseus.metrics.distribution import Distribution
from perseus.service.domain.errors import CoordinatorError
from perseus.service.domain.records import IterationRows, record_key
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
"""How long work gathers before it is stored together: a commit of a hundred batches costs as one of one."""

MAX_WAITING = 1024
"""Work that waits; when there is more, whoever reads what makes more is to await admission first. Readers
outnumber the one writer by thousands: without this, more than can be done leaves it no turn at all. It is two
full groups: one gathers while the other is stored."""

_COMMIT_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

TURN_S = 0.005
"""How long actions keep the event loop at a time."""

WAKE_BATCH = 64
"""Who waits for work goes on in the loop's next turn: readers by the thousand would make that a long one."""


class Work:
    """Entries to be stored, and what follows once they are. Who awaits it goes on after both.

    No future unless somebody waits: of a thousand batches a second nobody does. `on_error` takes what an
    action raises, and the next one follows; without it, that ends the writer.
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
        """Whether something of a run is to be stored."""
        return any(
            isinstance(entry, EventEntry | JobEntry | NewRun)
            and (_job_id(entry), entry.run_number) == (job_id, run_number)
            for entry in self.entries
        )

    def spoil(self, error: CoordinatorError | None) -> None:
        """Nothing of it is stored. With an error, nothing follows either, and whoever waits is told."""
        self.entries = []
        if error is not None:
            self.then = ()
            self._error = error

    def carry_out(self) -> bool:
        """It is stored: do what follows. Returns whether somebody waited for it."""
        for action in self.then:
            try:
                action()
            except Exception as error:
                if self._on_error is None:
                    raise
                self._on_error(error)
        self._is_done = True
        if self._done is None or self._done.done():
            return False
        self._done.set_result(None)
        return True


class Writer:
    """The one writer of a store.

    Attributes:
        put_aside: called with a run (job, number) that wants what can't be stored, and the error; returns
            what its callers are told, or None if it is aside already: then that is done without being stored.
        commits: what commits took.
        entry_count: how many entries they had.
        waiting_count: how much work waits to be stored and carried out.
    """

    def __init__(self, store: SqlStore) -> None:
        self.quarantine_unstorable: Callable[[str, int, Exception], CoordinatorError | None] | None = None
        self.commits = Distribution(_COMMIT_BOUNDS_S)
        self.entry_count = 0
        self._store = store
        self._work: list[Work] = []
        self._has_work = asyncio.Event()
        self.waiting_count = 0
        # Readers that are kept waiting, in order, and since when each is.
        self._kept: deque[tuple[asyncio.Future[None], float]] = deque()
        # Since when the oldest work waits that is not stored and carried out, if there is any.
        self._waiting_since_s: float | None = None

    async def run(self) -> None:
        """Store and carry out, until cancelled.

        Raises:
            Exception: the store failed. Nothing can be promised any more: stop.
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
            turn_ends_s, woken_count = time.monotonic() + TURN_S, 0
            for item in work:
                woken_count += item.carry_out()
                self.waiting_count -= 1
                if woken_count >= WAKE_BATCH or time.monotonic() >= turn_ends_s:
                    await asyncio.sleep(0)  # readers, and leases, must not wait for thousands of offers
                    turn_ends_s, woken_count = time.monotonic() + TURN_S, 0
            self._waiting_since_s = taken_s if self._work else None
            await self._admit()

    async def _admit(self) -> None:
        """Let the next few readers go on, as many as there is room for."""
        free_count = MAX_WAITING - self.waiting_count
        admitted_count = 0
        while self._kept and admitted_count < free_count:
            reader, _ = self._kept.popleft()
            if not reader.done():  # else its stream has ended meanwhile
                reader.set_result(None)
                admitted_count += 1
                if admitted_count % WAKE_BATCH == 0:
                    await asyncio.sleep(0)
        if self._kept:  # what the admitted say need not be work: somebody has to see to the others
            self._has_work.set()

    def _spoil(self, work: Sequence[Work], error: UnstorableEntryError) -> None:
        """Take out what the run wants that an error is about; what it wants once it is aside comes later."""
        wanted = [*work, *self._work]
        spoiled = [item for item in wanted if item.is_of(error.job_id, error.run_number)]
        if self.quarantine_unstorable is None or not spoiled:
            raise error
        refusal = self.quarantine_unstorable(error.job_id, error.run_number, error)
        for item in spoiled:
            item.spoil(refusal)

    def late_s(self) -> float:
        """For how long the oldest work has waited that is not stored and carried out, seconds."""
        return 0.0 if self._waiting_since_s is None else time.monotonic() - self._waiting_since_s

    @property
    def is_overloaded(self) -> bool:
        """Whether so much waits that whoever reads what makes more is to await admission first."""
        return self.waiting_count > MAX_WAITING or bool(self._kept)

    async def admission(self) -> None:
        """Wait, after those who wait already, until there is room for more work."""
        reader: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._kept.append((reader, time.monotonic()))
        self._has_work.set()
        await reader

    @property
    def kept_count(self) -> int:
        """How many readers are kept waiting."""
        return len(self._kept)

    def kept_s(self) -> float:
        """For how long the reader that is next has been kept waiting, seconds."""
        return time.monotonic() - self._kept[0][1] if self._kept else 0.0

    def later(
        self,
        entries: list[Entry],
        then: Sequence[Callable[[], None]] = (),
        on_error: Callable[[Exception], None] | None = None,
    ) -> Work:
        """Want entries stored, and actions carried out after them; await the work to wait for both.

        `on_error` takes what an action raises; without it, that ends the writer.
        """
        if self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        work = Work(entries, then, on_error)
        self._work.append(work)
        self.waiting_count += 1
        self._has_work.set()
        return work

    async def flush(self) -> None:
        """Wait until everything that was wanted so far is stored and carried out."""
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
