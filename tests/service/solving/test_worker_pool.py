"""The pool under both policies, with workers that answer, die or wait as a test wants."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from perseus.service.domain.errors import (
    InternalError,
    SolverBusyError,
    SolverCrashedError,
    SolverTimeoutError,
)
from perseus.service.solving.work import POINT_COUNT, _frontiers, plan_of, refine, solve_explaining
from perseus.service.solving.worker import Answer, Worker, WorkerDiedError, WorkError
from perseus.service.solving.worker_pool import JOBS, REQUESTS, Policy, WorkerPool
from perseus.solver import Frontier, Pipeline, SolverError, solve
from tests.service.solving.problems import make_problem, until


class ScriptedWorker(Worker):
    """A worker without a process: a test answers in its place, or lets it do the work here."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self.answer: asyncio.Future[Any] | None = None
        self.works_itself = False
        self.start_count = 0

    @property
    def process_id(self) -> int | None:
        return self.start_count or None

    @property
    def is_alive(self) -> bool:
        return self.is_ready

    def start(self) -> None:
        self.start_count += 1
        self.is_ready = True
        self.known.clear()
        _frontiers.clear()

    async def ready(self) -> None:
        if not self.is_ready:
            self.start()

    async def run(self, work: Callable[..., Answer], *arguments: object) -> Answer:
        await self.ready()
        self.asked.append((work, arguments))
        if self.works_itself:
            return work(*arguments)
        self.answer = asyncio.get_running_loop().create_future()
        try:
            return await self.answer  # type: ignore[no-any-return]
        except (asyncio.CancelledError, WorkerDiedError):
            self.start()
            raise
        finally:
            self.answer = None

    async def begun(self, problem: Pipeline | None = None) -> None:
        """Wait until it has begun with a problem, or with the given one."""
        await until(lambda: self.answer is not None and problem in (None, self.asked[-1][1][0]))

    def end(self, answer: object) -> None:
        """End the present work with an answer or an error."""
        assert self.answer is not None
        if isinstance(answer, Exception):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)

    async def solve(self, task: "asyncio.Future[Any]", problem: Pipeline | None = None) -> None:
        """Work, once it has begun, and let the task have the result."""
        await self.begun(problem)
        self.end(FRONTIER)
        assert await task is FRONTIER


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Retries(list[tuple[str, int, float]]):
    """The retries that a job was notified of."""

    def __call__(self, cause: str, crash_count: int, delay_s: float) -> None:
        self.append((cause, crash_count, delay_s))


DIED = WorkerDiedError("ended by signal 9 (SIGKILL)", is_of_its_work=True)
PROBLEMS = [make_problem(2, microbatches) for microbatches in range(2, 6)]
FRONTIER = solve(make_problem(), point_count=3)


@pytest.fixture
def worker() -> ScriptedWorker:
    return ScriptedWorker()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def jobs(worker: ScriptedWorker, clock: Clock) -> WorkerPool:
    return WorkerPool(JOBS, 1, 600.0, clock=clock, draw=lambda: 0.0, new_worker=lambda: worker)


@pytest.fixture
def requests(worker: ScriptedWorker) -> WorkerPool:
    return WorkerPool(REQUESTS, 1, 600.0, new_worker=lambda: worker)


