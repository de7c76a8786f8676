"""Work in the background that runs until it is cancelled."""

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

import structlog

_log = structlog.get_logger(__name__)


def background_task(what: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Begin work whose result nobody looks at until its end; if it fails, that is logged at once.

    asyncio itself logs an exception only if nobody ever asks for it, and whoever cancels the work does.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(partial(_log_failure, what))
    return task


def _log_failure(what: str, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a background task has failed", task=what, exc_info=error)
