"""A job from slurmd's variables, and its grant."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.agent.claims.grants import User, parse
from perseus.agent.slurm.job import NoSuchGpuError, SlurmEnvironmentError, SlurmJob, uuids_of

ENVIRONMENT = {"SLURM_JOB_ID": "17", "SLURM_JOB_UID": "1004", "SLURM_JOB_GPUS": "0,2"}


@pytest.mark.parametrize(
    ("gpus", "numbers"), [("", ()), ("3", (3,)), ("0,2", (0, 2)), ("0-2,5", (0, 1, 2, 5)), ("10", (10,))]
)
def test_gpus_are_numbers_of_device_files(gpus: str, numbers: tuple[int, ...]) -> None:
    assert SlurmJob.of({**ENVIRONMENT, "SLURM_JOB_GPUS": gpus}).gpu_numbers == numbers


def test_a_job_without_gpus() -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "SLURM_JOB_GPUS"}
    assert SlurmJob.of(environment) == SlurmJob("17", 1004, ())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID: expected a number, .* found ''"),
        ({"SLURM_JOB_ID": "../17"}, r"SLURM_JOB_ID: expected a number, .* found '\.\./17'"),
        ({"SLURM_JOB_UID": "alice"}, "SLURM_JOB_UID: expected a number, .* found 'alice'"),
        ({"SLURM_JOB_GPUS": "0:1"}, "SLURM_JOB_GPUS: expected numbers of GPUs, found '0:1'"),
    ],
)
def test_other_environments_are_refused(wrong: Mapping[str, str], message: str) -> None:
    with pytest.raises(SlurmEnvironmentError, match=message):
        SlurmJob.of({**ENVIRONMENT, **wrong})


@given(st.text(max_size=300), st.integers(0, 2**31 - 1))
def test_any_account_name_yields_a_valid_grant(account: str, uid: int) -> None:
    job = SlurmJob("17", uid, (0,), account)
    (grant,) = parse(job.grant(["GPU-a", "GPU-b"]))
    assert grant.is_for(User(uid, "anybody"))
    assert grant.gpus == {"GPU-a", "GPU-b"}
    labels = dict(grant.labels)
    assert labels.pop("slurm-job") == "17"
    assert set(labels) == ({"slurm-account"} if account else set())


def test_a_plain_account_is_the_label() -> None:
    (grant,) = parse(SlurmJob.of({**ENVIRONMENT, "SLURM_JOB_ACCOUNT": "physics.ml"}).grant(["GPU-a"]))
    assert grant.labels == (("slurm-account", "physics.ml"), ("slurm-job", "17"))


def test_gpus_are_found_by_their_devices_wherever_they_are_listed() -> None:
    nodes = {"GPU-a": "/dev/nvidia2", "GPU-b": "/dev/nvidia10", "GPU-c": "/dev/nvidia0", "GPU-d": ""}
    assert uuids_of((0, 10), nodes) == ["GPU-c", "GPU-b"]
    with pytest.raises(NoSuchGpuError, match=r"expected GPUs of this node \(0, 2, 10\), found 3"):
        uuids_of((0, 3), nodes)
