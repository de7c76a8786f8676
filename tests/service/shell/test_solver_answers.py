"""A worker's answers reach the job: exact plans, that no lag explains a slow plan, and its deaths."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perseus.service.shell import run_tasks
from perseus.service.solving import worker_pool
from perseus.service.solving.worker import Answer, WorkerDiedError
from perseus.service.solving.worker_pool import WorkerPool
from perseus.solver import Frontier, LagError, Plan, Refinement
from perseus.v1 import event_pb2, job_pb2
from tests.service.grpc_fakes import Client, ThreadWorker, job_once, joined
from tests.torture.solving import fill, restarted


async def test_a_workers_exact_plan_replaces_the_nearest_one(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few points, plans between them are far from exact."""
    monkeypatch.setattr(run_tasks, "POINT_COUNT", 3)
    made: list[tuple[Refinement, Plan]] = []
    refine = WorkerPool.refine

    async def noting(self: WorkerPool, refinement: Refinement, job_id: str, on_retry: Any) -> Plan:
        plan = await refine(self, refinement, job_id, on_retry)
        made.append((refinement, plan))
        return plan

    monkeypatch.setattr(WorkerPool, "refine", noting)
    agent = await joined(client)
    await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
    job = (await client.ask("SetPolicy", job_id="job", policy={"max_slowdown_percent": 7.0})).job

    def is_offered(now: job_pb2.Job) -> bool:
        slower_s = [plan.iteration_time_s for _, plan in made if plan.iteration_time_s > 1.02 * job.t_min_s]
        return bool(slower_s) and list(now.planned_iteration_time_s) == slower_s * 2

    await job_once(client, is_offered)
    assert job.planned_iteration_time_s[0] < made[-1][1].iteration_time_s, "the next one came first"
    refinement, plan = made[-1]
    assert plan == refinement.plan()
    await agent.iterate(4)
    assert {rank.in_force_version for rank in await client.ranks()} == {agent.offers[-1].version}


async def test_an_unexplained_plan_is_reported_and_the_second_one_sends_the_job_to_stock(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_s = {
        "median_time_s": 1.5,
        "baseline_time_s": 1.3,
        "predicted_time_s": 1.31,
        "predicted_baseline_time_s": 1.3,
        "residual_s": 0.19,
        "transfer_lag_s": 0.0,
    }

    async def failing(*_: Any, **__: Any) -> Frontier:
        raise LagError("no lag between stages explains it", **times_s)

    monkeypatch.setattr(WorkerPool, "solve", failing)
    agent = await joined(client)
    await agent.iterate_until(client, job_pb2.JOB_STATE_STOCK)
    assert (await client.ask("ResumeJob", job_id="job")).job.state == job_pb2.JOB_STATE_BASELINE
    await client.finish()
    events = await client.events()
    kinds = [event.type for event in events]
    assert event_pb2.JOB_EVENT_TYPE_SOLVE_FAILED not in kinds
    reported = [e for e in events if e.type == event_pb2.JOB_EVENT_TYPE_MEASUREMENTS_UNEXPLAINED]
    assert len(reported) == 2, "everything is measured anew in between"
    assert all(e.measurements_unexplained == event_pb2.MeasurementsUnexplained(**times_s) for e in reported)
    assert event_pb2.JOB_EVENT_TYPE_SOLVED not in kinds


class MortalWorker(ThreadWorker):
    """It dies at every other problem."""

    def __init__(self) -> None:
        super().__init__()
        self.death_count = 0
        self._is_dying = False

    async def run(self, work: Callable[..., Answer], *arguments: object) -> Answer:
        self._is_dying = not self._is_dying
        if self._is_dying:
            self.death_count += 1
            raise WorkerDiedError("ended by signal 9 (SIGKILL)", is_of_its_work=True)
        return await super().run(work, *arguments)


async def test_jobs_whose_solver_dies_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tasks, "POINT_COUNT", 10)
    monkeypatch.setattr(worker_pool, "MIN_BACKOFF_S", 0.01)
    await fill(tmp_path / "jobs.db", 3, 2)
    worker = MortalWorker()
    outcome = await restarted(tmp_path / "jobs.db", new_worker=lambda: worker)
    assert worker.death_count >= 3
    assert (outcome.planned_count, outcome.stock_count) == (3, 0)
    assert outcome.retried_count >= 1
