"""Worker processes that solve problems, in fair turns (`fair_queue`), under one of two policies.

Jobs' problems (`JOBS`) wait as long as it takes, one of each job; a newer problem of a job replaces the
older. Nothing that happens to a worker fails a job at once. A problem whose worker died is solved again after
a while, longer from time to time; only when it has ended MAX_CRASHES workers it is given up. Other jobs go on
in the meantime.

Problems can't be interrupted, but they can be put back: one that takes longer than its turn makes way for
those that wait, and begins anew when its next turn comes, which is twice as long. So a large problem costs
the others no more than about what they take themselves, and all its turns together take at most some four
times as long as the problem. Alone, it just goes on.

What clients ask (`REQUESTS`) is done first come, first served: the queue is bounded, and a worker's death
fails what it was at.

Whoever leaves (cancels, or is past the deadline) takes the worker along: it is killed, and another one
started.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar

import structlog

from perseus.metrics.distribution import Distribution
from perseus.service.domain.commands import SlowPlan
from perseus.service.domain.errors import (
    InternalError,
    SolverBusyError,
    SolverCrashedError,
    SolverTimeoutError,
)
from perseus.service.solving.fair_queue import FairQueue
from perseus.service.solving.work import KEPT_FRONTIERS, plan_of, refine, solve_explaining
from perseus.service.solving.worker import Worker, WorkerDiedError, WorkError
from perseus.solver import Frontier, Pipeline, Plan, Refinement

Answer = TypeVar("Answer")

log = structlog.get_logger(__name__)

MAX_CRASHES = 8
"""Workers that one problem may end."""

MIN_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0

_POLL_INTERVAL_S = 1.0
"""How often a problem that has had its turn, and goes on, looks whether somebody came."""

_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)

OnRetry = Callable[[str, int, float], None]
"""Called with the cause, how many workers have died of the problem, and the seconds until its next turn."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What becomes of problems that wait, take long or end their worker.

    Attributes:
        first_turn_s: how long a problem is solved before it may be put back; infinite where it never is.
        max_waiting: problems per process that may wait; None for any number.
        retries: whether a problem whose worker died is solved again.
        starts_at_once: whether the workers start with the pool; otherwise with the first problems.
    """

    first_turn_s: float
    max_waiting: int | None
    retries: bool
    starts_immediately: bool


JOBS = Policy(first_turn_s=60.0, max_waiting=None, retries=True, starts_immediately=True)
REQUESTS = Policy(first_turn_s=math.inf, max_waiting=16, retries=False, starts_immediately=False)


@dataclass(slots=True, eq=False)
class _Problem:
    work: Callable[[Worker], Awaitable[Any]]
    on_retry: OnRetry | None
    answer: asyncio.Future[Any]
    turn_s: float
    is_gone: asyncio.Event = field(default_factory=asyncio.Event)
    worker: Worker | None = None
    crash_count: int = 0
    failed_start_count: int = 0
    attempt: asyncio.Task[float | None] | None = None


class WorkerPool:
    """Solves problems in its own worker processes.

    Attributes:
        solved: how long problems with an answer took, from asking to the answer.
        failure_count: problems that came to nothing; whoever no longer wanted one has not failed.
        crash_count: processes that died.
    """

    def __init__(
        self,
        policy: Policy,
        process_count: int,
        limit_s: float,
        *,
        hull_tolerance: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        new_worker: Callable[[], Worker] = Worker,
    ) -> None:
        """Let problems come; to be called while the event loop runs.

        Args:
            policy: `JOBS` or `REQUESTS`.
            process_count: problems solved at a time.
            limit_s: a problem that takes longer fails; waiting doesn't count.
            hull_tolerance: what frontiers are solved with (`perseus.solver.solve`).
            clock: any that never goes back.
            draw: a number from 0 to 1 by lot, for the jitter.
            new_worker: makes each of the workers.
        """
        self.solved = Distribution(_BOUNDS_S)
        self.failure_count = 0
        self.crash_count = 0
        self._policy = policy
        self._limit_s = limit_s
        self._hull_tolerance = hull_tolerance
        self._clock = clock
        self._random = draw
        self._queue = FairQueue()
        self._problems: dict[str, _Problem] = {}
        self._request_numbers = count(1)
        self._workers = [new_worker() for _ in range(process_count)]
        if policy.starts_immediately:
            for worker in self._workers:
                worker.start()
        self._idle = list(self._workers)
        self._wake: asyncio.TimerHandle | None = None

    @property
    def waiting_count(self) -> int:
        """How many problems wait for a turn."""
        return sum(problem.worker is None for problem in self._problems.values())

    @property
    def busy_count(self) -> int:
        """How many problems have theirs."""
        return len(self._problems) - self.waiting_count

    async def solve(
        self,
        problem: Pipeline,
        point_count: int,
        *,
        slow: SlowPlan | None = None,
        set_latency_s: float = 0.0,
        job_id: str | None = None,
        on_retry: OnRetry | None = None,
    ) -> Frontier:
        """Solve a problem (`work.solve_explaining`). If cancelled, nothing of it is left.

        An older problem of the same job makes way: whoever waits for it is cancelled.

        Raises:
            SolverError: the problem can't be solved.
            SolverBusyError: too many wait.
            SolverCrashedError: a worker died of it, where problems are retried too many.
            SolverTimeoutError: it takes longer than the limit.
            InternalError: the solver has a fault.
        """

        def work(worker: Worker) -> Awaitable[Frontier]:
            arguments = problem, point_count, slow, set_latency_s, self._hull_tolerance
            return worker.run(solve_explaining, *arguments)

        return await self._do(work, job_id, on_retry)

    async def refine(self, refinement: Refinement, job_id: str, on_retry: OnRetry) -> Plan:
        """Refine a plan of a job's frontier. In everything else as `solve`."""
        return await self._do(lambda worker: worker.run(refine, refinement), job_id, on_retry)

    async def plan(self, frontier: Frontier, iteration_time_s: float) -> Plan:
        """Return a plan of a frontier (`Frontier.plan`). In everything else as `solve`.

        Raises:
            DeadlineError: no plan is as fast as that.
        """

        async def work(worker: Worker) -> Plan:
            """Make it; the frontier goes to the process only if that does not know it."""
            await worker.ready()
            known = worker.known.pop(id(frontier), None)
            worker.known[id(frontier)] = frontier
            while len(worker.known) > KEPT_FRONTIERS:
                worker.known.popitem(last=False)
            sent = frontier if known is None else None
            return await worker.run(plan_of, id(frontier), sent, iteration_time_s)

        return await self._do(work)

    def close(self) -> None:
        """End the workers."""
        if self._wake is not None:
            self._wake.cancel()
        for worker in self._workers:
            worker.close()

    async def _do(
        self,
        work: Callable[[Worker], Awaitable[Answer]],
        job_id: str | None = None,
        on_retry: OnRetry | None = None,
    ) -> Answer:
        began_s = self._clock()
        try:
            answer = await self._answer(work, job_id or f"request {next(self._request_numbers)}", on_retry)
        except Exception:
            self.failure_count += 1
            raise
        self.solved.add(self._clock() - began_s)
        return answer

    async def _answer(
        self, work: Callable[[Worker], Awaitable[Answer]], key: str, on_retry: OnRetry | None
    ) -> Answer:
        while (older := self._problems.get(key)) is not None:
            older.answer.cancel()
            await older.is_gone.wait()
        if (per_process := self._policy.max_waiting) is not None and not self._idle:
            limit = per_process * len(self._workers)
            if self.waiting_count >= limit:
                raise SolverBusyError(limit=limit)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        problem = self._problems[key] = _Problem(work, on_retry, answer, self._policy.first_turn_s)
        self._queue.put(key)
        self._dispatch()
        try:
            return await answer
        finally:
            if problem.attempt is not None:
                problem.attempt.cancel()
                # Its worker is free, and the job may come again, only after that.
                await asyncio.gather(problem.attempt, return_exceptions=True)
            self._queue.remove(key)
            del self._problems[key]
            problem.is_gone.set()

    def _dispatch(self) -> None:
        """Give turns to those that are ready, as long as there are workers; look again when others are."""
        while self._idle and (key := self._queue.take(self._clock())) is not None:
            self._attempt(key, self._problems[key], self._idle.pop(0))
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        ready_s = self._queue.next_ready_s()
        if self._idle and ready_s is not None:
            delay_s = max(0.0, ready_s - self._clock())
            self._wake = asyncio.get_running_loop().call_later(delay_s, self._dispatch)

    def _attempt(self, key: str, problem: _Problem, worker: Worker) -> None:
        """Give a problem its turn, and then its caller the answer, or the problem another turn."""
        began_s, problem.worker = self._clock(), worker
        # Whatever becomes of the task, even if it is cancelled before it begins, all is in order then.
        problem.attempt = asyncio.get_running_loop().create_task(self._take_turn(key, problem, worker))
        problem.attempt.add_done_callback(partial(self._end_attempt, key, problem, worker, began_s))

    def _end_attempt(
        self,
        key: str,
        problem: _Problem,
        worker: Worker,
        began_s: float,
        attempt: asyncio.Task[float | None],
    ) -> None:
        has_turns = math.isfinite(self._policy.first_turn_s)  # else it is first come, first served
        self._queue.end(key, self._clock() - began_s if has_turns else 0.0)
        self._idle.append(worker)
        problem.attempt = problem.worker = None
        if not attempt.cancelled() and not problem.answer.done():
            if (error := attempt.exception()) is not None:
                problem.answer.set_exception(error)
            elif (again_s := attempt.result()) is not None:
                self._queue.put(key, again_s)
        self._dispatch()

    async def _take_turn(self, key: str, problem: _Problem, worker: Worker) -> float | None:
        """Solve a problem for as long as its turn is. Return when it is to have another, if it is to."""
        work = asyncio.ensure_future(problem.work(worker))
        try:
            if not await self._is_done_in_turn(work, problem.turn_s):
                problem.turn_s *= 2
                log.info("problem is put back", job_id=key, next_turn_s=problem.turn_s)
                return self._clock()
            answer = work.result()
            if not problem.answer.done():
                problem.answer.set_result(answer)
            return None
        except WorkerDiedError as error:
            self.crash_count += 1
            if not self._policy.retries:
                raise SolverCrashedError(cause=error) from None
            return self._clock() + self._backoff_s(key, problem, error)
        except WorkError as error:
            raise InternalError(cause=error) from None
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def _backoff_s(self, key: str, problem: _Problem, error: WorkerDiedError) -> float:
        """Return how long a problem waits whose worker died.

        Raises:
            SolverCrashedError: too many workers died of it.
        """
        problem.crash_count += error.is_of_its_work
        problem.failed_start_count += not error.is_of_its_work
        if problem.crash_count >= MAX_CRASHES:
            cause = f"{error}; it ended {problem.crash_count} of this problem's workers"
            raise SolverCrashedError(cause=cause) from None
        times = problem.crash_count + problem.failed_start_count
        delay_s = self._random() * min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(times - 1, 10))
        log.warning(
            "solver's process died",
            job_id=key,
            cause=str(error),
            count=problem.crash_count,
            retry_s=delay_s,
        )
        if error.is_of_its_work and problem.on_retry is not None:
            problem.on_retry(str(error), problem.crash_count, delay_s)
        return delay_s

    async def _is_done_in_turn(self, work: asyncio.Future[Any], turn_s: float) -> bool:
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
            left_s = turn_s - spent_s if spent_s < turn_s else _POLL_INTERVAL_S
            await asyncio.wait({work}, timeout=min(left_s, self._limit_s - spent_s))
        return True
