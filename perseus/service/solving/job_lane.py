"""The jobs' lane: their problems wait as long as it takes, one of each, and have fair turns (`fair_queue`).

A problem is a frontier to be solved for, or a plan of one to be made with all means.

Nothing that happens to a worker fails a job at once. A problem whose worker died is solved again after a
while, longer from time to time; only when it has ended MOST_CRASHES workers it is given up. Other jobs go on
in the meantime.

Problems can't be interrupted, but they can be put back: one that takes longer than its turn makes way for
those that wait, and begins anew when its next turn comes, which is twice as long. So a large problem costs
the others no more than about what they take themselves, and all its turns together take at most some four
times as long as the problem. Alone, it just goes on.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog

from perseus.service.domain.commands import SlowPlan
from perseus.service.domain.errors import InternalError, SolverCrashedError, SolverTimeoutError
from perseus.service.solving.fair_queue import FairQueue
from perseus.service.solving.tally import LaneTally
from perseus.service.solving.work import POINT_COUNT, refine, solve_explaining
from perseus.service.solving.worker import Answer, Worker, WorkerDiedError, WorkError
from perseus.solver import Frontier, Pipeline, Plan, Refinement

log = structlog.get_logger(__name__)

MOST_CRASHES = 8
"""Workers that one problem may end."""

LEAST_BACKOFF_S = 1.0
MOST_BACKOFF_S = 60.0

_FIRST_TURN_S = 60.0
_LOOK_ROUND_S = 1.0
"""How often a problem that has had its turn, and goes on, looks whether somebody came."""

OnRetry = Callable[[str, int, float], None]
"""Called with the cause, how many workers have died of the problem, and the seconds until its next turn."""


@dataclass(slots=True, eq=False)
class _Wanted:
    work: Callable[..., object]
    arguments: tuple[object, ...]
    on_retry: OnRetry
    answer: asyncio.Future[Any]
    turn_s: float
    is_gone: asyncio.Event = field(default_factory=asyncio.Event)
    worker: Worker | None = None
    crash_count: int = 0
    failed_start_count: int = 0
    attempt: asyncio.Task[float | None] | None = None


class JobLane:
    """Solves jobs' problems in its own worker processes.

    Attributes:
        tally: what became of them.
    """

    def __init__(
        self,
        process_count: int,
        limit_s: float,
        *,
        hull_tolerance: float | None = None,
        turn_s: float = _FIRST_TURN_S,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        new_worker: Callable[[], Worker] = Worker,
    ) -> None:
        """Start the workers; to be called while the event loop runs.

        Args:
            process_count: problems solved at a time.
            limit_s: a problem that takes longer fails.
            hull_tolerance: what frontiers are solved with (`perseus.solver.solve`).
            turn_s: how long the first turn of a problem is.
            clock: any that never goes back.
            draw: a number from 0 to 1 by lot, for the jitter.
            new_worker: makes each of the workers.
        """
        self.tally = LaneTally()
        self._limit_s = limit_s
        self._turn_s = turn_s
        self._hull_tolerance = hull_tolerance
        self._clock = clock
        self._draw = draw
        self._queue = FairQueue()
        self._wanted: dict[str, _Wanted] = {}
        self._workers = [new_worker() for _ in range(process_count)]
        for worker in self._workers:
            worker.start()
        self._idle = list(self._workers)
        self._wake: asyncio.TimerHandle | None = None

    @property
    def waiting_count(self) -> int:
        """How many problems wait for a turn."""
        return sum(wanted.worker is None for wanted in self._wanted.values())

    @property
    def busy_count(self) -> int:
        """How many problems have theirs."""
        return len(self._wanted) - self.waiting_count

    @property
    def process_ids(self) -> Sequence[int | None]:
        """Of the workers, as they are now."""
        return [worker.process_id for worker in self._workers]

    @property
    def busy_process_ids(self) -> Mapping[str, int | None]:
        """Of the workers that have begun with a problem, by job."""
        return {
            job_id: wanted.worker.process_id
            for job_id, wanted in self._wanted.items()
            if wanted.worker is not None and wanted.worker.is_ready
        }

    async def solve(
        self,
        job_id: str,
        problem: Pipeline,
        slow: SlowPlan | None,
        on_retry: OnRetry,
        set_latency_s: float = 0.0,
    ) -> Frontier:
        """Solve a job's problem (`work.solve_explaining`). If cancelled, nothing of it is left.

        An older problem of the job makes way: whoever waits for it is cancelled.

        Raises:
            SolverError: the problem can't be solved.
            SolverCrashedError: too many workers died of it.
            SolverTimeoutError: it takes longer than the limit.
            InternalError: the solver has a fault.
        """
        return await self._do(
            job_id,
            on_retry,
            solve_explaining,
            problem,
            POINT_COUNT,
            slow,
            set_latency_s,
            self._hull_tolerance,
        )

    async def refine(self, job_id: str, refinement: Refinement, on_retry: OnRetry) -> Plan:
        """Make a plan of a job's frontier with all means. In everything else as `solve`."""
        return await self._do(job_id, on_retry, refine, refinement)

    async def _do(
        self, job_id: str, on_retry: OnRetry, work: Callable[..., Answer], *arguments: object
    ) -> Answer:
        while (older := self._wanted.get(job_id)) is not None:
            older.answer.cancel()
            await older.is_gone.wait()
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        wanted = self._wanted[job_id] = _Wanted(work, arguments, on_retry, answer, self._turn_s)
        self._queue.put(job_id)
        self._dispatch()
        try:
            with self.tally.problem(self._clock):
                return await answer
        finally:
            if wanted.attempt is not None:
                wanted.attempt.cancel()
                # Its worker is free, and the job may come again, only after that.
                await asyncio.gather(wanted.attempt, return_exceptions=True)
            self._queue.remove(job_id)
            del self._wanted[job_id]
            wanted.is_gone.set()

    def close(self) -> None:
        """End the workers."""
        if self._wake is not None:
            self._wake.cancel()
        for worker in self._workers:
            worker.close()

    def _dispatch(self) -> None:
        """Give turns to those that are ready, as long as there are workers; look again when others are."""
        while self._idle and (job_id := self._queue.take(self._clock())) is not None:
            wanted = self._wanted[job_id]
            self._attempt(job_id, wanted, self._idle.pop(0))
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        ready_s = self._queue.next_ready_s()
        if self._idle and ready_s is not None:
            delay_s = max(0.0, ready_s - self._clock())
            self._wake = asyncio.get_running_loop().call_later(delay_s, self._dispatch)

    def _attempt(self, job_id: str, wanted: _Wanted, worker: Worker) -> None:
        """Give a problem its turn, and then its caller the answer, or the problem another turn."""
        began_s, wanted.worker = self._clock(), worker
        # Whatever becomes of the task, even if it is cancelled before it begins, all is in order then.
        wanted.attempt = asyncio.get_running_loop().create_task(self._take_turn(job_id, wanted, worker))
        wanted.attempt.add_done_callback(partial(self._end_attempt, job_id, wanted, worker, began_s))

    def _end_attempt(
        self,
        job_id: str,
        wanted: _Wanted,
        worker: Worker,
        began_s: float,
        attempt: asyncio.Task[float | None],
    ) -> None:
        self._queue.end(job_id, self._clock() - began_s)
        self._idle.append(worker)
        wanted.attempt = wanted.worker = None
        if not attempt.cancelled() and not wanted.answer.done():
            if (error := attempt.exception()) is not None:
                wanted.answer.set_exception(error)
            elif (again_s := attempt.result()) is not None:
                self._queue.put(job_id, again_s)
        self._dispatch()

    async def _take_turn(self, job_id: str, wanted: _Wanted, worker: Worker) -> float | None:
        """Solve a problem for as long as its turn is. Return when it is to have another, if it is to."""
        work = asyncio.ensure_future(worker.run(wanted.work, *wanted.arguments))
        try:
            if not await self._is_done_in_turn(work, wanted.turn_s):
                wanted.turn_s *= 2
                log.info("problem is put back", job_id=job_id, next_turn_s=wanted.turn_s)
                return self._clock()
            answer = work.result()
            if not wanted.answer.done():
                wanted.answer.set_result(answer)
            return None
        except WorkerDiedError as error:
            self.tally.crash_count += 1
            wanted.crash_count += error.is_of_its_work
            wanted.failed_start_count += not error.is_of_its_work
            if wanted.crash_count >= MOST_CRASHES:
                cause = f"{error}; it ended {wanted.crash_count} of this problem's workers"
                raise SolverCrashedError(cause=cause) from None
            times = wanted.crash_count + wanted.failed_start_count
            delay_s = self._draw() * min(MOST_BACKOFF_S, LEAST_BACKOFF_S * 2.0 ** min(times - 1, 10))
            log.warning(
                "solver's process died",
                job_id=job_id,
                cause=str(error),
                count=wanted.crash_count,
                retry_s=delay_s,
            )
            if error.is_of_its_work:
                wanted.on_retry(str(error), wanted.crash_count, delay_s)
            return self._clock() + delay_s
        except WorkError as error:
            raise InternalError(cause=error) from None
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _is_done_in_turn(self, work: asyncio.Future[object], turn_s: float) -> bool:
        """Wait for an answer until the turn is over and somebody else is ready.

        Raises:
            SolverTimeoutError: there was none within the limit.
        """
        began_s = self._clock()
        while not work.done():
            spent_s = self._clock() - began_s
            if spent_s >= self._limit_s:
                raise SolverTimeoutError(limit_s=f"{self._limit_s:g}")
            if spent_s >= turn_s and self._queue.is_anybody_ready(self._clock()):
                return False
            left_s = turn_s - spent_s if spent_s < turn_s else _LOOK_ROUND_S
            await asyncio.wait({work}, timeout=min(left_s, self._limit_s - spent_s))
        return True
