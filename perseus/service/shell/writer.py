"""What the machines want stored, and what follows once it is: gathered, written together, then carried out.

One task does this for all jobs. Nothing leaves for an agent, a watcher or a caller before the records that it
follows from are safe.
"""

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from perseus.service.domain.records import record_key
from perseus.service.storage.store import Entry, JobEntry, JobStore, TelemetrySequence

GATHERING_S = 0.005
"""How long work gathers before it is stored together: a commit of a hundred batches costs as one of one."""

TURN_S = 0.005
"""How long actions keep the event loop at a time."""


@dataclass(slots=True)
class _Work:
    """Entries to be stored, and what follows once they are."""

    entries: list[Entry]
    then: list[Callable[[], None]]


class Writer:
    """The one writer of a store."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._work: list[_Work] = []
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
                if time.monotonic() >= turn_ends_s:
                    await asyncio.sleep(0)  # readers, and leases, must not wait for thousands of offers
                    turn_ends_s = time.monotonic() + TURN_S
            self._waiting_since_s = taken_s if self._work else None

    def late_s(self) -> float:
        """For how long the oldest work has waited that is not stored and carried out, seconds."""
        return 0.0 if self._waiting_since_s is None else time.monotonic() - self._waiting_since_s

    def later(self, entries: list[Entry], then: Sequence[Callable[[], None]] = ()) -> asyncio.Future[None]:
        """Want entries stored, and actions carried out after them. The future is done after both."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def finish() -> None:
            if not done.done():
                done.set_result(None)

        if self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        self._work.append(_Work(entries, [*then, finish]))
        self._has_work.set()
        return done

    async def flush(self) -> None:
        """Wait until everything that was wanted so far is stored and carried out."""
        await self.later([])


def _latest(entries: Sequence[Entry]) -> list[Entry]:
    """Drop records that a later one replaces, so that a burst is written once."""
    last: dict[Hashable, Entry] = {}
    for entry in entries:
        key: Hashable = id(entry)
        if isinstance(entry, JobEntry):
            key = (entry.job_id, entry.run_number, record_key(entry.record))
        elif isinstance(entry, TelemetrySequence):
            key = entry.instance_id
        last.pop(key, None)
        last[key] = entry
    return list(last.values())
