"""Fail tests that leave threads, processes, open files or unfinished tasks behind.

Objects made by a fixture of a wider scope belong to that fixture, even if this test is the first to use it.
"""

import asyncio
import contextlib
import gc
import os
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Generator, Iterator
from multiprocessing import resource_tracker
from time import monotonic, sleep  # by their names: tests put their own clock into `time`

import grpc
import pytest
import pytest_asyncio

TIMEOUT_S = 10.0
"""Time for objects to end by themselves, even on a busy machine."""

_OPEN_FILES = "/proc/self/fd"
_OF_POLLERS = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]")
"""gRPC makes pollers when it is busy, and keeps them; a leaked event loop is detected by its sockets."""

_known = pytest.StashKey[set[str]]()
"""Objects from before the running test, and those that fixtures of a wider scope have made since."""


def held() -> set[str]:
    """Name the threads, child processes and open files of this process."""
    return set().union(_threads(), _processes(), _files())


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        if not thread.name.startswith("asyncio_"):  # those belong to the event loop, and end with it
            yield f"thread {thread.name!r}"


def _processes() -> Iterator[str]:
    # This runs after every test: system calls take a third of pathlib's time.
    parent = str(os.getpid()).encode()
    for number in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            stat = os.open(f"/proc/{number}/stat", os.O_RDONLY)
            try:
                name, _, rest = os.read(stat, 4096).partition(b"(")[2].rpartition(b")")
            finally:
                os.close(stat)
            if rest.split()[1] == parent and rest.split()[0] != b"Z":
                yield f"process {number} ({name.decode()})"


def _files() -> Iterator[str]:
    for number in os.listdir(_OPEN_FILES):
        with contextlib.suppress(OSError):  # it was open to list the folder
            path = os.readlink(f"{_OPEN_FILES}/{number}")
            if path not in _OF_POLLERS:
                yield f"file {number} ({path})"


def _added(now: set[str], before: set[str]) -> set[str]:
    """Return new objects, except replacements of the same kind, such as a restarted daemon."""
    if not (new := now - before):
        return new
    more = Counter(map(_kind, now)) - Counter(map(_kind, before))
    return {name for name in new if _kind(name) in more}


def _kind(name: str) -> str:
    return re.sub(r"\d+", "", name)


def pytest_configure() -> None:
    """Start objects that a process has once, and keeps."""
    resource_tracker.ensure_running()
    grpc.aio.init_grpc_aio()


def pytest_collection_finish() -> None:
    # Imported objects stay, and would cost a quarter of a second in each garbage collection.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    if fixturedef.scope == "function":
        return (yield)
    before = held()
    known = request.config.stash.setdefault(_known, before)
    try:
        return (yield)
    finally:
        known |= held() - before


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    stash = request.config.stash
    known = stash[_known] if _known in stash else stash.setdefault(_known, held())
    yield
    until_s = monotonic() + TIMEOUT_S
    while left := _added(now := held(), known):
        gc.collect()
        if monotonic() > until_s:
            break
        sleep(0.01)
    stash[_known] = now
    if left:
        pytest.fail(f"left behind: {', '.join(sorted(left))}")


def _is_kept_by_grpc(task: asyncio.Task[object]) -> bool:
    # grpcio 1.85 sometimes leaves it pending if a stream is cancelled while its channel closes.
    return "_AioCall._handle_status_once_received" in repr(task)


@contextlib.asynccontextmanager
async def _no_task_is_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    until_s = monotonic() + TIMEOUT_S
    while left := {
        task for task in asyncio.all_tasks() - before - {asyncio.current_task()} if not _is_kept_by_grpc(task)
    }:
        if monotonic() > until_s:
            pytest.fail(f"left unfinished: {', '.join(sorted(map(repr, left)))}")
        await asyncio.sleep(0.01)


@pytest_asyncio.fixture(loop_scope="function")
async def _no_task_is_left_in_function() -> AsyncIterator[None]:
    async with _no_task_is_left():
        yield


@pytest_asyncio.fixture(loop_scope="session")
async def _no_task_is_left_in_session() -> AsyncIterator[None]:
    async with _no_task_is_left():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and pytest_asyncio.is_async_test(item):
            marker = item.get_closest_marker("asyncio")
            scope = "function" if marker is None else marker.kwargs.get("loop_scope", "function")
            # The loop starts with it, and must be gone when the other fixture checks.
            after = item.fixturenames.index(_nothing_is_left.__name__) + 1
            item.fixturenames.insert(after, f"_no_task_is_left_in_{scope}")
