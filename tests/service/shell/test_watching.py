"""A watcher waits for news and takes its steps; the choice of steps is tested with `watch_state`."""

import asyncio
from collections.abc import Sequence

import pytest

from perseus.service.domain.errors import DrainingError
from perseus.service.shell.watch_state import WatchState
from perseus.service.shell.watching import Watcher
from perseus.v1.event_pb2 import JobEvent
from perseus.v1.job_service_pb2 import CaughtUp
from tests.service.service_fakes import Cluster, make_spec

VIEW = Cluster(make_spec()).job(is_full=True)
STORED = [JobEvent(sequence=n) for n in (1, 2, 3)]


async def fetch(after_sequence: int, limit: int) -> Sequence[JobEvent]:
    return STORED[after_sequence:][:limit]


async def test_a_reader_gets_stored_events_and_wakes_up_for_news() -> None:
    watcher = Watcher(WatchState(0, 2, has_ended=False))
    updates = watcher.follow(lambda: VIEW, fetch)
    assert [await anext(updates) for _ in range(4)] == [VIEW, *STORED[:2], CaughtUp(last_event_sequence=2)]
    assert await anext(updates) == STORED[2], "which was in the page already"
    waiting = asyncio.ensure_future(anext(updates))
    await asyncio.sleep(0)
    assert not waiting.done()
    news = JobEvent(sequence=4)
    watcher.push(STORED[2])
    watcher.push(news)
    assert await waiting == news


async def test_a_reader_gets_the_reason_for_the_end_of_a_watch() -> None:
    watcher = Watcher(WatchState(3, 3, has_ended=False))
    updates = watcher.follow(lambda: VIEW, fetch)
    assert [await anext(updates), await anext(updates)] == [VIEW, CaughtUp(last_event_sequence=3)]
    waiting = asyncio.ensure_future(anext(updates))
    await asyncio.sleep(0)
    watcher.end(DrainingError())
    with pytest.raises(DrainingError):
        await waiting
