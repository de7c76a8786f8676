"""What the machines want stored, and what follows once it is: gathered, written together, then carried out.

One task does this for all jobs. Nothing leaves for an agent, a watcher or a caller before the records that it
follows from are safe. Where a run wants something stored that can't be, that concerns this run alone: what it
wanted is refused, and the others' is stored without it.
"""

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from perseus.service.domain.errors import CoordinatorError
from perseus.service.domain.events import JobEvent
from perseus.service.domain.records import record_key
from perseus.service.storage.store import (
    Entry,
    JobEntry,
    JobStore,
    NewRun,
    TelemetrySequence,
    UnstorableEntryError,
)

GATHERING_S = 0.005
"""How long work gathers before it is stored together: a commit of a hundred batches costs as one of one."""

TURN_S = 0.005
"""How long actions keep the event loop at a time."""


@dataclass(slots=True)
class _Work:
    """Entries to be stored, and what follows once they are; at last, `done`."""

    entries: list[Entry]
    then: Sequence[Callable[[], None]]
    done: asyncio.Future[None]

    def is_of(self, job_id: str, run_number: int) -> bool:
        """Whether it is of a run."""
        return any(
            isinstance(entry, JobEntry | JobEvent | NewRun)
            and (_job_id(entry), entry.run_number) == (job_id, run_number)
            for entry in self.entries
        )


class RunKeeper(Protocol):
    """Who knows the runs."""

    def put_aside(self, job_id: str, run_number: int, error: Exception) -> CoordinatorError | None:
        """Put a run aside that wants what can't be stored; return what its callers are told.

        None if it was aside before: then what it wants is done without being stored.
        """


class Writer:
    """The one writer of a store.

    Attributes:
        keeper: who is told of a run that wants what can't be stored.
    """

    def __init__(self, store: JobStore) -> None:
        self.keeper: RunKeeper | None = None
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
            work = await self._write(work)
            turn_ends_s = time.monotonic() + TURN_S
            for item in work:
                for action in item.then:
                    action()
                if not item.done.done():
                    item.done.set_result(None)
                if time.monotonic() >= turn_ends_s:
                    await asyncio.sleep(0)  # readers, and leases, must not wait for thousands of offers
                    turn_ends_s = time.monotonic() + TURN_S
            self._waiting_since_s = taken_s if self._work else None

    async def _write(self, work: list[_Work]) -> list[_Work]:
        """Store what is to be stored; return that of which something may follow."""
        while entries := [entry for item in work for entry in item.entries]:
            try:
                await self._store.write(_latest(entries))
            except UnstorableEntryError as error:
                work = self._without(work, error)
            else:
                break
        return work

    def _without(self, work: list[_Work], error: UnstorableEntryError) -> list[_Work]:
        spoiled = [item for item in work if item.is_of(error.job_id, error.run_number)]
        if self.keeper is None or not spoiled:
            raise error
        told = self.keeper.put_aside(error.job_id, error.run_number, error)
        for item in spoiled:
            item.entries = []
            if told is not None:
                item.then = ()
                if not item.done.done():
                    item.done.set_exception(told)
                    item.done.exception()  # whoever waits is told; mostly nobody does
        return work

    def late_s(self) -> float:
        """For how long the oldest work has waited that is not stored and carried out, seconds."""
        return 0.0 if self._waiting_since_s is None else time.monotonic() - self._waiting_since_s

    def later(self, entries: list[Entry], then: Sequence[Callable[[], None]] = ()) -> asyncio.Future[None]:
        """Want entries stored, and actions carried out after them. The future is done after both."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        self._work.append(_Work(entries, then, done))
        self._has_work.set()
        return done

    async def flush(self) -> None:
        """Wait until everything that was wanted so far is stored and carried out."""
        await self.later([])


def _job_id(entry: JobEntry | JobEvent | NewRun) -> str:
    return entry.spec.job_id if isinstance(entry, NewRun) else entry.job_id


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
