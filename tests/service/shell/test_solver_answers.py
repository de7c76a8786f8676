"""A worker process's answers reach the job: exact plans, and the finding that no lag explains a slow plan."""

from typing import Any

import pytest

from perseus.service.solving.worker_pool import WorkerPool
from perseus.solver import Frontier, LagError, Plan, Refinement
from perseus.v1 import event_pb2, job_pb2
from tests.service.grpc_fakes import Client, job_once, joined


async def test_a_workers_exact_plan_replaces_the_nearest_one(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few points, plans between them are far from exact."""
    monkeypatch.setattr("perseus.service.shell.run_tasks.POINT_COUNT", 3)
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


async def test_an_unexplained_plan_is_reported_and_the_job_goes_to_stock(
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
    await client.finish()
    events = await client.events()
    kinds = [event.type for event in events]
    assert event_pb2.JOB_EVENT_TYPE_SOLVE_FAILED not in kinds
    (reported,) = (e for e in events if e.type == event_pb2.JOB_EVENT_TYPE_MEASUREMENTS_UNEXPLAINED)
    assert reported.measurements_unexplained == event_pb2.MeasurementsUnexplained(**times_s)
    assert event_pb2.JOB_EVENT_TYPE_SOLVED not in kinds
