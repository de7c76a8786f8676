"""Tasks that answer runs' questions while the answers are still wanted: known profiles, frontiers, plans."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import structlog

from perseus.service.domain.commands import Solve
from perseus.service.domain.errors import CoordinatorError, DatabaseUnreadableError
from perseus.service.domain.inputs import (
    Input,
    LagNotFound,
    ProfileFound,
    Refined,
    RefineFailed,
    Solved,
    SolveFailed,
    SolveRetried,
)
from perseus.service.domain.model import FaultyPart
from perseus.service.shell.live_run import LiveRun, Machine
from perseus.service.shell.writer import Work, Writer
from perseus.service.solving.work import POINT_COUNT
from perseus.service.solving.worker_pool import WorkerPool
from perseus.service.storage.sql_store import SqlStore
from perseus.solver import LagError, Refinement, SolverError
from perseus.v1 import event_pb2

Result = TypeVar("Result")

log = structlog.get_logger(__name__)


class Runs(Protocol):
    """The runs that take the answers."""

    def handle(self, run: LiveRun, event: Input) -> Work:
        """Give a run an answer."""

    def quarantine(self, run: LiveRun, part: FaultyPart, error: Exception) -> None:
        """Quarantine a run that made the coordinator fail."""

    def is_awaiting(self, run: LiveRun, machine: Machine) -> bool:
        """Return whether the machine that asked for something still belongs to the run."""


class RunTasks:
    """Finds what runs ask for, each request in its own task."""

    def __init__(self, runs: Runs, store: SqlStore, writer: Writer, solver: WorkerPool) -> None:
        self._runs = runs
        self._store = store
        self._writer = writer
        self._solver = solver
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closing = False

    async def close(self) -> None:
        """Cancel all solves."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def find_profile(self, run: LiveRun, machine: Machine, keys: Sequence[str]) -> None:
        """Give a run the known profiles of its stages' work."""
        self._begin(self._found_profile(run, machine, keys))

    async def _found_profile(self, run: LiveRun, machine: Machine, keys: Sequence[str]) -> None:
        await self._writer.flush()
        try:
            found = tuple(await self._store.known_profiles(keys))
        except DatabaseUnreadableError:
            return  # known profiles are only a help
        except Exception as error:
            # A failing store shows when it is written to.
            log.error(
                "known profiles can't be read", job_id=run.job_id, run_number=run.number, exc_info=error
            )
            return
        if found and self._runs.is_awaiting(run, machine):
            self._runs.handle(run, ProfileFound(found))

    def solve(self, run: LiveRun, machine: Machine, wanted: Solve) -> None:
        """Solve a run's problem for its frontier; a run has at most one problem at a time."""
        run.rebalancing = None  # it keeps the previous frontier
        report_retry = partial(self._report_retry, run, machine)
        run.solving = self._begin(
            self._solver.solve(
                wanted.problem,
                POINT_COUNT,
                slow=wanted.slow,
                set_latency_s=wanted.set_latency_s,
                job_id=run.job_id,
                on_retry=report_retry,
            )
        )
        run.solving.add_done_callback(partial(self._deliver, run, machine, Solved, SolveFailed))

    def refine(self, run: LiveRun, machine: Machine, refinement: Refinement) -> None:
        """Solve for a plan that a run wants; the run must have no other problem at that time."""
        report_retry = partial(self._report_retry, run, machine)
        run.solving = self._begin(self._solver.refine(refinement, run.job_id, report_retry))
        taken = partial(Refined, refinement), partial(RefineFailed, refinement)
        run.solving.add_done_callback(partial(self._deliver, run, machine, *taken))

    def _report_retry(
        self, run: LiveRun, machine: Machine, cause: str, crash_count: int, delay_s: float
    ) -> None:
        if self._runs.is_awaiting(run, machine):
            self._runs.handle(run, SolveRetried(cause, crash_count, delay_s))

    def _deliver(
        self,
        run: LiveRun,
        machine: Machine,
        done: Callable[[Any], Input],
        failed: Callable[[str], Input],
        solving: asyncio.Task[Any],
    ) -> None:
        """Give a run its frontier or its plan, or the reason why there is none."""
        if run.solving is solving:
            run.solving = None
        if self._is_closing or not self._runs.is_awaiting(run, machine):
            return
        if solving.cancelled():
            self._runs.handle(run, failed("its result was no longer needed"))
        elif (error := solving.exception()) is None:
            self._runs.handle(run, done(solving.result()))
        elif isinstance(error, LagError):
            self._runs.handle(run, LagNotFound(event_pb2.MeasurementsUnexplained(**error.times_s)))
        elif isinstance(error, SolverError | CoordinatorError):
            self._runs.handle(run, failed(str(error)))
        elif isinstance(error, Exception):
            self._runs.quarantine(run, FaultyPart.SOLVING, error)

    def _begin(self, work: Coroutine[None, None, Result]) -> asyncio.Task[Result]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
