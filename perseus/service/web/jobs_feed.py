"""All jobs as they change, for everybody who looks at the list: one text a second for all of them.

Nothing is made while nobody looks, and no job is looked at that has not changed.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager

from perseus.service.api.statuses import STATUSES, unexpected
from perseus.service.api.translate_jobs import job_to_proto
from perseus.service.domain.views import JobView
from perseus.service.shell.live_runs import LiveRuns
from perseus.service.web.json_text import as_json, to_json
from perseus.service.web.listener import Listener, event

PERIOD_S = 1.0

_TURN_JOBS = 32
"""Jobs translated at a time: some milliseconds."""


class JobsFeed:
    """The list of jobs, told to listeners."""

    def __init__(self, live: LiveRuns) -> None:
        self._live = live
        self._listeners: set[Listener] = set()
        self._texts: dict[str, str] = {}
        self._whole: bytes | None = None
        self._is_ready = asyncio.Event()
        self._work: asyncio.Task[None] | None = None

    @contextmanager
    def telling(self, listener: Listener) -> Iterator[AsyncIterator[bytes]]:
        """For the length of a block: tell a listener; the block gets what it is to be sent first."""
        self._listeners.add(listener)
        if self._work is None:
            self._work = asyncio.create_task(self._guarded())
        try:
            yield self._beginning(listener)
        finally:
            self._listeners.discard(listener)
            if not self._listeners:
                self._stop()

    def end(self, reason: str) -> None:
        """End all listeners."""
        for listener in self._listeners:
            listener.end(reason)

    async def _beginning(self, listener: Listener) -> AsyncIterator[bytes]:
        await self._is_ready.wait()
        if self._whole is None:
            self._whole = _told(self._texts.values(), (), is_whole=True)
        yield self._whole

    async def _guarded(self) -> None:
        try:
            await self._run()
        except Exception as error:
            self.end(STATUSES[type(unexpected(error, "JobsFeed"))].reason)
            self._is_ready.set()

    async def _run(self) -> None:
        with self._live.changes() as changed:
            changed.update(self._live.job_ids)
            while True:
                if changed:
                    texts, removed = await self._take(changed)
                    if self._is_ready.is_set() and (texts or removed):
                        self._whole = None
                        chunk = _told(texts, removed, is_whole=False)
                        for listener in self._listeners:
                            listener.tell(chunk)
                self._is_ready.set()
                await asyncio.sleep(PERIOD_S)

    async def _take(self, changed: set[str]) -> tuple[list[str], list[str]]:
        """Look at the jobs that have changed; return what is new of them, and those that are gone."""
        job_ids = sorted(changed)
        changed.clear()
        texts: list[str] = []
        removed: list[str] = []
        for number, job_id in enumerate(job_ids):
            if number % _TURN_JOBS == _TURN_JOBS - 1:
                await asyncio.sleep(0)
            run = self._live.get(job_id)
            if run is None:
                if self._texts.pop(job_id, None) is not None:
                    removed.append(job_id)
                continue
            text = self._live.shown(run, _text, has_details=False)
            if text != self._texts.get(job_id):
                self._texts[job_id] = text
                texts.append(text)
        return texts, removed

    def _stop(self) -> None:
        if self._work is not None:
            self._work.cancel()
        self._work, self._whole = None, None
        self._texts.clear()
        self._is_ready.clear()


def _text(view: JobView) -> str:
    return to_json(job_to_proto(view))


def _told(texts: Iterable[str], removed: Iterable[str], *, is_whole: bool) -> bytes:
    head = f'{{"is_whole":{as_json(is_whole)},"jobs":['
    return event("jobs", f'{head}{",".join(texts)}],"removed":{as_json([*removed])}}}')
