"""The callers' lane: what clients ask of the solver, first come, first served, in workers of its own.

No job waits for it. Callers wait in a bounded queue, have a limit of time, and whoever leaves (cancels, or is
past the deadline) takes the worker along: it is killed, and another one started.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from perseus.service.domain.errors import (
    InternalError,
    SolverBusyError,
    SolverCrashedError,
    SolverTimeoutError,
)
from perseus.service.solving.tally import LaneTally
from perseus.service.solving.work import KEPT_FRONTIERS, plan_of, solve_explaining
from perseus.service.solving.worker import Worker, WorkerDiedError, WorkError
from perseus.solver import Frontier, Pipeline, Plan

Answer = TypeVar("Answer")

MOST_WAITING = 16
"""Callers per process that may wait."""


class _Slot:
    """A worker, and what its process remembers, oldest first.

    The frontiers are kept here: no other comes to be at the same address while one is known by it.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._generation = self.worker.generation
        self._known: OrderedDict[int, Frontier] = OrderedDict()

    async def plan(self, frontier: Frontier, iteration_time_s: float) -> Plan:
        """Return a plan of a frontier, which goes to the process only if that does not know it."""
        await self.worker.ready()
        known = self._note(frontier)
        return await self.worker.run(plan_of, id(frontier), None if known else frontier, iteration_time_s)

    def _note(self, frontier: Frontier) -> bool:
        """Whether the process has been given a frontier, as it will have been from now on."""
        if self._generation != self.worker.generation:
            self._generation = self.worker.generation
            self._known.clear()
        is_known = self._known.pop(id(frontier), None) is not None
        self._known[id(frontier)] = frontier
        while len(self._known) > KEPT_FRONTIERS:
            self._known.popitem(last=False)
        return is_known


class RequestLane:
    """Does what callers ask, a few things at a time.

    Attributes:
        tally: what became of it.
    """

    def __init__(
        self,
        process_count: int,
        limit_s: float,
        *,
        hull_tolerance: float | None = None,
        new_worker: Callable[[], Worker] = Worker,
    ) -> None:
        """Let callers come: the first ones start the workers.

        What takes longer than `limit_s`, waiting aside, is ended. Problems are solved with `hull_tolerance`.
        `new_worker` makes each of the workers.
        """
        self.tally = LaneTally()
        self._limit_s = limit_s
        self._hull_tolerance = hull_tolerance
        self._slots = [_Slot(new_worker()) for _ in range(process_count)]
        self._idle = deque(self._slots)
        self._waiting: deque[asyncio.Future[_Slot]] = deque()
        self._most_waiting = MOST_WAITING * process_count

    @property
    def waiting_count(self) -> int:
        """How many callers wait for a process."""
        return len(self._waiting)

    @property
    def busy_count(self) -> int:
        """How many have one."""
        return len(self._slots) - len(self._idle)

    @property
    def process_ids(self) -> Sequence[int | None]:
        """Of the workers, as they are now."""
        return [slot.worker.process_id for slot in self._slots]

    async def solve(self, problem: Pipeline, point_count: int) -> Frontier:
        """Solve a problem without a job.

        Raises:
            SolverError: the problem can't be solved.
            SolverBusyError: too many callers wait.
            SolverCrashedError, InternalError, SolverTimeoutError: it came to nothing.
        """
        with self.tally.problem(time.monotonic):
            async with self._slot() as slot:
                work = slot.worker.run(
                    solve_explaining, problem, point_count, None, 0.0, self._hull_tolerance
                )
                return await self._run(work)

    async def plan(self, frontier: Frontier, iteration_time_s: float) -> Plan:
        """Return a plan of a frontier (`Frontier.plan`).

        Raises:
            DeadlineError: no plan is as fast as that.
            SolverBusyError, SolverCrashedError, InternalError, SolverTimeoutError: as for `solve`.
        """
        with self.tally.problem(time.monotonic):
            async with self._slot() as slot:
                return await self._run(slot.plan(frontier, iteration_time_s))

    def close(self) -> None:
        """End the workers."""
        for slot in self._slots:
            slot.worker.close()

    async def _run(self, work: Coroutine[None, None, Answer]) -> Answer:
        try:
            return await asyncio.wait_for(work, self._limit_s)
        except TimeoutError:
            raise SolverTimeoutError(limit_s=f"{self._limit_s:g}") from None
        except WorkerDiedError as error:
            self.tally.crash_count += 1
            raise SolverCrashedError(cause=error) from None
        except WorkError as error:
            raise InternalError(cause=error) from None

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[_Slot]:
        slot = await self._take()
        try:
            yield slot
        finally:
            self._hand_on(slot)

    async def _take(self) -> _Slot:
        if self._idle:
            return self._idle.popleft()
        if len(self._waiting) >= self._most_waiting:
            raise SolverBusyError(limit=self._most_waiting)
        turn: asyncio.Future[_Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._hand_on(turn.result())
            elif turn in self._waiting:  # else it was passed over since, when a slot came free
                self._waiting.remove(turn)
            raise

    def _hand_on(self, slot: _Slot) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(slot)
                return
        self._idle.append(slot)
