"""One worker process: it does one thing at a time, and may be killed or die at any moment.

A process of its own, because igraph's max-flow holds the GIL and much of a plan is plain Python: the event
loop must not share its process. Spawned, never forked (a forked gRPC server hangs). One process to one pipe:
whatever a problem does to its worker hits nobody else.
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
"""With a process that has closed its pipe and not ended yet."""

_SPAWN = multiprocessing.get_context("spawn")


class WorkerDiedError(Exception):
    """The process ended before it answered.

    Attributes:
        is_of_its_work: whether it had begun; otherwise it died before, of something else.
    """

    def __init__(self, exit_code: int | None, *, is_of_its_work: bool) -> None:
        if exit_code is not None and exit_code < 0:
            how = f"by signal {-exit_code} ({_signal_name(-exit_code)})"
        else:
            how = f"with exit code {exit_code}"
        super().__init__(f"its process ended {how}")
        self.is_of_its_work = is_of_its_work


class WorkError(Exception):
    """The work raised what nobody thought of; the text names the exception."""


class Worker:
    """A process that is started anew whenever it is gone.

    Attributes:
        known: frontiers that the process of now remembers, oldest first, by their addresses: no other comes
            to be at the same address while one is kept here.
        is_ready: whether the process of now has started.
    """

    def __init__(self) -> None:
        """Start nothing yet: the process is started by `start`, or when there is something to do."""
        self.known: OrderedDict[int, Frontier] = OrderedDict()
        self.is_ready = False
        self._process: SpawnProcess | None = None
        # Killed, and perhaps not ended yet.
        self._killed: list[SpawnProcess] = []

    @property
    def process_id(self) -> int | None:
        """Of the process of now, if there is one."""
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether there is a process."""
        return self._process is not None and self._process.is_alive()

    async def run(self, work: Callable[..., Answer], *arguments: object) -> Answer:
        """Let the process do something. If the caller is cancelled, the process is killed and replaced.

        Raises:
            SolverError: the work raised it.
            WorkError: the work raised something else; it is in the log.
            WorkerDiedError: the process ended; another one is started.
        """
        await self.ready()
        try:
            # Pickling large problems takes a while, and so does the pipe.
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
        """Wait until the process has started; it takes a second or two. One that is gone is replaced before.

        Raises:
            WorkerDiedError: it ended at once; another one is started.
        """
        if not self.is_alive:
            self.start()
        if self.is_ready:
            return
        try:
            await self._readable()
            self._connection.recv()  # Small, and at once: were it lost, nobody would know that it was there.
        except (EOFError, OSError):
            raise await self._died(is_of_its_work=False) from None
        self.is_ready = True

    def close(self) -> None:
        """End the process, if there is one, and keep nothing of it open."""
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
        # The end of the pipe comes before the end of the process.
        await asyncio.to_thread(self._process.join, _TIMEOUT_S)
        exit_code = self._process.exitcode
        self._replace()
        return WorkerDiedError(exit_code, is_of_its_work=is_of_its_work)

    async def _readable(self) -> None:
        """Wait for a message, or the end of the process. No thread waits, as solving may take an hour."""
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
        """Start a process; until it is ready, it takes a second or two."""
        self._connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.is_ready = False
        self.known.clear()

    def _replace(self) -> None:
        # The connection is left to whichever thread still reads or writes it: that ends with the process.
        assert self._process is not None
        self._process.kill()
        self._killed = [*(process for process in self._killed if process.is_alive()), self._process]
        self.start()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


# ---------------------------------------------------------------------- in the process


def _serve(connection: Connection) -> None:
    """Answer one message after the other, until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's.
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
            os._exit(1)  # As good as killed for it: the next process begins with an empty memory.
        except Exception:
            answer = False, traceback.format_exc()
        connection.send(answer)


def _end_with_parent() -> None:
    """However the coordinator ends, and whatever is being solved."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
