"""A Dask cluster that solves in place of own processes, as long as it is there.

Each piece of work is a Dask task, which runs it in a child process of the Dask worker (`worker`, as in the
coordinator): max-flow holds the GIL, and a silent Dask worker is killed by its scheduler. So work that is
cancelled there ends with its process, and so does work whose client or Dask worker has died. A Dask worker
that dies costs a retry on another, which the scheduler starts.

A cluster without workers, or whose workers' versions differ, is not there. What it was working on then fails
by `ClusterLostError`; connecting is tried again for as long as it takes.
"""

import asyncio
import contextlib
import logging
import uuid
import warnings
from collections.abc import Awaitable, Callable
from concurrent import futures
from typing import Any, TypeVar

import structlog

from perseus.retry import Retry
from perseus.service.solving.worker import Worker, WorkerDiedError

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer")

PERIOD_S = 2.0
"""How often the cluster's workers are counted, and how long after its loss it is first tried again."""

MAX_DELAY_S = 30.0
"""The longest time from one attempt to connect to the next: each that fails doubles it."""

TIMEOUT_S = 30.0
"""A scheduler that answers no later than this is there: Dask's own timeout. Busy machines take over 10 s."""

_POLL_S = 0.2
"""How soon cancelled work ends on a Dask worker: Dask does not interrupt tasks."""

_IDLE_S = 60.0
"""How long a Dask worker keeps a process that has nothing to do: starting one takes a second."""

_EQUAL = ("perseus-energy", "python", "igraph")
"""Versions that must be equal: of the code, of its pickles, and of what decides the last digits."""


class ClusterLostError(Exception):
    """The cluster went away before it answered; the text says why."""


