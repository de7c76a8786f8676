"""Both lanes with real processes: answers and errors come back, and what ends a worker ends nothing else."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from perseus.service.domain.commands import SlowPlan
from perseus.service.domain.errors import SolverBusyError, SolverCrashedError, SolverTimeoutError
from perseus.service.solving import job_lane
from perseus.service.solving.job_lane import JobLane
from perseus.service.solving.request_lane import MOST_WAITING, RequestLane
from perseus.service.solving.work import POINT_COUNT, solve_explaining
from perseus.service.solving.worker import Worker, WorkerDiedError, WorkError
from perseus.solver import (
    DeadlineError,
    Frontier,
    LagError,
    Pipeline,
    SolverError,
    common_lag_s,
    plan_at,
    replay,
    solve,
    with_lag,
)
from tests.service.solving.problems import large_problem, make_problem, until


@pytest.fixture(scope="module")
def jobs() -> Iterator[JobLane]:
    lane = JobLane(1, 600.0, turn_s=0.5, draw=lambda: 0.0)
    yield lane
    lane.close()


@pytest.fixture(scope="module")
def requests() -> Iterator[RequestLane]:
    lane = RequestLane(1, 600.0)
    yield lane
    lane.close()


class Retries(list[tuple[str, int, float]]):
    """What a job was told."""

    def __call__(self, cause: str, crash_count: int, delay_s: float) -> None:
        self.append((cause, crash_count, delay_s))


def solving(
    lane: JobLane, job_id: str, problem: Pipeline, retries: Retries | None = None
) -> asyncio.Task[Frontier]:
    return asyncio.create_task(lane.solve(job_id, problem, None, Retries() if retries is None else retries))


def kill(process_id: int | None) -> None:
    assert process_id is not None
    os.kill(process_id, signal.SIGKILL)


# ---------------------------------------------------------------------- answers


async def test_a_problem_is_solved_elsewhere_as_here(jobs: JobLane, requests: RequestLane) -> None:
    problem = make_problem()
    here = solve(problem)
    there = await jobs.solve("job", problem, None, Retries())
    assert there.points == here.points
    assert there.plan_within(there.t_slow_s) == here.plan_within(here.t_slow_s)
    assert (await requests.solve(problem, 100)).points == here.points


async def test_frontiers_are_solved_with_the_tolerance_that_is_set() -> None:
    problem = make_problem()
    jobs, requests = JobLane(1, 600.0, hull_tolerance=0.1), RequestLane(1, 600.0, hull_tolerance=0.1)
    try:
        of_job = await jobs.solve("job", problem, None, Retries())
        asked = await requests.solve(problem, POINT_COUNT)
    finally:
        jobs.close()
        requests.close()
    exact, coarse = solve_explaining(problem), solve_explaining(problem, hull_tolerance=0.1)
    assert of_job.points == asked.points == coarse.points
    time_s = (exact.t_min_s + exact.t_slow_s) / 2
    assert 0.9 * exact.bound_energy_j(time_s) <= coarse.bound_energy_j(time_s) < exact.bound_energy_j(time_s)


async def test_an_exact_plan_is_made_elsewhere_as_here(jobs: JobLane) -> None:
    frontier = solve(make_problem(), point_count=3)
    refinement = frontier.refinement(1.03 * frontier.t_min_s)
    there = await jobs.refine("job", refinement, Retries())
    assert there == refinement.plan() == frontier.plan(1.03 * frontier.t_min_s)
    assert frontier.plan_within(1.03 * frontier.t_min_s) != there, "no point of the frontier"


async def test_an_exact_plan_makes_way_for_a_frontier_of_its_job(jobs: JobLane) -> None:
    frontier = solve(make_problem(), point_count=3)
    refinement = frontier.refinement(1.03 * frontier.t_min_s)
    refining = asyncio.create_task(jobs.refine("job", refinement, Retries()))
    await asyncio.sleep(0)
    assert (await jobs.solve("job", make_problem(), None, Retries())).t_min_s == frontier.t_min_s
    with pytest.raises(asyncio.CancelledError):
        await refining


async def test_the_solvers_error_comes_back(jobs: JobLane, requests: RequestLane) -> None:
    with pytest.raises(SolverError, match="found 1") as caught:
        await requests.solve(make_problem(), 1)
    assert caught.value.details == {"found": "1"}
    problem = make_problem()
    stock = solve(problem, point_count=3).baseline
    plan, real = plan_at(problem, stock.iteration_time_s), with_lag(problem, 0.004)
    slow_s, stock_s = (replay(real, some.clocks_mhz).iteration_time_s for some in (plan, stock))
    slow = SlowPlan(plan, slow_s, stock_s)
    there, here = await jobs.solve("job", problem, slow, Retries()), solve_explaining(problem, slow=slow)
    assert common_lag_s(there.pipeline) == common_lag_s(here.pipeline) > 0
    assert there.points == here.points
    with pytest.raises(LagError, match="no lag between stages explains") as unexplained:
        await jobs.solve("job", problem, SlowPlan(plan, 10 * slow_s, stock_s), Retries())
    predicted_s, predicted_stock_s = (
        replay(problem, some.clocks_mhz).iteration_time_s for some in (plan, stock)
    )
    assert unexplained.value.times_s == pytest.approx(
        {
            "median_time_s": 10 * slow_s,
            "baseline_time_s": stock_s,
            "predicted_time_s": predicted_s,
            "predicted_baseline_time_s": predicted_stock_s,
            "residual_s": 10 * slow_s - stock_s - (predicted_s - predicted_stock_s),
            "transfer_lag_s": 0.0,
        }
    )


async def test_plans_are_made_elsewhere_as_here_and_frontiers_go_there_once(requests: RequestLane) -> None:
    frontiers = [solve(make_problem(2, microbatches), point_count=5) for microbatches in range(2, 9)]
    worker = requests._slots[0].worker
    sent: list[bool] = []
    run = worker.run

    async def noting(work: object, *arguments: object) -> object:
        sent.append(arguments[1] is not None)
        return await run(work, *arguments)  # type: ignore[arg-type]

    worker.run = noting  # type: ignore[method-assign, assignment]
    for frontier in (*frontiers[:3], *frontiers[:3]):
        time_s = 1.05 * frontier.t_min_s
        assert await requests.plan(frontier, time_s) == frontier.plan(time_s)
    assert sent == [True, True, True, False, False, False]
    with pytest.raises(DeadlineError):
        await requests.plan(frontiers[0], 0.5 * frontiers[0].t_min_s)
    assert sent.pop() is False
    for frontier in (*frontiers[3:], frontiers[0]):  # More than the process remembers.
        assert await requests.plan(frontier, frontier.t_min_s) == frontier.plan(frontier.t_min_s)
    assert sent[-5:] == [True] * 5
    kill(worker.process_id)
    await until(lambda: not worker.is_alive)
    assert await requests.plan(frontiers[0], frontiers[0].t_min_s) == frontiers[0].plan(frontiers[0].t_min_s)
    assert sent[-1] is True


# ---------------------------------------------------------------------- jobs


async def test_a_problem_whose_worker_dies_is_solved_again(jobs: JobLane) -> None:
    retries = Retries()
    for _ in range(3):
        task = solving(jobs, "job", make_problem(2, 24), retries)
        await until(lambda: jobs.busy_process_ids)
        kill(jobs.busy_process_ids["job"])
        assert (await task).points
    assert [(count, delay_s) for _, count, delay_s in retries] == [(1, 0.0)] * 3
    assert "SIGKILL" in retries[0][0]


async def test_a_problem_that_ends_every_worker_is_given_up_and_no_other(
    jobs: JobLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_lane, "MOST_CRASHES", 3)
    retries = Retries()
    poison = solving(jobs, "poison", large_problem(), retries)
    others = [solving(jobs, f"job-{number}", make_problem()) for number in range(3)]
    killed: set[int | None] = {None}
    while not poison.done():
        # A process whose turn ends just when it is killed does not count: the next one is killed as well.
        if (process_id := jobs.busy_process_ids.get("poison")) not in killed:
            kill(process_id)
            killed.add(process_id)
        await asyncio.sleep(0.01)
    with pytest.raises(SolverCrashedError, match="3 of this problem"):
        await poison
    assert [count for _, count, _ in retries] == [1, 2]
    for other in others:
        assert (await other).points


async def test_retries_wait_longer_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = JobLane(1, 600.0, draw=lambda: 1.0, clock=lambda: 0.0)
    waits_s: list[float] = []
    retries = Retries()
    put = lane._queue.put

    def put_now(key: str, not_before_s: float = 0.0) -> None:
        waits_s.append(not_before_s)
        put(key)

    async def die(*_arguments: object) -> Frontier:
        raise WorkerDiedError(-9, is_of_its_work=True)

    monkeypatch.setattr(lane._queue, "put", put_now)
    monkeypatch.setattr(lane._workers[0], "run", die)
    try:
        with pytest.raises(SolverCrashedError):
            await lane.solve("job", make_problem(), None, retries)
    finally:
        lane.close()
    assert [delay_s for _, _, delay_s in retries] == [1, 2, 4, 8, 16, 32, 60]
    assert waits_s == [0, 1, 2, 4, 8, 16, 32, 60]


async def test_a_worker_that_does_not_start_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = JobLane(1, 600.0, draw=lambda: 0.0)
    run, failures = lane._workers[0].run, 2 * job_lane.MOST_CRASHES

    async def not_start(*arguments: object) -> object:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise WorkerDiedError(1, is_of_its_work=False)
        return await run(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(lane._workers[0], "run", not_start)
    retries = Retries()
    try:
        assert (await lane.solve("job", make_problem(), None, retries)).points
    finally:
        lane.close()
    assert retries == []


async def test_a_large_problem_makes_way_for_small_ones(jobs: JobLane) -> None:
    large = solving(jobs, "large", large_problem())
    await until(lambda: jobs.busy_process_ids)
    for task in [solving(jobs, f"small-{number}", make_problem()) for number in range(4)]:
        assert (await task).points
    assert not large.done()
    assert jobs._wanted["large"].turn_s >= 1.0
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await large
    assert (await jobs.solve("large", make_problem(), None, Retries())).points


async def test_a_newer_problem_of_a_job_replaces_the_older(jobs: JobLane) -> None:
    older = solving(jobs, "job", large_problem())
    await until(lambda: jobs.busy_process_ids)
    newer = solving(jobs, "job", make_problem(2, 5))
    newest = solving(jobs, "job", make_problem(2, 6))
    assert [*(await newest).pipeline.schedule.orders[0]] == [*make_problem(2, 6).schedule.orders[0]]
    for replaced in (older, newer):
        with pytest.raises(asyncio.CancelledError):
            await replaced


async def test_a_problem_that_takes_longer_than_the_limit_fails() -> None:
    lane = JobLane(1, 0.5)
    try:
        with pytest.raises(SolverTimeoutError, match=r"longer than 0\.5 s"):
            await lane.solve("job", large_problem(), None, Retries())
        assert (lane.tally.solved.count, lane.tally.failure_count, lane.tally.crash_count) == (0, 1, 0)
    finally:
        lane.close()


async def test_nothing_is_left_of_what_is_cancelled_at_any_moment(jobs: JobLane) -> None:
    running = solving(jobs, "running", large_problem())
    waiting = solving(jobs, "waiting", make_problem())
    unborn = solving(jobs, "unborn", make_problem())
    unborn.cancel()
    await until(lambda: jobs.busy_process_ids)
    before = jobs.process_ids[0]
    for task in (waiting, running):
        task.cancel()
    await asyncio.gather(running, waiting, unborn, return_exceptions=True)
    assert jobs._wanted == {}
    assert len(jobs._queue) == 0
    assert jobs.busy_process_ids == {}
    assert jobs.process_ids[0] != before
    # Just taken, and not begun.
    taken = solving(jobs, "taken", make_problem())
    await asyncio.sleep(0)
    assert jobs._wanted["taken"].attempt is not None
    taken.cancel()
    await asyncio.gather(taken, return_exceptions=True)
    assert (await jobs.solve("taken", make_problem(), None, Retries())).points


# ---------------------------------------------------------------------- callers


async def test_who_leaves_takes_the_worker_along(requests: RequestLane) -> None:
    gone = asyncio.create_task(requests.solve(large_problem(), 1000))
    waiting = asyncio.create_task(requests.solve(make_problem(), 3))
    leaving = asyncio.create_task(requests.solve(make_problem(), 3))
    await until(lambda: not requests._idle and requests._slots[0].worker.is_ready)
    await asyncio.sleep(0.1)
    before = requests.process_ids[0]
    leaving.cancel()
    gone.cancel()
    assert (await waiting).points
    assert requests.process_ids[0] != before
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_what_takes_too_long_is_ended() -> None:
    lane = RequestLane(1, 2.0)
    try:
        with pytest.raises(SolverTimeoutError):
            await lane.solve(large_problem(), 1000)
        assert len(lane._idle) == 1
    finally:
        lane.close()


async def test_a_dead_worker_fails_its_caller_and_not_the_next(requests: RequestLane) -> None:
    tally = requests.tally
    before = (tally.solved.count, tally.failure_count, tally.crash_count)
    doomed = asyncio.create_task(requests.solve(large_problem(), 1000))
    await until(lambda: not requests._idle and requests._slots[0].worker.is_ready)
    assert (requests.busy_count, requests.waiting_count) == (1, 0)
    await asyncio.sleep(0.1)
    kill(requests.process_ids[0])
    with pytest.raises(SolverCrashedError, match="SIGKILL"):
        await doomed
    assert (await requests.solve(make_problem(), 3)).points
    now = (tally.solved.count, tally.failure_count, tally.crash_count)
    assert [after - earlier for after, earlier in zip(now, before, strict=True)] == [1, 1, 1]
    assert (requests.busy_count, requests.waiting_count) == (0, 0)


async def test_too_many_callers_are_refused(requests: RequestLane) -> None:
    tasks = [asyncio.create_task(requests.solve(make_problem(), 3)) for _ in range(MOST_WAITING + 2)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results if isinstance(result, Exception)] == [SolverBusyError]


async def test_the_loop_goes_on_while_a_problem_is_solved(requests: RequestLane) -> None:
    turns = 0
    solved = asyncio.create_task(requests.solve(make_problem(4, 16), 400))
    while not solved.done():
        await asyncio.sleep(0)
        turns += 1
    assert (await solved).points
    assert turns > 100


# ---------------------------------------------------------------------- workers


def fail_for_an_unknown_reason() -> None:
    raise ZeroDivisionError("nobody thought of it")


async def test_an_unexpected_error_is_told_and_the_worker_goes_on() -> None:
    worker = Worker()
    try:
        await worker.ready()
        before = worker.process_id
        with pytest.raises(WorkError, match="ZeroDivisionError: nobody thought of it"):
            await worker.run(fail_for_an_unknown_reason)
        assert await worker.run(os.getpid) == worker.process_id == before
    finally:
        worker.close()


async def test_a_worker_that_dies_idle_is_replaced_and_nobody_notices() -> None:
    worker = Worker()
    try:
        assert await worker.run(os.getpid) == worker.process_id
        kill(worker.process_id)
        await until(lambda: not worker.is_alive)
        assert await worker.run(os.getpid) == worker.process_id
    finally:
        worker.close()
