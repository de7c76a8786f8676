"""A coordinator whose jobs and requests are solved on a Dask cluster, which loses workers and scheduler."""

import contextlib
from pathlib import Path

import grpc
import pytest
from pydantic import ValidationError

from perseus.service.domain.messages import problem_to_proto
from perseus.service.server import running
from perseus.service.solving.dask_cluster import DaskCluster
from perseus.service.solving.worker import Worker, WorkerDiedError
from perseus.service.solving.worker_pool import WorkerPool
from perseus.v1.frontier_service_pb2 import SolveRequest
from tests.service.grpc_fakes import connected_to, make_settings
from tests.service.solving.dask_processes import dask_processes
from tests.service.solving.problems import make_problem
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
    assert cluster.trouble.startswith("its scheduler can't be reached")


class NoWorker(Worker):
    """A worker whose process never starts."""

    def start(self) -> None:
        pass

    async def ready(self) -> None:
        raise WorkerDiedError("never starts", is_of_its_work=False)


@pytest.mark.timeout(600)
@pytest.mark.slow("a Dask cluster's processes start")
async def test_a_coordinators_settings_lead_requests_to_the_cluster(tmp_path: Path) -> None:
    request = SolveRequest(problem=problem_to_proto(make_problem()), point_count=3)
    with dask_processes(tmp_path, 1) as dask:
        settings = make_settings(tmp_path, dask=dask.address, dask_insecure=True)
        async with running(settings, new_worker=NoWorker) as (address, _), connected_to(address) as client:
            answer = None
            while answer is None:
                # There is no process, and at first no cluster: that one answers.
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await client.frontiers.Solve(request, timeout=100)
    assert len(answer.frontier.points) == 3


@pytest.mark.parametrize(
    ("address", "expected"),
    [("tcp://127.0.0.1:8786", "expected tls://, or dask_insecure"), ("x:8786", "expected tls://HOST:PORT")],
)
def test_a_cluster_in_plaintext_must_be_asked_for(tmp_path: Path, address: str, expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        make_settings(tmp_path, dask=address)
    assert make_settings(tmp_path, dask="tls://host:8786").dask == "tls://host:8786"
