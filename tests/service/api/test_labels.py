"""Labels of a job: part of its registration, shown with the job, no part of its specification."""

from pathlib import Path

import pytest

from perseus.service.api.translate_jobs import labels_from_proto
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.specification import Registration
from perseus.v1.job_pb2 import Label
from tests.service.grpc_fakes import connected, make_settings, refusal, spec_message


async def test_another_label_begins_no_new_run_and_survives_a_restart(tmp_path: Path) -> None:
    settings, spec = make_settings(tmp_path), spec_message()
    for number in ("17", "18"):  # for example, requeued under another number
        async with connected(settings) as client:
            labels = [Label(key="slurm-account", value="physics"), Label(key="slurm-job", value=number)]
            job = (await client.ask("RegisterJob", spec=spec, request_id=number, labels=labels)).job
            assert (job.run_number, list(job.labels)) == (1, labels)
    async with connected(settings) as client:
        assert list((await client.job()).labels) == labels
        twice = client.ask("RegisterJob", spec=spec, request_id="19", labels=labels[:1] * 2)
        assert (await refusal(twice))[1] == "INVALID_FIELD"


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
def test_errors_name_invalid_labels(labels: list[tuple[str, str]], expected: str, found: str) -> None:
    messages = [Label(key=key, value=value) for key, value in labels]
    with pytest.raises(InvalidFieldError) as refused:
        Registration("r", labels=labels_from_proto(messages)).check()
    values = refused.value.metadata
    assert values["field"].startswith("labels")
    assert expected in values["expected"]
    assert values["found"] == found
