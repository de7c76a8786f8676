"""Coordinators that start on a database of many planned jobs: all of them need the solver at once."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from perseus.service.domain.model import EventFilter
from perseus.service.domain.retention import Retention
from perseus.service.shell.coordinator import Coordinator
from perseus.service.solving.dask_cluster import DaskCluster
from perseus.service.solving.worker import Worker
from perseus.service.solving.worker_pool import JOBS, REQUESTS, WorkerPool
from perseus.service.storage.sql_store import SqlStore
from perseus.v1 import event_pb2, job_pb2
from tests.service.service_fakes import Cluster, make_spec
from tests.service.storage.stores import entries_of, opened, planned_cluster

_TIMEOUT_S = 1800.0
_TURN_S = 0.005
_TURNS = 20
"""Calls of a disturber before each check of the jobs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of the jobs.

    `planned_count`: those with a frontier and plans; `retried_count`: those with a retry.
    """

    planned_count: int
    retried_count: int
    stock_count: int


async def fill(path: Path, job_count: int, microbatches: int) -> None:
    """Write a database like that of a coordinator with `job_count` planned jobs."""
    cluster = planned_cluster(microbatches)
    async with opened(path) as store:
        for number in range(job_count):
            await store.write(entries_of(cluster, f"job-{number:03}"))


@asynccontextmanager
async def _coordinator(
    path: Path, new_worker: Callable[[], Worker], cluster: DaskCluster | None
) -> AsyncIterator[tuple[Coordinator, WorkerPool]]:
    store = await SqlStore.open(path)
    # The ranks are gone, and their leases must not expire before the last job is solved.
    rules = Cluster(make_spec()).rules.model_copy(update={"lease_s": 2 * _TIMEOUT_S})
    jobs = WorkerPool(JOBS, 1, _TIMEOUT_S, new_worker=new_worker, cluster=cluster)
    requests = WorkerPool(REQUESTS, 1, _TIMEOUT_S)
    coordinator = Coordinator(store, jobs, requests, rules, Retention())
    await coordinator.start()
    running = [asyncio.create_task(coordinator.run())]
    if cluster is not None:
        running.append(asyncio.create_task(cluster.run()))
    try:
        yield coordinator, jobs
    finally:
        await coordinator.flush()
        await coordinator.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        jobs.close()
        requests.close()
        await store.close()


async def restarted(
    path: Path,
    disturb: Callable[[WorkerPool], None] = lambda _: None,
    new_worker: Callable[[], Worker] = Worker,
    cluster: DaskCluster | None = None,
) -> Outcome:
    """Start a coordinator on a filled database, and wait until every job is solved or has given up."""
    began_s = time.monotonic()
    async with _coordinator(path, new_worker, cluster) as (coordinator, pool):
        while True:
            for _ in range(_TURNS):
                disturb(pool)
                await asyncio.sleep(_TURN_S)
            jobs = [job for _, job in coordinator.jobs.jobs("", (), is_full=False)]
            solved = [job for job in jobs if job.t_min_s and job.state == job_pb2.JOB_STATE_PLANNED]
            stock = [job for job in jobs if job.state == job_pb2.JOB_STATE_STOCK]
            if len(solved) + len(stock) == len(jobs) or time.monotonic() > began_s + _TIMEOUT_S:
                break
        await coordinator.flush()
        wanted = EventFilter(types=frozenset({event_pb2.JOB_EVENT_TYPE_SOLVE_RETRIED}))
        retried = [await coordinator.jobs.events(job.job_id, 0, wanted, 0, 1) for job in jobs]
    return Outcome(len(solved), sum(map(bool, retried)), len(stock))
