"""What the machines want stored, and what follows once it is: gathered, written together, then carried out.

One task does this for all jobs. Nothing leaves for an agent, a watcher or a caller before the records that it
follows from are safe.
"""

import asyncio
import time
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

from perseus.service.domain.records import IterationRows, record_key
from perseus.service.storage.store import Entry, JobEntry, JobStore, TelemetrySequence

GATHERING_S = 0.005
"""How long work gathers before it is stored together: a commit of a hundred batches costs as one of one."""

TURN_S = 0.005
"""How long actions keep the event loop at a time."""


class Work:
    """Entries to be stored, and what follows once they are. Who awaits it goes on after both.

    No future unless somebody waits: of a thousand batches a second nobody does.
    """

    __slots__ = ("_done", "_is_done", "entries", "then")

    def __init__(self, entries: list[Entry], then: Sequence[Callable[[], None]]) -> None:
        self.entries = entries
        self.then = then
        self._is_done = False
        self._done: asyncio.Future[None] | None = None

    def __await__(self) -> Generator[Any, None, None]:
        if not self._is_done:
            if self._done is None:
                self._done = asyncio.get_running_loop().create_future()
            yield from asyncio.shield(self._done)

    def finish(self) -> None:
        """It is stored and carried out."""
        self._is_done = True
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class Writer:
    """The one writer of a store."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._work: list[Work] = []
        self._has_work = asyncio.Event()
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
            entries = [entry for item in work for entry in item.entries]
            if entries:
                await self._store.write(_latest(entries))
            turn_ends_s = time.monotonic() + TURN_S
            for item in work:
                for action in item.then:
                    action()
                item.finish()
                if time.monotonic() >= turn_ends_s:
                    await asyncio.sleep(0)  # readers, and leases, must not wait for thousands of offers
                    turn_ends_s = time.monotonic() + TURN_S
            self._waiting_since_s = taken_s if self._work else None

    def late_s(self) -> float:
        """For how long the oldest work has waited that is not stored and carried out, seconds."""
        return 0.0 if self._waiting_since_s is None else time.monotonic() - self._waiting_since_s

    def later(self, entries: list[Entry], then: Sequence[Callable[[], None]] = ()) -> Work:
        """Want entries stored, and actions carried out after them; await the work to wait for both."""
        if self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        work = Work(entries, then)
        self._work.append(work)
        self._has_work.set()
        return work

    async def flush(self) -> None:
        """Wait until everything that was wanted so far is stored and carried out."""
        await self.later([])


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
