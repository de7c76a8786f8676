"""`perseus.demo.rehearsal`: a job on emulated GPUs with separately started agents."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from perseus.demo.processes import Process, until
from perseus.demo.rehearsal import main
from perseus.demo.workload import DEMO
from perseus.v1 import job_pb2, job_service_pb2
from perseus.v1.job_service_pb2_grpc import JobServiceStub
from tests.small_jobs import jobs_of

AT_WORK = (job_pb2.JOB_STATE_PROFILING, job_pb2.JOB_STATE_SOLVING, job_pb2.JOB_STATE_PLANNED)


@pytest.mark.slow("real processes train")
def test_a_job_trains_on_the_gpus_of_two_agents_until_it_is_stopped(tmp_path: Path) -> None:
    without_gpus = replace(DEMO, job_id="try", stage_weights=())  # the rehearsal makes them
    with jobs_of(tmp_path, without_gpus) as (cluster,):
        nodes: list[object] = []
        for pipeline in range(DEMO.pipeline_count):
            folder = cluster.gpu_file(pipeline, 0).parent
            for _ in range(2):  # existing GPUs stay
                assert main(["gpus", str(folder), "2"]) == 0
            nodes += ["--node", cluster.socket(pipeline), folder]
        address = cluster.start_coordinator()
        cluster.start_agents(address)
        command = ("-m", "perseus.demo.rehearsal", "train", *map(str, nodes), "--job", "try")
        with (
            Process(tmp_path / "training.log", *command) as training,
            cluster.security.channels(address).open_blocking() as channel,
        ):
            training.launch()
            jobs = JobServiceStub(channel)

            def states() -> list[int]:
                return [job.state for job in jobs.ListJobs(job_service_pb2.ListJobsRequest()).jobs]

            training.until(lambda: any(state in AT_WORK for state in states()), "a job at work")
            training.signal(signal.SIGINT)
            assert training.wait() == 0
            until(lambda: states() == [job_pb2.JOB_STATE_FINISHED], "the job's end")


def test_nodes_with_no_or_unequal_gpus_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some, none = str(tmp_path / "a"), str(tmp_path / "b")
    assert main(["gpus", some, "1"]) == 0
    assert main(["train", "--node", "a.sock", some, "--node", "b.sock", none]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith("error: expected as many GPUs on each node")
    assert f"1 in {some}, 0 in {none}" in reported
