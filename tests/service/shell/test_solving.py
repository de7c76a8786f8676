"""Solving in worker processes: errors come back, the loop goes on, a dead worker breaks nothing for long."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from perseus.service.domain.commands import SlowPlan
from perseus.service.domain.errors import SolverBusyError, SolverCrashedError
from perseus.service.domain.model import JobState
from perseus.service.job.profiling.stage_profiles import build_problem
from perseus.service.shell.solving import SolverPool
from perseus.solver import (
    LagError,
    Pipeline,
    SolverError,
    common_lag_s,
    one_forward_one_backward,
    plan_at,
    replay,
    solve,
    with_lag,
)
from tests.service.service_fakes import CLOCKS_MHZ, Cluster, make_spec


@pytest.fixture(scope="module")
def problem() -> Pipeline:
    cluster = Cluster(make_spec(microbatches=16))
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    schedule = one_forward_one_backward(2, 16)
    return build_problem(cluster.machine.profiler.profiles, schedule, (CLOCKS_MHZ,) * 2)


@pytest.fixture(scope="module")
def pool() -> Iterator[SolverPool]:
    pool = SolverPool(1)
    yield pool
    pool.close()


async def test_a_problem_is_solved_elsewhere_as_here(pool: SolverPool, problem: Pipeline) -> None:
    there, here = await pool.solve(problem, 5), solve(problem, point_count=5)
    assert there.points == here.points
    assert there.plan_within(there.t_slow_s) == here.plan_within(here.t_slow_s)


async def test_the_event_loop_goes_on_while_a_problem_is_solved(pool: SolverPool, problem: Pipeline) -> None:
    turns = 0
    solved = asyncio.create_task(pool.solve(problem, 400))
    while not solved.done():
        await asyncio.sleep(0)
        turns += 1
    assert (await solved).points
    assert turns > 100


async def test_the_solvers_error_comes_back(pool: SolverPool, problem: Pipeline) -> None:
    with pytest.raises(SolverError, match="found 1") as caught:
        await pool.solve(problem, 1)
    assert caught.value.details == {"found": "1"}


async def test_a_slow_plan_is_explained_elsewhere_as_here(pool: SolverPool, problem: Pipeline) -> None:
    stock = solve(problem, point_count=3).baseline
    plan, real = plan_at(problem, stock.iteration_time_s), with_lag(problem, 0.004)
    slow_s, stock_s = (replay(real, some.clocks_mhz).iteration_time_s for some in (plan, stock))
    there = await pool.solve(problem, 5, SlowPlan(plan, slow_s, stock_s))
    assert common_lag_s(there.pipeline) == pytest.approx(0.004)
    assert there.points == solve(there.pipeline, point_count=5).points
    with pytest.raises(LagError, match="no lag between stages explains") as caught:
        await pool.solve(problem, 5, SlowPlan(plan, 10 * slow_s, stock_s))
    assert caught.value.details == {"median_time_s": str(10 * slow_s), "baseline_time_s": str(stock_s)}


async def test_a_dead_worker_fails_its_problem_and_not_the_next(pool: SolverPool, problem: Pipeline) -> None:
    await pool.solve(problem, 3)
    (worker,) = pool._pool._processes
    doomed = asyncio.create_task(pool.solve(problem, 2000))
    await asyncio.sleep(0)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(SolverCrashedError):
        await doomed
    assert (await pool.solve(problem, 3)).points


async def test_too_many_problems_are_refused(
    pool: SolverPool, problem: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_limit", 2)
    tasks = [asyncio.create_task(pool.solve(problem, 3)) for _ in range(3)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results if isinstance(result, Exception)] == [SolverBusyError]
