"""A worker with its real process: it returns results and errors, and is replaced when it dies."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perseus.service.domain.commands import SlowPlan
from perseus.service.solving.work import plan_of, refine, solve_explaining
from perseus.service.solving.worker import Worker, WorkerDiedError, WorkError
from perseus.solver import (
    DeadlineError,
    LagError,
    SolverError,
    common_lag_s,
    plan_at,
    replay,
    solve,
    with_lag,
)
from tests.service.solving.problems import make_problem, until


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """A worker that lives for the whole module."""
    worker = Worker()
    worker.start()
    asyncio.run(worker.ready())
    yield worker
    worker.close()


async def test_a_problem_is_solved_in_the_process_as_here(worker: Worker) -> None:
    problem = make_problem()
    here, there = solve_explaining(problem, 5), await worker.run(solve_explaining, problem, 5)
    assert there.points == here.points
    assert there.plan_within(there.t_slow_s) == here.plan_within(here.t_slow_s)
    coarse = await worker.run(solve_explaining, problem, 5, None, 0.0, 0.1)
    time_s = (here.t_min_s + here.t_slow_s) / 2
    assert 0.9 * here.bound_energy_j(time_s) <= coarse.bound_energy_j(time_s) < here.bound_energy_j(time_s)


async def test_plans_are_made_in_the_process_as_here(worker: Worker) -> None:
    frontier = solve(make_problem(), point_count=3)
    time_s = 1.03 * frontier.t_min_s
    refinement = frontier.refinement(time_s)
    there = await worker.run(refine, refinement)
    assert there == refinement.plan() == frontier.plan(time_s)
    assert frontier.plan_within(time_s) != there, "it is not one of the frontier's points"
    assert await worker.run(plan_of, 1, frontier, time_s) == there
    assert await worker.run(plan_of, 1, None, time_s) == there, "it keeps the frontier"
    with pytest.raises(DeadlineError):
        await worker.run(plan_of, 1, None, 0.5 * frontier.t_min_s)


async def test_the_solvers_error_comes_back(worker: Worker) -> None:
    with pytest.raises(SolverError, match="found 1") as caught:
        await worker.run(solve_explaining, make_problem(), 1)
    assert caught.value.details == {"found": "1"}


async def test_a_slow_plan_is_explained_in_the_process_as_here(worker: Worker) -> None:
    problem = make_problem()
    stock = solve(problem, point_count=3).baseline
    plan, real = plan_at(problem, stock.iteration_time_s), with_lag(problem, 0.004)
    slow_s, stock_s = (replay(real, some.clocks_mhz).iteration_time_s for some in (plan, stock))
    slow = SlowPlan(plan, slow_s, stock_s)
    there = await worker.run(solve_explaining, problem, 5, slow)
    here = solve_explaining(problem, 5, slow)
    assert common_lag_s(there.pipeline) == common_lag_s(here.pipeline) > 0
    assert there.points == here.points
    with pytest.raises(LagError, match="no lag between stages explains") as unexplained:
        await worker.run(solve_explaining, problem, 5, SlowPlan(plan, 10 * slow_s, stock_s))
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


def fail_for_an_unknown_reason() -> None:
    raise ZeroDivisionError("an unexpected fault")


async def test_an_unexpected_error_is_reported_and_the_worker_continues(worker: Worker) -> None:
    before = worker.process_id
    with pytest.raises(WorkError, match="ZeroDivisionError: an unexpected fault"):
        await worker.run(fail_for_an_unknown_reason)
    assert await worker.run(os.getpid) == worker.process_id == before


def never_end(begun: Path) -> None:
    begun.touch()
    time.sleep(3600)


@pytest.mark.slow("processes start and are killed")
async def test_a_process_that_cannot_start_is_tried_again_and_does_not_hinder_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker()
    await worker.ready()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))

    cancelled = asyncio.ensure_future(worker.run(never_end, tmp_path / "begun"))
    await until((tmp_path / "begun").exists)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    with pytest.raises(WorkerDiedError, match=r"can't be started: .*No such file"):
        await worker.run(os.getpid)

    monkeypatch.undo()
    assert await worker.run(os.getpid) == worker.process_id
    worker.close()


@pytest.mark.slow("a solver's process starts five times")
async def test_a_dead_worker_is_replaced(tmp_path: Path) -> None:
    worker = Worker()

    def kill() -> None:
        assert worker.process_id is not None
        os.kill(worker.process_id, signal.SIGKILL)

    try:
        assert await worker.run(os.getpid) == worker.process_id
        # While idle: unnoticed.
        kill()
        await until(lambda: not worker.is_alive)
        assert await worker.run(os.getpid) == worker.process_id
        # While working: the caller gets an error.
        begun = tmp_path / "begun"
        doomed = asyncio.create_task(worker.run(never_end, begun))
        await until(begun.exists)
        kill()
        with pytest.raises(WorkerDiedError, match="SIGKILL") as died:
            await doomed
        assert died.value.is_of_its_work
        # Before it is ready: the error says that its work was not the cause.
        worker.start()
        unborn_task = asyncio.create_task(worker.ready())
        await asyncio.sleep(0)  # it waits now, and sees the end
        kill()
        with pytest.raises(WorkerDiedError, match="SIGKILL") as unborn:
            await unborn_task
        assert not unborn.value.is_of_its_work
        assert await worker.run(os.getpid) == worker.process_id
        # Cancelling the call kills the process.
        before, begun = worker.process_id, tmp_path / "begun again"
        unwanted = asyncio.create_task(worker.run(never_end, begun))
        await until(begun.exists)
        unwanted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unwanted
        assert await worker.run(os.getpid) == worker.process_id != before
    finally:
        worker.close()
