"""One worker process, which does one thing at a time and may die or be killed at any moment.

Solving needs its own process because igraph's max-flow holds the GIL and much of planning is plain Python,
which would block the event loop. It is a new interpreter, never a fork (a forked gRPC server hangs), and
started by `subprocess`, as Dask's worker processes are daemonic: multiprocessing refuses them children. Each
process has its own pipe, so a problem that breaks its worker affects no other.
"""

import asyncio
import contextlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TypeVar

import structlog

from perseus.solver import Frontier, SolverError

Answer = TypeVar("Answer")

log = structlog.get_logger(__name__)

_TIMEOUT_S = 5.0
"""How long to wait for a process that has closed its pipe to end."""

_NO_MEMORY = 71
"""The exit code of a process that needed more memory than there was, or than its limit."""


class WorkerDiedError(Exception):
    """The process ended before it answered.

    Attributes:
        is_of_its_work: whether it died during its work, rather than while starting.
    """

    def __init__(self, how: str, is_of_its_work: bool) -> None:
        super().__init__(how, is_of_its_work)  # all arguments: it is pickled on Dask workers
        self.is_of_its_work = is_of_its_work

    def __str__(self) -> str:
        return f"its process {self.args[0]}"


class WorkError(Exception):
    """The work raised an unexpected exception; the text names it."""


class Worker:
    """A process that is replaced whenever it ends.

    Attributes:
        known: frontiers that the current process keeps, oldest first, by `id`; keeping them here as well
            ensures that no other object gets the same `id`.
        is_ready: whether the current process has started.
    """

    def __init__(self, memory_limit_bytes: int | None = None) -> None:
        """Create the worker without a process: `start` or the first work starts it.

        `memory_limit_bytes`: of the process; None for none.
        """
        self.known: OrderedDict[int, Frontier] = OrderedDict()
        self.is_ready = False
        self._memory_limit_bytes = memory_limit_bytes
        self._process: subprocess.Popen[bytes] | None = None
        # Killed, but perhaps still running.
        self._killed: list[subprocess.Popen[bytes]] = []

    @property
    def process_id(self) -> int | None:
        """The identifier of the current process, if there is one."""
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.poll() is None

    async def run(self, work: Callable[..., Answer], *arguments: object) -> Answer:
        """Run a function in the process. If the caller is cancelled, the process is killed and replaced.

        Raises:
            SolverError: the work raised it.
            WorkError: the work raised another exception, which is in the log.
            WorkerDiedError: the process died and was replaced.
        """
        # Pickling and sending a large problem takes a while.
        message = await asyncio.to_thread(pickle.dumps, (work, arguments), pickle.HIGHEST_PROTOCOL)
        is_done, answer = await asyncio.to_thread(pickle.loads, await self.exchange(message))
        if is_done:
            return answer  # type: ignore[no-any-return]
        if isinstance(answer, SolverError):
            raise answer
        log.error("unexpected error in a worker", traceback=answer)
        raise WorkError(answer.rstrip().rpartition("\n")[2])

    async def exchange(self, message: bytes) -> bytes:
        """Return the answer to pickled work, pickled as well; otherwise like `run`."""
        await self.ready()
        try:
            await asyncio.to_thread(self._connection.send_bytes, message)
            await self._readable()
            return await asyncio.to_thread(self._connection.recv_bytes)
        except (EOFError, OSError):
            raise await self._died(is_of_its_work=True) from None
        except BaseException:
            self._replace()
            raise

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
            self._connection.recv_bytes()
        except (EOFError, OSError):
            raise await self._died(is_of_its_work=False) from None
        self.is_ready = True

    def close(self) -> None:
        """Kill the process, if there is one, and release its resources."""
        if self._process is not None:
            self._kill()
            self._connection.close()
        for process in self._killed:
            process.wait()
        self._killed.clear()

    async def _died(self, *, is_of_its_work: bool) -> WorkerDiedError:
        assert self._process is not None
        # The pipe closes before the process ends.
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, _TIMEOUT_S)
        how = f"ended {_end_text(self._process.returncode)}"
        self._replace()
        return WorkerDiedError(how, is_of_its_work)

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
        """Start a process, which takes a second or two to become ready; kill the one that there was.

        Raises:
            OSError: it can't be started; there is none then.
        """
        self._kill()
        ours, theirs = Pipe()
        descriptor, limit_bytes = str(theirs.fileno()), str(self._memory_limit_bytes or 0)
        try:
            self._process = subprocess.Popen(
                # -P: what lies in the working directory is not imported.
                [sys.executable, "-P", "-c", _COMMAND, descriptor, limit_bytes],
                # Open as long as this process lives: the other ends with it.
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                process_group=0,  # Ctrl-C is for this process to handle
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._connection = ours
        self.is_ready = False
        self.known.clear()

    def _replace(self) -> None:
        try:
            self.start()
        except OSError as error:  # the next work tries again
            log.warning("a worker can't be started", reason=str(error))

    def _kill(self) -> None:
        # A thread may still use the connection; its call ends with the process, so don't close it here.
        self._killed = [process for process in self._killed if process.poll() is None]
        if self._process is not None:
            self._process.kill()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._killed.append(self._process)
            self._process = None


def _end_text(exit_code: int | None) -> str:
    if exit_code == _NO_MEMORY:
        return "for lack of memory"
    if exit_code is None or exit_code >= 0:
        return f"with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "unknown"
    return f"by signal {-exit_code} ({name})"


# ---------------------------------------------------------------------- in the process


_COMMAND = f"from {__name__} import serve; serve()"


def serve() -> None:
    """Handle messages one after the other until the pipe closes: the work of a worker's process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    descriptor, memory_limit_bytes = map(int, sys.argv[1:])
    if memory_limit_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_bytes, memory_limit_bytes))
    with Connection(descriptor) as connection:
        connection.send_bytes(b"")
        while True:
            try:
                message = connection.recv_bytes()
            except EOFError:
                return
            connection.send_bytes(_answer(message))


def _answer(message: bytes) -> bytes:
    answer: tuple[bool, object]
    try:
        work, arguments = pickle.loads(message)  # noqa: S301 (from the process that started this one)
        answer = True, work(*arguments)
    except SolverError as error:
        answer = False, error
    except MemoryError:
        os._exit(_NO_MEMORY)  # like a kill for lack of memory: the next process starts with empty memory
    except Exception:
        answer = False, traceback.format_exc()
    return pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)


def _end_with_parent() -> None:
    """End this process when the one that started it ends, however it ends and even in the middle of work."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)
