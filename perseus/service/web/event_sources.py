"""The sources of the page's event streams: the list of jobs, and one job's latest run.

The list sends one text a second for all changed jobs, and reads no others. A job is watched as `WatchJob`
does it; its news is gathered for a while and sent as one text. A new reader first gets the job as it is, and
the events up to the last one that was sent: later chunks follow without a gap, and nothing comes twice.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable

from perseus.service.domain.model import ALL_EVENTS
from perseus.service.shell.jobs import LATEST, Jobs
from perseus.service.shell.live_runs import LiveRuns
from perseus.service.shell.watching import Update
from perseus.service.web.event_stream import event
from perseus.service.web.json_text import as_json, to_json
from perseus.v1 import event_pb2, job_pb2
from perseus.v1 import job_service_pb2 as pb

LIST_PERIOD_S = 1.0

GATHER_S = 0.5
"""News of one job within this time is sent together."""

FIGURES_S = 1.0
"""How often a job is sent again while its iterations continue."""

FIRST_EVENTS = 500
"""How many of the latest events a reader gets who does not say where to begin."""

_TURN_JOBS = 32
"""Jobs translated at a time: some milliseconds."""

_PAGE = 64
"""Events fetched and translated at a time: some milliseconds."""

_KEPT_EVENTS = 1_024


class JobList:
    """The source of the list of jobs."""

    def __init__(self, live: LiveRuns) -> None:
        self._live = live
        self._texts: dict[str, str] = {}
        self._whole = b""

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the changed jobs, once a period."""
        with self._live.changes() as changed:
            changed.update(self._live.job_ids)
            while True:
                texts, removed = await self._take(changed)
                if texts or removed:
                    self._whole = b""
                    yield _jobs_event(texts, removed, is_whole=False)
                else:
                    yield b""
                await asyncio.sleep(LIST_PERIOD_S)

    async def opening(self, after: tuple[int, int] | None) -> AsyncIterator[bytes]:
        """Yield the whole list."""
        self._whole = self._whole or _jobs_event(self._texts.values(), (), is_whole=True)
        yield self._whole

    async def _take(self, changed: set[str]) -> tuple[list[str], list[str]]:
        """Read the changed jobs; return the texts of those that look different, and the removed ones."""
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
            text = to_json(self._live.job(run, is_full=False))
            if text != self._texts.get(job_id):
                self._texts[job_id] = text
                texts.append(text)
        return texts, removed


class JobUpdates:
    """The source of one job's latest run, until it has ended."""

    def __init__(self, jobs: Jobs, job_id: str) -> None:
        self._jobs = jobs
        self._job_id = job_id
        self._run_number = 0
        self._sequence = 0  # of the last gathered event
        self._sent_sequence = 0
        self._job_text = ""
        self._shown_s = float("-inf")
        self._has_moved = False  # iterations have come since the job was last shown
        self._gathered: list[str] = []
        self._event_texts: dict[int, str] = {}

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield what is new of the run, gathered for `GATHER_S`."""
        job = await self._jobs.job(self._job_id, LATEST, is_full=False)
        self._run_number = job.run_number
        self._sequence = self._sent_sequence = job.last_event_sequence
        self._show(job)
        self._gathered.clear()  # every opening contains it
        yield b""
        watching = asyncio.create_task(self._watch())
        try:
            while not watching.done():
                await asyncio.wait([watching], timeout=GATHER_S)
                is_due = self._has_moved and time.monotonic() - self._shown_s >= FIGURES_S
                if is_due and not watching.done():  # the watcher itself shows how the run ended
                    self._show(await self._jobs.job(self._job_id, self._run_number, is_full=False))
                if self._gathered:
                    texts, self._gathered = self._gathered, []
                    self._sent_sequence = self._sequence
                    yield self._chunk(texts, self._sequence)
            watching.result()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def opening(self, after: tuple[int, int] | None) -> AsyncIterator[bytes]:
        """Return the job and its events, from the reader's position or the latest ones."""
        through = self._sent_sequence
        run_number, begin = after or (-1, 0)
        if run_number not in (0, self._run_number):
            begin = max(0, through - FIRST_EVENTS)
        return self._opening(begin, through)

    async def _opening(self, begin: int, through: int) -> AsyncIterator[bytes]:
        """Yield the job, the events after `begin` up to `through`, and CaughtUp."""
        first = [self._job_text]
        while begin < through:
            page = await self._jobs.events(self._job_id, self._run_number, ALL_EVENTS, begin, _PAGE)
            page = [each for each in page if each.sequence <= through]
            following = page[0].sequence if page else through + 1
            if following > begin + 1:  # the events in between were deleted
                gap = pb.WatchGap(first_missed_sequence=begin + 1, last_missed_sequence=following - 1)
                first.append(_gap_text(gap))
            begin = page[-1].sequence if page else through
            yield self._chunk([*first, *map(self._event_text, page)], begin)
            first = []
            await asyncio.sleep(0)
        caught_up = pb.WatchJobResponse(caught_up=pb.CaughtUp(last_event_sequence=through))
        yield self._chunk([*first, to_json(caught_up)], through)

    async def _watch(self) -> None:
        updates = self._jobs.watch(self._job_id, self._run_number, self._sequence, is_full=False)
        async for update in updates:
            self._take(update)

    def _take(self, update: Update) -> None:
        match update:
            case job_pb2.Job():
                self._show(update)
            case event_pb2.JobEvent():
                self._sequence = update.sequence
                self._gathered.append(self._event_text(update))
            case job_pb2.IterationSummary():
                self._has_moved = True
                self._gathered.append(to_json(pb.WatchJobResponse(iteration=update)))
            case pb.WatchGap():
                self._sequence = max(self._sequence, update.last_missed_sequence)
                self._gathered.append(_gap_text(update))
            case pb.CaughtUp():
                pass  # each reader gets its own

    def _show(self, job: job_pb2.Job) -> None:
        self._shown_s, self._has_moved = time.monotonic(), False
        text = to_json(pb.WatchJobResponse(job=job))
        if text != self._job_text:
            self._job_text = text
            self._gathered.append(text)

    def _chunk(self, texts: list[str], sequence: int) -> bytes:
        number = self._run_number
        data = f'{{"run_number":{number},"updates":[{",".join(texts)}]}}'
        return event("updates", data, f"{number}:{sequence}")

    def _event_text(self, job_event: event_pb2.JobEvent) -> str:
        sequence = job_event.sequence
        text = self._event_texts.get(sequence)
        if text is None:
            text = to_json(pb.WatchJobResponse(event=job_event))
            self._event_texts[sequence] = text
            if len(self._event_texts) > _KEPT_EVENTS:
                del self._event_texts[next(iter(self._event_texts))]
        return text


def _gap_text(gap: pb.WatchGap) -> str:
    return to_json(pb.WatchJobResponse(gap=gap))


def _jobs_event(texts: Iterable[str], removed: Iterable[str], *, is_whole: bool) -> bytes:
    head = f'{{"is_whole":{as_json(is_whole)},"jobs":['
    return event("jobs", f'{head}{",".join(texts)}],"removed":{as_json([*removed])}}}')
