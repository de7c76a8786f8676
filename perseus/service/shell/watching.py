"""Who watches a job: a bounded queue of news per watcher, and the latest state of the job only once."""

import asyncio
from collections import deque

from perseus.service.domain.errors import ReaderTooSlowError
from perseus.service.domain.model import IterationSummary, JobEvent

News = JobEvent | IterationSummary

NEWS_LIMIT = 1024
"""News that may wait for a watcher; one that lags further behind is ended, so that it can't take memory."""


class Watcher:
    """News of one job on their way to one reader."""

    def __init__(self) -> None:
        self._news: deque[News] = deque()
        self._is_job_changed = False
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def tell(self, news: News) -> None:
        """Queue news."""
        if len(self._news) >= NEWS_LIMIT:
            self.end(ReaderTooSlowError(limit=NEWS_LIMIT))
            return
        self._news.append(news)
        self._wake.set()

    def change_job(self) -> None:
        """Say that the job looks different now. Said twice, it is told once."""
        self._is_job_changed = True
        self._wake.set()

    def end(self, error: Exception) -> None:
        """End the watcher."""
        self._error = error
        self._news.clear()
        self._wake.set()

    async def take(self) -> tuple[list[News], bool]:
        """Wait for something new; return the news in order, and whether the job looks different.

        Raises:
            ReaderTooSlowError, or what `end` was given.
        """
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None:
            raise self._error
        news, self._news = list(self._news), deque()
        is_changed, self._is_job_changed = self._is_job_changed, False
        return news, is_changed
