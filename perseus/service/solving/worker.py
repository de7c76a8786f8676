"""One worker process, which does one thing at a time and may die or be killed at any moment.

Solving needs its own process because igraph's max-flow holds the GIL and much of planning is plain Python,
which would block the event loop. It is spawned, never forked (a forked gRPC server hangs). Each process has
its own pipe, so a problem that breaks its worker affects no other.
"""

import asyncio
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TypeVar

import structlog

from perseus.solver import Frontier, SolverError

Answer = TypeVar("Answer")

log = structlog.get_logger(__name__)

_TIMEOUT_S = 5.0
"""How long to wait for a process that has closed its pipe to end."""

_SPAWN = multiprocessing.get_context("spawn")


class WorkerDiedError(Exception):
    """The process ended before it answered.

    Attributes:
        is_of_its_work: whether it died during its work, rather than while starting.
    """

    def __init__(self, how: str, *, is_of_its_work: bool) -> None:
        super().__init__(f"its process {how}")
        self.is_of_its_work = is_of_its_work


class WorkError(Exception):
    """The work raised an unexpected exception; the text names it."""


class Worker:
    """A process that is replaced whenever it ends.

    Attributes:
        known: frontiers that the current process keeps, oldest first, by `id`; keeping them here as well
            ensures that no other object gets the same `id`.
        is_ready: whether the current process has started.
    """

    def __init__(self) -> None:
        """Create the worker without a process: `start` or the first work starts it."""
        self.known: OrderedDict[int, Frontier] = OrderedDict()
        self.is_ready = False
        self._process: SpawnProcess | None = None
        # Killed, but perhaps still running.
        self._killed: list[SpawnProcess] = []

    @property
    def process_id(self) -> int | None:
        """The identifier of the current process, if there is one."""
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.is_alive()

    async def run(self, work: Callable[..., Answer], *arguments: object) -> Answer:
        """Run a function in the process. If the caller is cancelled, the process is killed and replaced.

        Raises:
            SolverError: the work raised it.
            WorkError: the work raised another exception, which is in the log.
            WorkerDiedError: the process died and was replaced.
        """
        await self.ready()
        try:
            # Pickling and sending a large problem takes a while.
            message = await asyncio.to_thread(pickle.dumps, (work, arguments), pickle.HIGHEST_PROTOCOL)
            await asyncio.to_thread(self._connection.send_bytes, message)
            await self._readable()
            is_done, answer = await asyncio.to_thread(self._connection.recv)
        except (EOFError, OSError):
            raise await self._died(is_of_its_work=True) from None
        except BaseException:
            self._replace()
            raise
        if is_done:
            return answer  # type: ignore[no-any-return]
        if isinstance(answer, SolverError):
            raise answer
        log.error("unexpected error in a worker", traceback=answer)
        raise WorkError(answer.rstrip().rpartition("\n")[2])

    async def ready(self) -> None:
        """Wait until the process has started, which takes a second or two; start one if there is none.

        Raises:
            WorkerDiedError: it died while starting and was replaced.
        """
        if not self.is_alive:
            try:
                self.start()
            except OSError as error:
                raise WorkerDiedError(f"can't be started: {error}", is_of_its_work=False) from None
        if self.is_ready:
            return
        try:
            await self._readable()
            # Not in a thread: if the caller is cancelled, this message must not be lost. It is small.
            self._connection.recv()
        except (EOFError, OSError):
            raise await self._died(is_of_its_work=False) from None
        self.is_ready = True

    def close(self) -> None:
        """Kill the process, if there is one, and release its resources."""
        if self._process is not None:
            self._process.kill()
            self._killed.append(self._process)
            self._process = None
            self._connection.close()
        for process in self._killed:
            process.join()
            process.close()
        self._killed.clear()

    async def _died(self, *, is_of_its_work: bool) -> WorkerDiedError:
        assert self._process is not None
        # The pipe closes before the process ends.
        await asyncio.to_thread(self._process.join, _TIMEOUT_S)
        exit_code = self._process.exitcode
        self._replace()
        if exit_code is not None and exit_code < 0:
            how = f"ended by signal {-exit_code} ({_signal_name(-exit_code)})"
        else:
            how = f"ended with exit code {exit_code}"
        return WorkerDiedError(how, is_of_its_work=is_of_its_work)

    async def _readable(self) -> None:
        """Wait for a message or the end of the process, without a thread, as solving may take an hour."""
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        descriptor = self._connection.fileno()

        def wake() -> None:
            if not readable.done():
                readable.set_result(None)

        loop.add_reader(descriptor, wake)
        try:
            await readable
        finally:
            loop.remove_reader(descriptor)

    def start(self) -> None:
        """Start a process, which takes a second or two to become ready.

        Raises:
            OSError: it can't be started; there is none then.
        """
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
        try:
            process.start()
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._connection, self._process = ours, process
        self.is_ready = False
        self.known.clear()

    def _replace(self) -> None:
        # A thread may still use the connection; its call ends with the process, so don't close it here.
        assert self._process is not None
        self._process.kill()
        self._killed = [*(process for process in self._killed if process.is_alive()), self._process]
        self._process = None
        try:
            self.start()
        except OSError as error:  # the next work tries again
            log.warning("a worker can't be started", reason=str(error))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


# ---------------------------------------------------------------------- in the process


def _serve(connection: Connection) -> None:
    """Handle messages one after the other until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator handles Ctrl-C
    _end_with_parent()
    connection.send(None)
    while True:
        try:
            work, arguments = connection.recv()
        except EOFError:
            return
        answer: tuple[bool, object]
        try:
            answer = True, work(*arguments)
        except SolverError as error:
            answer = False, error
        except MemoryError:
            os._exit(1)  # like a kill for lack of memory: the next process starts with empty memory
        except Exception:
            answer = False, traceback.format_exc()
        connection.send(answer)


def _end_with_parent() -> None:
    """End this process when the coordinator ends, however it ends and even in the middle of work."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
