"""Work on a real Dask cluster whose workers, scheduler and clients die; a pool whose cluster goes away."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog.testing
from dask import config
from pydantic import ValidationError

from perseus.service.domain.errors import SolverCrashedError, SolverTimeoutError
from perseus.service.domain.messages import problem_to_proto
from perseus.service.server import running
from perseus.service.solving import dask_cluster
from perseus.service.solving.dask_cluster import ClusterLostError, DaskCluster, _check_versions
from perseus.service.solving.work import solve_explaining
from perseus.service.solving.worker import Worker, WorkerDiedError
from perseus.service.solving.worker_pool import BATCH, JOBS, REQUESTS, WorkerPool
from perseus.solver import SolverError
from perseus.v1.frontier_service_pb2 import SolveRequest
from tests.processes import is_gone
from tests.service.grpc_fakes import connected_to, make_settings
from tests.service.solving.dask_processes import DaskProcesses, dask_processes
from tests.service.solving.problems import make_problem, until
from tests.service.solving.test_worker_pool import ScriptedWorker

slow = pytest.mark.slow("a Dask cluster's processes start")
pytestmark = pytest.mark.timeout(600)  # each of which takes seconds to start, and more beside other tests


@pytest.fixture(scope="module")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskProcesses]:
    with dask_processes(tmp_path_factory.mktemp("dask")) as processes:
        yield processes


@asynccontextmanager
async def connected(address: str, limit_s: float = 600.0) -> AsyncIterator[tuple[DaskCluster, WorkerPool]]:
    cluster = DaskCluster(address)
    pool = WorkerPool(BATCH, 1, limit_s, cluster=cluster, draw=lambda: 0.0)
    running = asyncio.create_task(cluster.run())
    try:
        yield cluster, pool
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        pool.close()


def record(began: Path) -> None:
    with began.open("a") as stream:
        stream.write(f"{os.getpid()}\n")


def recorded(began: Path) -> list[int]:
    return [int(line) for line in began.read_text().splitlines()] if began.exists() else []


def never_end(began: Path) -> None:
    record(began)
    time.sleep(3600)


def die_at_first(began: Path, death_count: int) -> int:
    record(began)
    if len(recorded(began)) <= death_count:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def wait_at_first(began: Path) -> int:
    record(began)
    if len(recorded(began)) == 1:
        time.sleep(3600)
    return os.getpid()


def take_memory(byte_count: int) -> int:
    return len(bytearray(byte_count))


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Write a certificate that serves as CA, too, and its key, as the documentation says."""
    certificate, key = folder / "dask.pem", folder / "dask.key"
    request = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=dask"
    command = [*request.split(), "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@slow
async def test_frontiers_of_a_cluster_are_those_of_this_process(dask: DaskProcesses) -> None:
    problems = [make_problem(2, microbatches) for microbatches in range(2, 6)]
    async with connected(dask.address) as (cluster, pool):
        await until(lambda: cluster.thread_count == 2)
        there = await asyncio.gather(*(pool.solve(problem, 9) for problem in problems))
        with pytest.raises(SolverError, match="found 1") as caught:
            await pool.solve(problems[0], 1)
        assert await pool.plan(there[0], there[0].t_slow_s) == there[0].plan(there[0].t_slow_s)
    assert caught.value.details == {"found": "1"}
    for problem, found in zip(problems, there, strict=True):
        here = solve_explaining(problem, 9)
        assert found.points == here.points
        assert [found.plan_within(p.deadline_s) for p in found.points] == [
            here.plan_within(p.deadline_s) for p in here.points
        ]


@slow
@pytest.mark.parametrize(
    ("limit_s", "expected"),
    [(600.0, asyncio.CancelledError), (30.0, SolverTimeoutError)],
    ids=["it is cancelled", "it takes too long"],
)
async def test_work_that_nobody_wants_any_more_ends_there(
    dask: DaskProcesses, tmp_path: Path, limit_s: float, expected: type[BaseException]
) -> None:
    async with connected(dask.address, limit_s) as (cluster, pool):
        await until(lambda: cluster.thread_count)
        unwanted = asyncio.create_task(pool.run(never_end, tmp_path / "began"))
        await until(lambda: recorded(tmp_path / "began"))
        if expected is asyncio.CancelledError:
            unwanted.cancel()
        (end,) = await asyncio.gather(unwanted, return_exceptions=True)
        assert isinstance(end, expected)
        await until(lambda: is_gone(recorded(tmp_path / "began")[0]))


@slow
async def test_a_process_that_dies_there_costs_one_retry(dask: DaskProcesses, tmp_path: Path) -> None:
    async with connected(dask.address) as (cluster, pool):
        await until(lambda: cluster.thread_count)
        assert await pool.run(die_at_first, tmp_path / "once", 1) == recorded(tmp_path / "once")[1]
        with pytest.raises(SolverCrashedError, match=r"SIGKILL.*killed 2 workers"):
            await pool.run(die_at_first, tmp_path / "often", 9)
        assert cluster.thread_count, "the Dask workers are unharmed"


@slow
async def test_a_dask_worker_that_dies_costs_a_retry_on_another(tmp_path: Path) -> None:
    with dask_processes(tmp_path, 0) as dask:
        dask.add_worker("--no-nanny")
        async with connected(dask.address) as (cluster, pool):
            await until(lambda: cluster.thread_count)
            working = asyncio.create_task(pool.run(wait_at_first, tmp_path / "began"))
            await until(lambda: recorded(tmp_path / "began"))
            dask.add_worker("--no-nanny")
            await until(lambda: cluster.thread_count == 2)
            dask.workers[0].kill()
            assert await working == recorded(tmp_path / "began")[1]
            await until(lambda: is_gone(recorded(tmp_path / "began")[0]))
            assert pool.crash_count == 0


@slow
async def test_memory_is_limited_there(tmp_path: Path) -> None:
    with dask_processes(tmp_path, 0) as dask:
        dask.add_worker("--no-nanny", "--memory-limit", "1GiB")
        async with connected(dask.address) as (cluster, pool):
            await until(lambda: cluster.thread_count)
            assert await pool.run(take_memory, 2**28) == 2**28
            with pytest.raises(SolverCrashedError, match="for lack of memory"):
                await pool.run(take_memory, 2**31)


@slow
async def test_own_processes_continue_when_the_cluster_goes_away(tmp_path: Path) -> None:
    with dask_processes(tmp_path) as dask, structlog.testing.capture_logs() as logs:
        async with connected(dask.address) as (cluster, pool):
            await until(lambda: cluster.thread_count == 2)
            working = asyncio.create_task(pool.run(wait_at_first, tmp_path / "began"))
            await until(lambda: recorded(tmp_path / "began"))
            dask.scheduler.kill()
            assert await working == recorded(tmp_path / "began")[1] == pool._workers[0].process_id
            assert cluster.thread_count == 0
            await until(lambda: is_gone(recorded(tmp_path / "began")[0]))
        assert [(log["event"], log["cause"]) for log in logs] == [
            ("the Dask cluster is not there: own processes solve", "its scheduler can't be reached")
        ]


@slow
async def test_tls_keeps_others_out(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    files = {"ca-file": certificate}
    for role in ("client", "scheduler", "worker"):
        files |= {f"{role}.cert": certificate, f"{role}.key": key}
    tls = {f"distributed.comm.tls.{name}": str(path) for name, path in files.items()}
    variables = {
        "DASK_" + name.upper().replace(".", "__").replace("-", "_"): path for name, path in tls.items()
    }
    with dask_processes(tmp_path, 1, variables, "tls") as dask:
        async with connected(dask.address) as (other, _):
            await until(lambda: other.trouble)
        assert "its scheduler can't be reached: TLS expects" in other.trouble
        with config.set(tls):
            async with connected(dask.address) as (cluster, pool):
                await until(lambda: cluster.thread_count)
                assert await pool.run(abs, -1) == 1
                assert not pool._workers[0].is_alive, "it was done there"


@slow
async def test_other_versions_are_refused(dask: DaskProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = dask_cluster._version
    monkeypatch.setattr(
        dask_cluster,
        "_version",
        lambda packages, name: versions(packages, name) if name != "igraph" else id(packages),
    )
    with structlog.testing.capture_logs() as logs:
        async with connected(dask.address) as (cluster, pool):
            await until(lambda: cluster.trouble)
            assert await pool.run(os.getpid) == pool._workers[0].process_id
    assert "expected igraph" in logs[0]["cause"]


def test_the_versions_that_matter_are_compared() -> None:
    ours: dict[str, str | None] = {
        "perseus-energy": "1.0",
        "python": "3.11.7.final.0",
        "igraph": "0.11.8",
        "numpy": "2.0",
    }

    def check(**theirs: str | None) -> None:
        found = {name.replace("_", "-"): version for name, version in theirs.items()}
        _check_versions(ours, ours | found, "w")

    check(python="3.11.2.final.0", numpy="1.0")
    for name, found, expected in (
        ("perseus_energy", None, "expected perseus-energy 1.0, found None on w"),
        ("python", "3.12.1.final.0", r"expected python 3\.11, found 3\.12 on w"),
        ("igraph", "0.11.9", r"expected igraph 0\.11\.8, found 0\.11\.9 on w"),
    ):
        with pytest.raises(ClusterLostError, match=expected):
            check(**{name: found})


# ------------------------------------------------------------------------- a pool


class ScriptedCluster(DaskCluster):
    """A cluster that a test makes come, answer and go."""

    def __init__(self, thread_count: int) -> None:
        super().__init__("tcp://scripted:1")
        self.thread_count = thread_count
        self.asked: list[asyncio.Future[bytes]] = []

    async def exchange(self, message: bytes) -> bytes:
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]


@pytest.mark.parametrize("policy", [JOBS, REQUESTS, BATCH])
async def test_a_pool_gives_a_lost_clusters_work_to_its_processes(policy: Any) -> None:
    cluster, worker = ScriptedCluster(5), ScriptedWorker()
    pool = WorkerPool(
        policy, 1, 60.0, cluster=cluster, cluster_share=lambda count: count - 2, new_worker=lambda: worker
    )
    working = [asyncio.create_task(pool.run(os.getpid)) for _ in range(4)]
    await until(lambda: len(cluster.asked) == 3)
    assert (pool.busy_count, pool.waiting_count) == (3, 1), "its share of the threads"
    cluster.thread_count = 0
    for asked in cluster.asked:
        asked.set_exception(ClusterLostError("gone"))
    for number in range(4):
        await until(lambda count=number: len(worker.asked) == count + 1)  # type: ignore[misc]
        worker.end(number)
    assert sorted(await asyncio.gather(*working)) == [0, 1, 2, 3]
    assert (pool.crash_count, pool.failure_count) == (0, 0)
    pool.close()


async def test_a_client_that_cannot_start_is_said_in_one_line_and_tried_again_ever_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    delays_s: list[float] = []

    async def sleep(delay_s: float) -> None:
        delays_s.append(delay_s)
        if len(delays_s) == 8:
            raise asyncio.CancelledError

    certificate = str(tmp_path / "missing.pem")
    monkeypatch.setattr(asyncio, "sleep", sleep)
    names = ("ca-file", "client.cert", "client.key")
    cluster = DaskCluster("tls://127.0.0.1:1")
    with (
        config.set({f"distributed.comm.tls.{name}": certificate for name in names}),
        structlog.testing.capture_logs() as entries,
        pytest.raises(asyncio.CancelledError),
    ):
        await cluster.run()
    assert cluster.trouble == "its client can't start: [Errno 2] No such file or directory"
    (entry,) = entries
    assert (entry["address"], entry["cause"]) == ("tls://127.0.0.1:1", cluster.trouble)
    assert delays_s == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
    assert cluster.thread_count == 0


# ------------------------------------------------------------------------- a coordinator


class NoWorker(Worker):
    """A worker whose process never starts."""

    def start(self) -> None:
        pass

    async def ready(self) -> None:
        raise WorkerDiedError("never starts", is_of_its_work=False)


@slow
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
