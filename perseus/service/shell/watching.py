"""The watchers of a job: each takes the steps that `watch_state` asks for, for one reader."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress

from perseus.service.shell.watch_state import Deliver, DeliverJob, End, Fetch, Wait, WatchItem, WatchState
from perseus.v1 import event_pb2, job_pb2, job_service_pb2

Update = job_pb2.Job | WatchItem | job_service_pb2.CaughtUp | job_service_pb2.WatchGap


class Watcher:
    """Delivers one job's updates to one reader."""

    def __init__(self, state: WatchState) -> None:
        self._state = state
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def push(self, item: WatchItem) -> None:
        """Queue stored news."""
        self._state.push(item)
        self._wake.set()

    def change_job(self) -> None:
        """Note that the job has changed."""
        self._state.change_job()
        self._wake.set()

    def end(self, error: Exception) -> None:
        """End the watcher."""
        self._error = error
        self._wake.set()

    async def follow(
        self,
        view: Callable[[], job_pb2.Job],
        fetch: Callable[[int, int], Awaitable[Sequence[event_pb2.JobEvent]]],
    ) -> AsyncIterator[Update]:
        """Yield all updates until the job has ended.

        Args:
            view: returns the job as it is now.
            fetch: returns stored events above a sequence, at most so many.

        Raises:
            Exception: the error that was passed to `end`.
        """
        while True:
            self._wake.clear()
            if self._error is not None:
                raise self._error
            match self._state.next_step(time.monotonic()):
                case Deliver(update):
                    yield update
                case DeliverJob():
                    job = view()
                    self._state.note_snapshot(job.last_event_sequence)
                    yield job
                case Fetch(after_sequence, limit):
                    self._state.take_page(await fetch(after_sequence, limit))
                case Wait(until_s):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(
                            None if until_s is None else max(0.0, until_s - time.monotonic())
                        ):
                            await self._wake.wait()
                case End():
                    return