@pytest.fixture
def short_polls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorten waits: the pool waits in the loop's time, which a test can't advance."""
    wait = asyncio.wait

    async def wait_shortly(tasks: Any, **options: Any) -> Any:
        if options.get("timeout") is not None:
            options["timeout"] = min(options["timeout"], 0.01)
        return await wait(tasks, **options)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "wait", wait_shortly)
        yield


def solving(
    pool: WorkerPool, job_id: str, problem: Pipeline = PROBLEMS[0], retries: Retries | None = None
) -> asyncio.Task[Frontier]:
    on_retry = Retries() if retries is None else retries
    return asyncio.create_task(pool.solve(problem, POINT_COUNT, job_id=job_id, on_retry=on_retry))


# ---------------------------------------------------------------------- jobs


async def test_problems_are_solved_with_the_configured_tolerance(worker: ScriptedWorker) -> None:
    jobs = WorkerPool(JOBS, 1, 600.0, hull_tolerance=0.1, new_worker=lambda: worker)
    requests = WorkerPool(REQUESTS, 1, 600.0, hull_tolerance=0.1, new_worker=lambda: worker)
    problem, refinement = make_problem(), FRONTIER.refinement(1.03 * FRONTIER.t_min_s)
    for asked in (
        jobs.solve(problem, POINT_COUNT, set_latency_s=0.001, job_id="job", on_retry=Retries()),
        jobs.refine(refinement, "job", Retries()),
        requests.solve(problem, 5),
    ):
        task = asyncio.ensure_future(asked)
        await worker.solve(task)
    assert worker.asked == [
        (solve_explaining, (problem, POINT_COUNT, None, 0.001, 0.1)),
        (refine, (refinement,)),
        (solve_explaining, (problem, 5, None, 0.0, 0.1)),
    ]


async def test_an_exact_plan_makes_way_for_a_frontier_of_its_job(
    jobs: WorkerPool, worker: ScriptedWorker
) -> None:
    refinement = FRONTIER.refinement(1.03 * FRONTIER.t_min_s)
    refining = asyncio.create_task(jobs.refine(refinement, "job", Retries()))
    await worker.begun()
    solved = solving(jobs, "job")
    await worker.solve(solved, PROBLEMS[0])
    with pytest.raises(asyncio.CancelledError):
        await refining


UNSOLVABLE = SolverError("no such thing", found="1")
BROKEN = WorkError("ZeroDivisionError: an unexpected fault")


@pytest.mark.parametrize("policy", [JOBS, REQUESTS], ids=["jobs", "requests"])
@pytest.mark.parametrize(
    ("error", "kind"), [(UNSOLVABLE, SolverError), (BROKEN, InternalError)], ids=["the solver's", "a fault"]
)
async def test_an_error_comes_back(
    worker: ScriptedWorker, policy: Policy, error: Exception, kind: type[Exception]
) -> None:
    pool = WorkerPool(policy, 1, 600.0, new_worker=lambda: worker)
    job_id = "job" if policy is JOBS else None
    asked = asyncio.ensure_future(pool.solve(PROBLEMS[0], 1, job_id=job_id))
    await worker.begun()
    worker.end(error)
    with pytest.raises(kind, match=str(error).rpartition(": ")[2]) as caught:
        await asked
    assert (caught.value is error) == (kind is SolverError)
    assert (pool.failure_count, pool.crash_count) == (1, 0)


async def test_a_problem_whose_worker_dies_is_solved_again(jobs: WorkerPool, worker: ScriptedWorker) -> None:
    retries = Retries()
    for _ in range(3):
        task = solving(jobs, "job", PROBLEMS[0], retries)
        await worker.begun()
        assert (jobs.busy_count, jobs.waiting_count) == (1, 0)
        asked_count = len(worker.asked)
        worker.end(DIED)
        await until(lambda count=asked_count: len(worker.asked) > count)  # type: ignore[misc]
        worker.end(FRONTIER)
        assert await task is FRONTIER
    assert [(count, delay_s) for _, count, delay_s in retries] == [(1, 0.0)] * 3
    assert "SIGKILL" in retries[0][0]
    assert (jobs.solved.count, jobs.failure_count, jobs.crash_count) == (3, 0, 3)


async def test_only_a_problem_that_kills_every_worker_is_given_up(worker: ScriptedWorker) -> None:
    jobs = WorkerPool(replace(JOBS, max_crashes=3), 1, 600.0, draw=lambda: 0.0, new_worker=lambda: worker)
    retries = Retries()
    poison = solving(jobs, "poison", PROBLEMS[1], retries)
    others = [solving(jobs, f"job-{number}") for number in range(3)]
    while not poison.done() or not all(other.done() for other in others):
        await asyncio.sleep(0)
        if worker.answer is not None and not worker.answer.done():
            worker.end(DIED if worker.asked[-1][1][0] is PROBLEMS[1] else FRONTIER)
    with pytest.raises(SolverCrashedError, match="the problem killed 3 workers"):
        await poison
    assert [count for _, count, _ in retries] == [1, 2]
    for other in others:
        assert await other is FRONTIER


async def test_retries_wait_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = WorkerPool(JOBS, 1, 600.0, draw=lambda: 1.0, clock=lambda: 0.0, new_worker=ScriptedWorker)
    waits_s: list[float] = []
    retries = Retries()
    put = pool._queue.put

    def put_now(key: str, not_before_s: float = 0.0) -> None:
        waits_s.append(not_before_s)
        put(key)

    async def die(*_arguments: object) -> Frontier:
        raise DIED

    monkeypatch.setattr(pool._queue, "put", put_now)
    monkeypatch.setattr(pool._workers[0], "run", die)
    with pytest.raises(SolverCrashedError):
        await pool.solve(make_problem(), POINT_COUNT, job_id="job", on_retry=retries)
    assert [delay_s for _, _, delay_s in retries] == [1, 2, 4, 8, 16, 32, 60]
    assert waits_s == [0, 1, 2, 4, 8, 16, 32, 60]


async def test_a_worker_that_does_not_start_is_not_the_problems_fault(
    jobs: WorkerPool, worker: ScriptedWorker
) -> None:
    retries = Retries()
    task = solving(jobs, "job", PROBLEMS[0], retries)
    for asked_count in range(1, 2 * JOBS.max_crashes):
        await until(lambda count=asked_count: len(worker.asked) == count)  # type: ignore[misc]
        worker.end(WorkerDiedError("ended with exit code 1", is_of_its_work=False))
    await until(lambda: len(worker.asked) == 2 * JOBS.max_crashes)
    worker.end(FRONTIER)
    assert await task is FRONTIER
    assert retries == []


async def test_a_large_problem_makes_way_for_small_ones(
    short_polls: None, jobs: WorkerPool, worker: ScriptedWorker, clock: Clock
) -> None:
    large = solving(jobs, "large", PROBLEMS[3])
    await worker.begun()
    clock.now_s += 59.0
    small = [solving(jobs, f"small-{number}") for number in range(4)]
    await asyncio.sleep(0.05)
    assert worker.asked[-1][1][0] is PROBLEMS[3], "its turn is not over"
    clock.now_s += 1.0
    for task in small:
        await worker.solve(task, PROBLEMS[0])
    await worker.begun(PROBLEMS[3])
    assert not large.done()
    assert jobs._problems["large"].turn_s == 120.0
    clock.now_s += 200.0  # alone, it keeps running
    await asyncio.sleep(0.05)
    await worker.solve(large)


async def test_a_newer_problem_of_a_job_replaces_the_older(jobs: WorkerPool, worker: ScriptedWorker) -> None:
    older = solving(jobs, "job", PROBLEMS[0])
    await worker.begun()
    newer = solving(jobs, "job", PROBLEMS[1])
    newest = solving(jobs, "job", PROBLEMS[2])
    await worker.solve(newest, PROBLEMS[2])
    for replaced in (older, newer):
        with pytest.raises(asyncio.CancelledError):
            await replaced


async def test_a_problem_that_takes_longer_than_the_limit_fails(
    short_polls: None, jobs: WorkerPool, worker: ScriptedWorker, clock: Clock
) -> None:
    task = solving(jobs, "job")
    await worker.begun()
    clock.now_s += 600.0
    with pytest.raises(SolverTimeoutError, match="longer than 600 s"):
        await task
    assert (jobs.solved.count, jobs.failure_count, jobs.crash_count) == (0, 1, 0)


async def test_a_problem_cancelled_at_any_moment_leaves_nothing_behind(
    jobs: WorkerPool, worker: ScriptedWorker
) -> None:
    running = solving(jobs, "running")
    waiting = solving(jobs, "waiting")
    unborn = solving(jobs, "unborn")
    unborn.cancel()
    await worker.begun()
    before = worker.process_id
    for task in (waiting, running):
        task.cancel()
    await asyncio.gather(running, waiting, unborn, return_exceptions=True)
    assert jobs._problems == {}
    assert len(jobs._queue) == 0
    assert (jobs.busy_count, jobs.waiting_count) == (0, 0)
    assert worker.process_id != before
    # It has a turn, but has not begun.
    taken = solving(jobs, "taken")
    await asyncio.sleep(0)
    assert jobs._problems["taken"].attempt is not None
    taken.cancel()
    await asyncio.gather(taken, return_exceptions=True)
    await worker.solve(solving(jobs, "taken"))


# ---------------------------------------------------------------------- requests


class AnyFrontier:
    """A frontier whose plans cost nothing."""

    def plan(self, iteration_time_s: float) -> object:
        return (self, iteration_time_s)


async def test_a_frontier_is_sent_only_to_a_worker_that_does_not_keep_it(
    requests: WorkerPool, worker: ScriptedWorker
) -> None:
    worker.works_itself = True
    frontiers: list[Any] = [AnyFrontier() for _ in range(7)]

    async def is_sent(frontier: Any) -> bool:
        """Request a plan; return whether the frontier was sent."""
        made: object = await requests.plan(frontier, 1.0)
        assert made == (frontier, 1.0)
        work, arguments = worker.asked[-1]
        assert work is plan_of
        return arguments[1] is not None

    assert [await is_sent(some) for some in (*frontiers[:3], *frontiers[:3])] == 3 * [True] + 3 * [False]
    # More than the process keeps.
    assert [await is_sent(some) for some in (*frontiers[3:], frontiers[0])] == 5 * [True]
    assert not await is_sent(frontiers[0])
    worker.start()
    assert await is_sent(frontiers[0]), "the next process keeps none"


async def test_a_cancelled_caller_kills_its_worker(requests: WorkerPool, worker: ScriptedWorker) -> None:
    gone = asyncio.create_task(requests.solve(PROBLEMS[3], 1000))
    waiting = asyncio.create_task(requests.solve(PROBLEMS[0], 3))
    leaving = asyncio.create_task(requests.solve(PROBLEMS[1], 3))
    await worker.begun()
    before = worker.process_id
    leaving.cancel()
    gone.cancel()
    await worker.solve(waiting, PROBLEMS[0])
    assert worker.process_id != before
    with pytest.raises(asyncio.CancelledError):
        await gone


@pytest.mark.parametrize("turns", range(8))
async def test_a_caller_cancelled_as_a_worker_becomes_free_leaves_nothing_behind(
    requests: WorkerPool, worker: ScriptedWorker, turns: int
) -> None:
    first = asyncio.create_task(requests.solve(PROBLEMS[0], 3))
    leaving = asyncio.create_task(requests.solve(PROBLEMS[1], 3))
    await worker.begun()
    worker.end(FRONTIER)
    for _ in range(turns):  # of the loop; the worker is handed on in one of them
        await asyncio.sleep(0)
    leaving.cancel()
    assert await first is FRONTIER
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert (requests.busy_count, requests.waiting_count) == (0, 0)


async def test_a_request_beyond_the_time_limit_is_ended() -> None:
    pool = WorkerPool(REQUESTS, 1, 0.02, new_worker=ScriptedWorker)
    with pytest.raises(SolverTimeoutError):
        await pool.solve(PROBLEMS[0], 1000)
    assert len(pool._idle) == 1


async def test_a_dead_worker_fails_its_caller_and_not_the_next(
    requests: WorkerPool, worker: ScriptedWorker
) -> None:
    doomed = asyncio.create_task(requests.solve(PROBLEMS[3], 1000))
    await worker.begun()
    assert (requests.busy_count, requests.waiting_count) == (1, 0)
    worker.end(DIED)
    with pytest.raises(SolverCrashedError, match="SIGKILL"):
        await doomed
    await worker.solve(asyncio.create_task(requests.solve(PROBLEMS[0], 3)))
    assert (requests.solved.count, requests.failure_count, requests.crash_count) == (1, 1, 1)
    assert (requests.busy_count, requests.waiting_count) == (0, 0)


async def test_too_many_callers_are_refused(requests: WorkerPool, worker: ScriptedWorker) -> None:
    assert REQUESTS.max_waiting is not None
    tasks = [asyncio.create_task(requests.solve(PROBLEMS[0], 3)) for _ in range(REQUESTS.max_waiting + 2)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        if worker.answer is not None and not worker.answer.done():
            worker.end(FRONTIER)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results if isinstance(result, Exception)] == [SolverBusyError]
