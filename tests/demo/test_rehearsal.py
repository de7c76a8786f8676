"""`perseus.demo.rehearsal`: a job on emulated GPUs with separately started agents."""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from perseus.demo.cluster import Cluster
from perseus.demo.rehearsal import main
from perseus.demo.workload import DEMO
from perseus.v1 import job_pb2, job_service_pb2
from perseus.v1.job_service_pb2_grpc import JobServiceStub
from tests.small_jobs import planned_soon

TIMEOUT_S = 60.0
AT_WORK = (job_pb2.JOB_STATE_PROFILING, job_pb2.JOB_STATE_SOLVING, job_pb2.JOB_STATE_PLANNED)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="perseus-") as run_dir:
        nodes = replace(DEMO, stage_weights=())  # the rehearsal makes its GPUs
        with Cluster(nodes, Path(run_dir), tmp_path / "logs") as cluster:
            yield cluster


def rehearse(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "perseus.demo.rehearsal", *map(str, arguments)]


@pytest.mark.slow("real processes train")
def test_a_job_trains_on_the_gpus_of_two_agents_until_it_is_stopped(cluster: Cluster) -> None:
    nodes = []
    for pipeline in range(DEMO.pipeline_count):
        folder = cluster.gpu_file(pipeline, 0).parent
        for _ in range(2):  # existing GPUs stay
            assert main(["gpus", str(folder), "2"]) == 0
        nodes += ["--node", cluster.socket(pipeline), folder]
    with planned_soon():
        address = cluster.start_coordinator()
    cluster.start_agents(address)
    training = subprocess.Popen(rehearse("train", *nodes, "--job", "try"))
    try:
        with cluster.security.channels(address).open_blocking() as channel:
            jobs = JobServiceStub(channel)
            state = job_pb2.JOB_STATE_UNSPECIFIED
            deadline_s = time.monotonic() + TIMEOUT_S
            while state not in AT_WORK:
                assert time.monotonic() < deadline_s
                assert training.poll() is None
                listed = jobs.ListJobs(job_service_pb2.ListJobsRequest()).jobs
                state = listed[0].state if listed else state
                time.sleep(0.2)
            training.send_signal(signal.SIGINT)
            assert training.wait(TIMEOUT_S) == 0
            while state != job_pb2.JOB_STATE_FINISHED:
                assert time.monotonic() < deadline_s
                state = jobs.ListJobs(job_service_pb2.ListJobsRequest()).jobs[0].state
    finally:
        training.kill()


def test_nodes_with_no_or_unequal_gpus_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some, none = str(tmp_path / "a"), str(tmp_path / "b")
    assert main(["gpus", some, "1"]) == 0
    assert main(["train", "--node", "a.sock", some, "--node", "b.sock", none]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith("error: expected as many GPUs on each node")
    assert f"1 in {some}, 0 in {none}" in reported
