"""Small jobs in real processes, of two stages each, and helpers for tests during their training.

On a busy machine emulated GPUs are sometimes late; other tests check that plans keep their predictions.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from perseus.demo.cluster import Cluster
from perseus.demo.processes import ENVIRONMENT
from perseus.demo.security import Security
from perseus.demo.workload import Workload
from perseus.emulation.physics import Work
from perseus.v1 import job_pb2, job_service_pb2
from tests.service.grpc_fakes import Client
from tests.workloads import QUICK_GPU

PLANNED_TIMEOUT_S = 480.0
TIMEOUT_S = 240.0

_TOLERANCE_PERCENT = 1000.0
"""Tolerance of a plan's prediction."""

_SOON = {
    "BASELINE_ITERATIONS": "3",
    "PROFILE_ITERATIONS": "2",
    "PROFILE_ACCURACY_PERCENT": "2",
    "PROFILE_CLOCKS": "3",
}


def small_job(job_id: str, *stage_weights: float) -> Workload:
    """Return a job's workload: iterations of some 0.3 s on the emulated GPUs of one pipeline."""
    return Workload(
        job_id=job_id,
        pipeline_count=1,
        stage_weights=stage_weights,
        microbatch_count=4,
        forward=Work(compute_s=0.018, memory_s=0.004, activity=0.85),
        backward=Work(compute_s=0.038, memory_s=0.008, activity=0.95),
        optimizer_s=0.01,
        gpu=QUICK_GPU,
    )


JOBS = (small_job("first", 0.7, 1.0), small_job("second", 1.0, 0.8))


@contextmanager
def planned_soon(guard_tolerance_percent: float = _TOLERANCE_PERCENT) -> Iterator[None]:
    """Let coordinators that start here measure only the minimum for planning."""
    settings = {**_SOON, "GUARD_TOLERANCE_PERCENT": f"{guard_tolerance_percent:g}"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setitem(ENVIRONMENT, f"PERSEUS_COORDINATOR_{name}", value)
        yield


@contextmanager
def jobs_of(folder: Path, *workloads: Workload) -> Iterator[list[Cluster]]:
    """Make the GPUs of jobs that one coordinator or fleet will serve; end all processes after the block."""
    with planned_soon(), ExitStack() as stack:
        clusters = []
        for each in workloads:
            (own := folder / each.job_id).mkdir()
            made = Cluster(each, own, folder / "logs" / each.job_id)
            clusters.append(stack.enter_context(made))
            made.security = clusters[0].security
        yield clusters


def start_jobs(clusters: Sequence[Cluster], address: str) -> None:
    """Start the jobs' agents, and then their trainers."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda cluster: cluster.start_agents(address), clusters))
    for cluster in clusters:
        cluster.start_trainers()


@contextmanager
def training(folder: Path, *workloads: Workload) -> Iterator[tuple[Cluster, str]]:
    """Train jobs under one coordinator; yield its cluster and address."""
    with jobs_of(folder, *workloads) as clusters:
        address = clusters[0].start_coordinator()
        start_jobs(clusters, address)
        yield clusters[0], address


@asynccontextmanager
async def client_of(security: Security, address: str) -> AsyncIterator[Client]:
    """Connect to a coordinator as an operator."""
    async with security.channels(address).open() as channel:
        yield Client(channel)


async def until(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = TIMEOUT_S) -> float:
    """Wait for a condition; return the time, seconds."""
    begun_s = time.monotonic()
    while not await condition():
        assert time.monotonic() < begun_s + timeout_s, what
        await asyncio.sleep(0.1)
    return time.monotonic() - begun_s


async def until_planned(client: Client, *workloads: Workload) -> None:
    """Wait until jobs are registered, planned, and measured under their plans."""

    async def are_planned() -> bool:
        listed = await client.jobs.ListJobs(job_service_pb2.ListJobsRequest())
        if {job.job_id for job in listed.jobs} != {each.job_id for each in workloads}:
            return False
        jobs = [await client.job(each.job_id) for each in workloads]
        return all(
            job.state == job_pb2.JOB_STATE_PLANNED and job.figures.HasField("mean_iteration_time_s")
            for job in jobs
        )

    await until(are_planned, "all jobs are planned", PLANNED_TIMEOUT_S)


async def power_w(client: Client, *workloads: Workload) -> float:
    """Return the total power of jobs in their latest iterations."""
    return sum([(await client.job(each.job_id)).figures.power_w for each in workloads])
