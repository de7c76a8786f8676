"""One job as it goes on, for everybody who looks at it: watched once, translated once, sent in chunks.

The job's latest run is watched as `WatchJob` does it, from the moment when the first reader comes. What is
new is gathered for a while and told to all as one text. A reader who comes later is first told the job as it
is and the events that there were, up to the last one that the feed has told: what the feed tells from then on
follows without a gap, and nothing comes twice.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager

from perseus.service.api.statuses import MAPPED, STATUSES, unexpected
from perseus.service.api.translate_jobs import job_to_proto, summary_to_proto
from perseus.service.domain.model import ALL_EVENTS, IterationSummary
from perseus.service.domain.views import JobView
from perseus.service.shell.jobs import LATEST, Jobs
from perseus.service.shell.watching import Update
from perseus.service.web.json_text import to_json
from perseus.service.web.listener import Listener, event
from perseus.v1 import event_pb2
from perseus.v1 import job_service_pb2 as pb

GATHER_S = 0.5
"""What comes in this time is sent together."""

FIGURES_S = 1.0
"""A job whose iterations go on is shown anew after this."""

FIRST_EVENTS = 500
"""The latest events, told to a reader who does not say where to begin."""

_CHUNK_LENGTH = 65_536
"""Characters gathered at which a chunk is sent at once."""

_PAGE = 64
"""Events fetched and translated at a time: some milliseconds."""

_KEPT_EVENTS = 1_024


class JobFeed:
    """One job's latest run, told to listeners. It has ended once its run has.

    Attributes:
        user_count: listeners, and those who wait to be.
    """

    def __init__(self, jobs: Jobs, job_id: str) -> None:
        self.user_count = 0
        self._jobs = jobs
        self._job_id = job_id
        self._listeners: set[Listener] = set()
        self._run_number = 0
        self._sequence = 0  # of the last event that was told, or put in a chunk
        self._job_text = ""
        self._shown_s = float("-inf")
        self._has_moved = False  # iterations have come since it was shown
        self._gathered: list[str] = []
        self._gathered_length = 0
        self._events: dict[int, str] = {}
        self._is_ready = asyncio.Event()
        self._end_reason = ""
        self._error: Exception | None = None
        self._work = [asyncio.create_task(self._guarded(each)) for each in (self._watch(), self._send())]

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will be told."""
        return bool(self._end_reason)

    async def ready(self) -> None:
        """Wait until there is something to tell.

        Raises:
            Exception: there never will be.
        """
        await self._is_ready.wait()
        if self._error is not None:
            raise self._error

    @contextmanager
    def telling(self, listener: Listener, after: tuple[int, int] | None) -> Iterator[AsyncIterator[bytes]]:
        """For the length of a block: tell a listener; the block gets what it is to be sent first.

        `after`: the run and the event after which it wants to begin; 0 stands for the latest run.
        """
        self._flush()
        through = self._sequence
        run_number, begin = after or (-1, 0)
        if run_number not in (0, self._run_number):
            begin = max(0, through - FIRST_EVENTS)
        self._listeners.add(listener)
        if self._end_reason:
            listener.end(self._end_reason)
        try:
            yield self._beginning(begin, through)
        finally:
            self._listeners.discard(listener)

    def end(self, reason: str) -> None:
        """End all listeners; nothing more is told."""
        if self._end_reason:
            return
        self._flush()
        self._end_reason = reason
        self._is_ready.set()
        for listener in self._listeners:
            listener.end(reason)

    async def close(self) -> None:
        """Stop watching."""
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    # ------------------------------------------------------------------ what there was

    async def _beginning(self, begin: int, through: int) -> AsyncIterator[bytes]:
        """Yield the job, the events from one on up to another, and that this was all."""
        first = [self._job_text]
        while begin < through:
            page = await self._jobs.events(self._job_id, self._run_number, ALL_EVENTS, begin + 1, _PAGE)
            page = [each for each in page if each.sequence <= through]
            following = page[0].sequence if page else through + 1
            if following > begin + 1:  # those in between were forgotten
                gap = pb.WatchGap(first_missed_sequence=begin + 1, last_missed_sequence=following - 1)
                first.append(_gap_text(gap))
            begin = page[-1].sequence if page else through
            yield self._chunk([*first, *map(self._event_text, page)], begin)
            first = []
            await asyncio.sleep(0)
        caught_up = pb.WatchJobResponse(caught_up=pb.CaughtUp(last_event_sequence=through))
        yield self._chunk([*first, to_json(caught_up)], through)

    # ------------------------------------------------------------------ what is new

    async def _guarded(self, work: Coroutine[None, None, None]) -> None:
        """Do a part of the work; an error ends the feed with its reason."""
        try:
            await work
        except Exception as error:
            told = error if isinstance(error, MAPPED) else unexpected(error, "JobFeed", job_id=self._job_id)
            self._error = told
            self.end(STATUSES[type(told)].reason)

    async def _watch(self) -> None:
        view = await self._jobs.job(self._job_id, LATEST, has_details=False)
        self._run_number, self._sequence = view.run_number, view.last_event_sequence
        updates = self._jobs.watch(self._job_id, view.run_number, self._sequence, has_details=False)
        async for update in updates:
            self._take(update)
        self.end("RUN_ENDED")

    def _take(self, update: Update) -> None:
        match update:
            case JobView():
                self._show(update)
                self._is_ready.set()
            case event_pb2.JobEvent():
                self._sequence = update.sequence
                self._gather(self._event_text(update))
            case IterationSummary():
                self._has_moved = True
                self._gather(to_json(pb.WatchJobResponse(iteration=summary_to_proto(update))))
            case pb.WatchGap():
                self._sequence = max(self._sequence, update.last_missed_sequence)
                self._gather(_gap_text(update))
            case pb.CaughtUp():
                pass  # each reader is told by itself

    def _show(self, view: JobView) -> None:
        self._shown_s, self._has_moved = time.monotonic(), False
        text = to_json(pb.WatchJobResponse(job=job_to_proto(view)))
        if text != self._job_text:
            self._job_text = text
            self._gather(text)

    def _gather(self, text: str) -> None:
        self._gathered.append(text)
        self._gathered_length += len(text)
        if self._gathered_length > _CHUNK_LENGTH:
            self._flush()

    async def _send(self) -> None:
        """Send what was gathered, time and again."""
        await self._is_ready.wait()
        while not self._end_reason:
            await asyncio.sleep(GATHER_S)
            if self._has_moved and time.monotonic() - self._shown_s >= FIGURES_S:
                self._show(await self._jobs.job(self._job_id, self._run_number, has_details=False))
            self._flush()

    def _flush(self) -> None:
        texts, self._gathered, self._gathered_length = self._gathered, [], 0
        if texts and self._listeners:
            chunk = self._chunk(texts, self._sequence)
            for listener in self._listeners:
                listener.tell(chunk)

    def _chunk(self, texts: list[str], sequence: int) -> bytes:
        number = self._run_number
        data = f'{{"run_number":{number},"updates":[{",".join(texts)}]}}'
        return event("updates", data, f"{number}:{sequence}")

    def _event_text(self, told: event_pb2.JobEvent) -> str:
        sequence = told.sequence
        text = self._events.get(sequence)
        if text is None:
            text = to_json(pb.WatchJobResponse(event=told))
            self._events[sequence] = text
            if len(self._events) > _KEPT_EVENTS:
                del self._events[next(iter(self._events))]
        return text


def _gap_text(gap: pb.WatchGap) -> str:
    return to_json(pb.WatchJobResponse(gap=gap))


class JobFeeds:
    """The feeds of all jobs that somebody looks at."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._feeds: dict[str, JobFeed] = {}

    @asynccontextmanager
    async def telling(
        self, job_id: str, listener: Listener, after: tuple[int, int] | None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """For the length of a block: tell a listener; the block gets what it is to be sent first.

        Raises:
            CoordinatorError: the job can't be watched.
        """
        feed = self._feeds.get(job_id)
        if feed is None or feed.has_ended:
            feed = self._feeds[job_id] = JobFeed(self._jobs, job_id)
        feed.user_count += 1
        try:
            await feed.ready()
            with feed.telling(listener, after) as beginning:
                yield beginning
        finally:
            feed.user_count -= 1
            if not feed.user_count:
                if self._feeds.get(job_id) is feed:
                    del self._feeds[job_id]
                await feed.close()

    def end(self, reason: str) -> None:
        """End all listeners."""
        for feed in self._feeds.values():
            feed.end(reason)
