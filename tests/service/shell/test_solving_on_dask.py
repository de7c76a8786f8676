"""A coordinator whose jobs are solved on a Dask cluster, which loses a worker and then its scheduler."""

from pathlib import Path

import pytest

from perseus.service.solving.dask_cluster import DaskCluster
from perseus.service.solving.worker_pool import WorkerPool
from tests.service.solving.dask_processes import dask_processes
from tests.torture.solving import fill, restarted

JOB_COUNT = 12


@pytest.mark.timeout(600)
@pytest.mark.slow("a Dask cluster's processes start, and jobs are solved there and here")
async def test_all_jobs_are_planned_though_the_cluster_dies(tmp_path: Path) -> None:
    await fill(tmp_path / "many.db", JOB_COUNT, 16)
    with dask_processes(tmp_path) as dask:
        cluster = DaskCluster(dask.address)
        busy_there: list[int] = []

        def kill(pool: WorkerPool) -> None:
            if cluster.thread_count:
                busy_there.append(pool.busy_count)
            if pool.solved.count >= 2:
                dask.workers[1].kill()
            if pool.solved.count >= 4:
                dask.scheduler.kill()

        outcome = await restarted(tmp_path / "many.db", kill, cluster=cluster)
    assert outcome.planned_count == JOB_COUNT
    assert outcome.retried_count == outcome.stock_count == 0, "no job notices"
    assert max(busy_there) >= 2, "both of its threads were busy"
    assert cluster.trouble == "its scheduler can't be reached"