class DaskCluster:
    """A Dask cluster, connected to while `run` runs.

    Attributes:
        thread_count: its workers' threads; 0 while it is not there.
        trouble: why it is not there.
        listeners: called when `thread_count` has changed.
    """

    def __init__(self, address: str, priority: int = 0) -> None:
        """Create it without a connection.

        Args:
            address: of its scheduler, as Dask writes it; certificates are in Dask's configuration.
            priority: of its work among that of all clients.
        """
        self.thread_count = 0
        self.trouble = ""
        self.listeners: list[Callable[[], None]] = []
        self._address, self._priority = address, priority
        self._client: Any = None  # Dask's types don't say what is asynchronous
        self._addresses: frozenset[str] = frozenset()
        self._lost: asyncio.Future[str]

    async def run(self) -> None:
        """Connect, count workers, and connect again after each loss, until cancelled."""
        retry = Retry(PERIOD_S, MAX_DELAY_S)
        while True:
            self._lost = asyncio.get_running_loop().create_future()
            try:
                client = self._new_client()
            except Exception as error:  # such as a certificate that can't be read
                self._end(f"its client can't start: {_line(error)}")
                await asyncio.sleep(retry.failed())
                continue
            try:
                await _bounded(self._connect(client))
                while not self._lost.done():
                    await self._count(client)
                    retry.succeeded()
                    await asyncio.wait({self._lost}, timeout=PERIOD_S)
            except ClusterLostError as error:
                self._end(str(error))
            finally:
                self._client = None
                with contextlib.suppress(Exception):
                    await _bounded(client.close(timeout=1), TIMEOUT_S)
            await asyncio.sleep(retry.failed())

    async def exchange(self, message: bytes) -> bytes:
        """Return the answer to pickled work, pickled as well, as `Worker.exchange` does.

        Raises:
            ClusterLostError: the cluster went away.
            WorkerDiedError: the process died, or several Dask workers with it.
        """
        from distributed.scheduler import KilledWorker
        from distributed.versions import get_package_info

        if self._client is None or self._lost.done():
            raise ClusterLostError(self.trouble)
        lost, key = self._lost, f"perseus-{uuid.uuid4().hex}"
        packages = get_package_info(_EQUAL)
        try:
            future = self._client.submit(
                exchange_there, key, message, packages, key=key, priority=self._priority, pure=False
            )
        except Exception as error:  # the client has closed itself
            raise self._lose(error) from None
        answering = asyncio.ensure_future(_result(future))
        try:
            waiting: set[asyncio.Future[Any]] = {answering, lost}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ClusterLostError(lost.result())
            try:
                return answering.result()
            except WorkerDiedError as error:
                if error.is_of_its_work:
                    raise
                raise self._lose(error) from None
            except KilledWorker as error:
                raise WorkerDiedError(f"died with {1 + error.allowed_failures} Dask workers", True) from None
            except (Exception, asyncio.CancelledError) as error:  # also: the connection broke
                raise self._lose(error) from None
        finally:
            answering.cancel()
            future.release()  # ends the work, if it is not done

    def _lose(self, error: BaseException) -> ClusterLostError:
        is_broken = isinstance(error, asyncio.CancelledError | futures.CancelledError)
        self._end(_SILENT if is_broken else _line(error))
        return ClusterLostError(self.trouble)

    def _new_client(self) -> Any:
        import dask
        from distributed import Client
        from distributed.versions import VersionMismatchWarning

        # Dask warns of everything in several lines; what concerns us is said in one.
        warnings.filterwarnings("ignore", category=VersionMismatchWarning)
        for name in ("distributed", "distributed.client"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 TiB"})
        options: dict[str, Any] = {"asynchronous": True, "set_as_default": False, "timeout": TIMEOUT_S}
        return Client(self._address, **options)  # type: ignore[no-untyped-call]

    async def _connect(self, client: Any) -> None:
        try:
            self._client = await client
        except Exception as error:
            raise ClusterLostError(f"{_SILENT}: {_line(error)}") from None

    async def _count(self, client: Any) -> None:
        """Count the threads of the workers that may work for us.

        Raises:
            ClusterLostError: the scheduler doesn't answer, or there is no worker that may.
        """
        try:
            there = await _bounded(self._threads_of_workers(client), TIMEOUT_S)
        except ClusterLostError:
            raise
        except Exception:
            raise ClusterLostError(_SILENT) from None
        if not there:
            raise ClusterLostError("it has no workers")
        self._addresses = frozenset(there)
        self._change(sum(there.values()))
        if self.trouble:
            log.info("the Dask cluster is there again", address=self._address, threads=self.thread_count)
            self.trouble = ""

    async def _threads_of_workers(self, client: Any) -> dict[str, int]:
        """Return address → threads of the workers that run, whose versions are ours."""
        identity = await client.scheduler.identity(n_workers=-1)
        there = {
            address: worker["nthreads"]
            for address, worker in identity["workers"].items()
            if worker["status"] == "running"
        }
        if not there.keys() <= self._addresses:
            versions = await client.get_versions(packages=_EQUAL)
            ours = versions["client"]["packages"]
            for place, found in {"its scheduler": versions["scheduler"], **versions["workers"]}.items():
                _check_versions(ours, found["packages"], place)
        return there

    def _end(self, trouble: str) -> None:
        """Note that the cluster is not there, and say so once."""
        if not self._lost.done():
            self._lost.set_result(trouble)
        is_known = trouble == self.trouble or (_SILENT in trouble and _SILENT in self.trouble)
        self.trouble = trouble
        if not is_known:
            log.warning(
                "the Dask cluster is not there: own processes solve", address=self._address, cause=trouble
            )
        self._addresses = frozenset()
        self._change(0)

    def _change(self, thread_count: int) -> None:
        if thread_count != self.thread_count:
            self.thread_count = thread_count
            for listener in self.listeners:
                listener()


class DaskWorker(Worker):
    """A worker for one piece of work, somewhere on a cluster."""

    def __init__(self, cluster: DaskCluster) -> None:
        super().__init__()
        self._cluster = cluster

    async def ready(self) -> None:
        """Return: a Dask worker starts a process with its first work."""

    async def exchange(self, message: bytes) -> bytes:
        """Return the answer to pickled work, pickled as well.

        Raises:
            ClusterLostError: the cluster went away.
            WorkerDiedError: the process died, or several Dask workers with it.
        """
        return await self._cluster.exchange(message)


_SILENT = "its scheduler can't be reached"


async def _bounded(work: Awaitable[Answer], timeout_s: float | None = None) -> Answer:
    """Wait for Dask, whose client loses a cancellation while it closes: cancel until it has ended."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({working}, timeout=timeout_s)
        if not working.done():
            raise TimeoutError
        return working.result()
    finally:
        while not working.done():
            working.cancel()
            await asyncio.wait({working}, timeout=0.1)
        if not working.cancelled():
            working.exception()  # what fails after its time is up is nobody's concern, and not logged


async def _result(future: Any) -> bytes:
    answer: bytes = await future
    return answer


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _check_versions(expected: dict[str, str | None], found: dict[str, str | None], place: str) -> None:
    """Compare the versions that matter, of packages and of Python.

    Raises:
        ClusterLostError: those in a place differ from ours.
    """
    for name in _EQUAL:
        ours, theirs = _version(expected, name), _version(found, name)
        if ours != theirs:
            raise ClusterLostError(f"expected {name} {ours}, found {theirs} on {place}")


def _version(packages: dict[str, str | None], name: str) -> str | None:
    found = packages[name]
    # 3.11.7.final.0: the versions of one minor version read each other's pickles.
    return ".".join(found.split(".")[:2]) if found is not None and name == "python" else found


# ---------------------------------------------------------------------- on a Dask worker

_idle: dict[Worker, asyncio.TimerHandle] = {}
"""Processes that have nothing to do, each with the timer that ends it."""


async def exchange_there(key: str, message: bytes, packages: dict[str, str | None]) -> bytes:
    """Answer pickled work in a child process of this Dask worker, within its memory limit for a thread.

    `key`: of this task; `packages`: the client's versions. Returns nothing useful if it is cancelled.

    Raises:
        ClusterLostError: versions differ: this worker is new.
        WorkerDiedError: the process died.
    """
    from distributed import get_worker
    from distributed.versions import get_package_info

    here = get_worker()
    _check_versions(packages, get_package_info(_EQUAL), here.address)
    limit_bytes = here.memory_manager.memory_limit
    if _idle:
        worker, timer = _idle.popitem()
        timer.cancel()
    else:
        worker = Worker(None if limit_bytes is None else int(limit_bytes / here.state.nthreads))
    answering = asyncio.ensure_future(worker.exchange(message))
    try:
        while not answering.done():
            await asyncio.wait({answering}, timeout=_POLL_S)
            task = here.state.tasks.get(key)
            if task is None or task.state not in ("executing", "long-running"):
                return b""
        return answering.result()
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        _idle[worker] = asyncio.get_running_loop().call_later(_IDLE_S, _end_idle, worker)


def _end_idle(worker: Worker) -> None:
    del _idle[worker]
    worker.close()
