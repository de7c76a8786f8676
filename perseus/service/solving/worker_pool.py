"""Workers that solve problems, in fair turns (`fair_queue`), under one of three policies.

Jobs' problems (`JOBS`) wait as long as it takes, at most one per job; a job's newer problem replaces its
older one. A worker's death does not fail a job at once: the problem is solved again after a backoff that
grows each time, and given up only after it has killed `max_crashes` workers. Other jobs continue in the
meantime.

Problems can't be paused, but they can be restarted: a problem that exceeds its turn makes way for waiting
ones and starts over at its next turn, which is twice as long. So a large problem delays the others by no more
than about their own solving time, and all its turns together take at most some four times as long as the
problem itself. If no other problem waits, it keeps running.

Clients' requests (`REQUESTS`) are served in order of arrival: the queue is bounded, and a worker's death
fails the request that it was working on.

A command's work (`BATCH`) is done in order, and once more if its worker dies.

Workers are processes, or on a Dask cluster (`dask_cluster`) while that is there. Work that a cluster takes
with it when it goes away is done again, by processes.

When a caller cancels or exceeds its deadline, its worker is killed and replaced.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
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
from perseus.service.solving.dask_cluster import ClusterLostError, DaskCluster, DaskWorker
from perseus.service.solving.fair_queue import FairQueue
from perseus.service.solving.work import KEPT_FRONTIERS, plan_of, rebalancing_of, refine, solve_explaining
from perseus.service.solving.worker import Worker, WorkerDiedError, WorkError
from perseus.solver import Frontier, Pipeline, Plan, Refinement
from perseus.v1 import frontier_pb2

Answer = TypeVar("Answer")

log = structlog.get_logger(__name__)

MIN_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0

_POLL_INTERVAL_S = 1.0
"""How often the pool checks for waiting problems while one runs beyond its turn."""

_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)

OnRetry = Callable[[str, int, float], None]
"""Called with the cause, how many workers the problem has killed, and the seconds until its next turn."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How a pool treats problems that wait, take long or kill their worker.

    Attributes:
        first_turn_s: how long a problem runs before it may be put back in the queue; infinite for never.
        max_waiting: problems per process that may wait; None for any number.
        max_crashes: workers that one problem may kill; before the last, it is solved again.
        starts_immediately: whether the workers start with the pool; otherwise with the first problems.
    """

    first_turn_s: float
    max_waiting: int | None
    max_crashes: int
    starts_immediately: bool


JOBS = Policy(first_turn_s=60.0, max_waiting=None, max_crashes=8, starts_immediately=True)
REQUESTS = Policy(first_turn_s=math.inf, max_waiting=16, max_crashes=1, starts_immediately=False)
BATCH = Policy(first_turn_s=math.inf, max_waiting=None, max_crashes=2, starts_immediately=False)


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
        solved: how long solved problems took, from the request to the result.
        failure_count: problems that failed; cancelled ones don't count.
        crash_count: processes that died.
    """

    def __init__(
        self,
        policy: Policy,
        process_count: int,
        limit_s: float,
        *,
        hull_tolerance: float | None = None,
        cluster: DaskCluster | None = None,
        cluster_share: Callable[[int], int] = lambda thread_count: thread_count,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        new_worker: Callable[[], Worker] = Worker,
    ) -> None:
        """Create a pool while the event loop runs.

        Args:
            policy: `JOBS` or `REQUESTS`.
            process_count: problems solved at a time.
            limit_s: a problem that takes longer fails; waiting doesn't count.
            hull_tolerance: passed to `perseus.solver.solve`.
            cluster: solves instead of the processes, while it is there.
            cluster_share: returns how many problems it solves at a time, with so many threads.
            clock: any monotonic clock.
            draw: returns a random number from 0 to 1, for the jitter.
            new_worker: creates each worker.
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
        self._cluster, self._cluster_share = cluster, cluster_share
        self._elsewhere_count = 0
        if cluster is not None:
            cluster.listeners.append(self._dispatch)
        self._wake: asyncio.TimerHandle | None = None

    @property
    def waiting_count(self) -> int:
        """The number of problems that wait for a turn."""
        return sum(problem.worker is None for problem in self._problems.values())

    @property
    def cluster_thread_count(self) -> int:
        """The threads of the Dask cluster that solves; 0 while the processes do."""
        return 0 if self._cluster is None else self._cluster.thread_count

    @property
    def busy_count(self) -> int:
        """The number of problems that have a turn."""
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
        """Solve a problem (`work.solve_explaining`). Cancelling the call removes it entirely.

        An older problem of the same job is replaced: its caller is cancelled.

        Raises:
            SolverError: the problem can't be solved.
            SolverBusyError: too many problems wait.
            SolverCrashedError: the problem killed its worker; with retries, too many workers.
            SolverTimeoutError: it takes longer than the limit.
            InternalError: the solver has a bug.
        """

        def work(worker: Worker) -> Awaitable[Frontier]:
            arguments = problem, point_count, slow, set_latency_s, self._hull_tolerance
            return worker.run(solve_explaining, *arguments)

        return await self._do(work, job_id, on_retry)

    async def run(self, work: Callable[..., Answer], *arguments: object) -> Answer:
        """Run a function with arguments that can be pickled; otherwise like `solve`."""
        return await self._do(lambda worker: worker.run(work, *arguments))

    async def refine(self, refinement: Refinement, job_id: str, on_retry: OnRetry) -> Plan:
        """Refine a plan of a job's frontier; otherwise like `solve`."""
        return await self._do(lambda worker: worker.run(refine, refinement), job_id, on_retry)

    async def plan(self, frontier: Frontier, iteration_time_s: float) -> Plan:
        """Return a plan of a frontier (`Frontier.plan`); otherwise like `solve`.

        Raises:
            DeadlineError: no plan is that fast.
        """

        async def work(worker: Worker) -> Plan:
            # The frontier is sent only if the process does not keep it.
            await worker.ready()
            known = worker.known.pop(id(frontier), None)
            worker.known[id(frontier)] = frontier
            while len(worker.known) > KEPT_FRONTIERS:
                worker.known.popitem(last=False)
            sent = frontier if known is None else None
            return await worker.run(plan_of, id(frontier), sent, iteration_time_s)

        return await self._do(work)

    async def rebalancing(self, frontier: Frontier, layers: Sequence[int]) -> frontier_pb2.Rebalancing:
        """Return what moving layers would bring (`perseus.solver.rebalance`); otherwise like `solve`."""
        return await self._do(lambda worker: worker.run(rebalancing_of, frontier, layers))

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
        if (per_process := self._policy.max_waiting) is not None and self._free_count() <= 0:
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
                # Only then is its worker free, and may the job's next problem start.
                await asyncio.gather(problem.attempt, return_exceptions=True)
            self._queue.remove(key)
            del self._problems[key]
            problem.is_gone.set()

    def _dispatch(self) -> None:
        """Give turns to ready problems while workers are idle; schedule the next dispatch."""
        while self._free_count() > 0 and (key := self._queue.take(self._clock())) is not None:
            self._attempt(key, self._problems[key], self._worker())
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        ready_s = self._queue.next_ready_s()
        if self._free_count() > 0 and ready_s is not None:
            delay_s = max(0.0, ready_s - self._clock())
            self._wake = asyncio.get_running_loop().call_later(delay_s, self._dispatch)

    def _free_count(self) -> int:
        """Return how many problems may get a turn now."""
        if not self.cluster_thread_count:
            return len(self._idle)
        return self._cluster_share(self.cluster_thread_count) - self._elsewhere_count

    def _worker(self) -> Worker:
        if self._cluster is not None and self._cluster.thread_count:
            self._elsewhere_count += 1
            return DaskWorker(self._cluster)
        return self._idle.pop(0)

    def _attempt(self, key: str, problem: _Problem, worker: Worker) -> None:
        """Give a problem its turn; afterwards return its answer or queue it again."""
        began_s, problem.worker = self._clock(), worker
        # The callback cleans up even if the task is cancelled before it begins.
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
        has_turns = math.isfinite(self._policy.first_turn_s)  # otherwise in order of arrival
        self._queue.end(key, self._clock() - began_s if has_turns else 0.0)
        if isinstance(worker, DaskWorker):
            self._elsewhere_count -= 1
        else:
            self._idle.append(worker)
        problem.attempt = problem.worker = None
        if not attempt.cancelled() and not problem.answer.done():
            if (error := attempt.exception()) is not None:
                problem.answer.set_exception(error)
            elif (again_s := attempt.result()) is not None:
                self._queue.put(key, again_s)
        self._dispatch()

    async def _take_turn(self, key: str, problem: _Problem, worker: Worker) -> float | None:
        """Solve a problem within its turn. Return when its next turn may be; None if it needs none."""
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
        except ClusterLostError:
            return self._clock()
        except WorkerDiedError as error:
            self.crash_count += 1
            if self._policy.max_crashes == 1:
                raise SolverCrashedError(cause=error) from None
            return self._clock() + self._backoff_s(key, problem, error)
        except WorkError as error:
            raise InternalError(cause=error) from None
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def _backoff_s(self, key: str, problem: _Problem, error: WorkerDiedError) -> float:
        """Return how long a problem must wait after its worker died.

        Raises:
            SolverCrashedError: it killed too many workers.
        """
        problem.crash_count += error.is_of_its_work
        problem.failed_start_count += not error.is_of_its_work
        if problem.crash_count >= self._policy.max_crashes:
            cause = f"{error}; the problem killed {problem.crash_count} workers"
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
        """Wait for the work until the turn is over and another problem is ready; return whether it is done.

        Raises:
            SolverTimeoutError: it was not done within the limit.
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
