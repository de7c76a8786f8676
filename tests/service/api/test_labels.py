"""Labels of a job: part of its registration, shown with the job, no part of its specification."""

from pathlib import Path

import pytest

from perseus.tls.channels import Channels
from perseus.v1.job_pb2 import Label
from perseus.v1.job_service_pb2 import GetJobRequest, RegisterJobRequest
from tests.service.grpc_fakes import Client, make_settings, refusal, running_here, spec_message


async def test_another_label_begins_no_new_run_and_survives_a_restart(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    for number in ("17", "18"):  # for example, requeued under another number
        async with running_here(settings) as (address, _), Channels(address).open() as channel:
            client = Client(channel)
            labels = [Label(key="slurm-account", value="physics"), Label(key="slurm-job", value=number)]
            request = RegisterJobRequest(spec=spec_message(), request_id=number, labels=labels)
            job = (await client.jobs.RegisterJob(request)).job
            assert (job.run_number, list(job.labels)) == (1, labels)
    async with running_here(settings) as (address, _), Channels(address).open() as channel:
        found = await Client(channel).jobs.GetJob(GetJobRequest(job_id=spec_message().job_id))
        assert list(found.job.labels) == labels


@pytest.mark.parametrize(
    ("labels", "expected", "found"),
    [
        ([("Account", "x")], "keys of 1 to 63", "'Account'"),
        ([("", "x")], "keys of 1 to 63", "''"),
        ([("a", "x\x1b[31m")], "printable characters", r"'x\x1b[31m'"),
        ([("a", "x" * 257)], "0 to 256 characters", "257"),
        ([("a", "x"), ("a", "y")], "each key once", "['a', 'a']"),
        ([(f"key-{number}", "") for number in range(17)], "at most 16", "17"),
    ],
)
async def test_errors_name_invalid_labels(
    tmp_path: Path, labels: list[tuple[str, str]], expected: str, found: str
) -> None:
    async with running_here(make_settings(tmp_path)) as (address, _), Channels(address).open() as channel:
        message = [Label(key=key, value=value) for key, value in labels]
        request = RegisterJobRequest(spec=spec_message(), request_id="1", labels=message)
        _, reason, values = await refusal(Client(channel).jobs.RegisterJob(request))
    assert reason == "INVALID_FIELD"
    assert values["field"].startswith("labels")
    assert expected in values["expected"]
    assert values["found"] == found
