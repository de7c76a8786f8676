"""What waits for a slow watcher stays small."""

import pytest

from perseus.service.domain.errors import ReaderTooSlowError
from perseus.service.domain.model import IterationSummary
from perseus.service.shell.watching import NEWS_LIMIT, Watcher


def summary(iteration: int) -> IterationSummary:
    return IterationSummary(0, iteration, 0, 1.0, 1.0)


async def test_a_watcher_gets_news_in_order_and_the_job_once() -> None:
    watcher = Watcher()
    watcher.change_job()
    watcher.tell(summary(1))
    watcher.change_job()
    watcher.tell(summary(2))
    assert await watcher.take() == ([summary(1), summary(2)], True)
    watcher.tell(summary(3))
    assert await watcher.take() == ([summary(3)], False)


async def test_a_watcher_that_lags_too_far_behind_is_ended() -> None:
    watcher = Watcher()
    for iteration in range(NEWS_LIMIT):
        watcher.tell(summary(iteration))
    assert len((await watcher.take())[0]) == NEWS_LIMIT
    for iteration in range(NEWS_LIMIT + 1):
        watcher.tell(summary(iteration))
    with pytest.raises(ReaderTooSlowError, match=f"more than {NEWS_LIMIT} messages"):
        await watcher.take()
