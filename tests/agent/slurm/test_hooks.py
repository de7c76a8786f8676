"""Prolog and epilog on emulated GPUs, without Slurm; a job from slurmd's variables, and its grant."""

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus import configuration
from perseus.agent.claims.grants import User, parse
from perseus.agent.gpu import Gpu, GpuError, GpuLostError, GpuUse
from perseus.agent.restore.guarded import GuardedGpu
from perseus.agent.restore.records import RecordFolder
from perseus.agent.sidecar.backends import backend
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.slurm import hooks
from perseus.agent.slurm.hooks import NoAgentError, NotRestoredError, epilog, for_all_jobs, prolog
from perseus.agent.slurm.job import NoSuchGpuError, SlurmEnvironmentError, SlurmJob, uuids_of
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM

MODEL = A100_SXM.with_clocks(4)
JOB = SlurmJob("17", 1004, (1,), "physics")


@pytest.fixture
def settings(tmp_path: Path) -> AgentSettings:
    gpus = tmp_path / "gpus"
    gpus.mkdir()
    for index in range(2):
        EmulatedGpu.create(gpus / f"gpu{index}", MODEL, f"GPU-{index}").close()
    given = {
        "gpu_backend": "emulated",
        "emulated_gpus": gpus,
        "socket": tmp_path / "agent.sock",
        "grants": tmp_path / "grants",
        "restore_folder": tmp_path / "restore",
    }
    return configuration.load(AgentSettings, None, given)


def lock(settings: AgentSettings, uuid: str) -> GuardedGpu:
    """A GPU under a clock of a living agent."""
    guarded = GuardedGpu(backend(settings).open(uuid), RecordFolder(settings.restore_folder), None)
    guarded.set_clock_mhz(MODEL.clocks_mhz[-1])
    return guarded


def clock_mhz(settings: AgentSettings, uuid: str) -> int:
    with contextlib.closing(backend(settings).open(uuid)) as gpu:
        return gpu.sm_clock_mhz()


def granted(settings: AgentSettings) -> dict[str, str]:
    return {path.name: path.read_text() for path in settings.grants.iterdir()}


def test_a_job_is_granted_its_gpus_and_a_missing_agent_is_an_error(settings: AgentSettings) -> None:
    with pytest.raises(NoAgentError, match="the job will train at stock clocks"):
        prolog(JOB, settings)
    assert granted(settings) == {"slurm-17": "1004: GPU-1 slurm-job=17 slurm-account=physics\n"}
    assert stat.S_IMODE((settings.grants / "slurm-17").stat().st_mode) == 0o644
    assert stat.S_IMODE(settings.grants.stat().st_mode) == 0o755


def test_grants_of_ended_jobs_on_the_same_gpus_are_removed(settings: AgentSettings) -> None:
    settings.grants.mkdir()
    (settings.grants / "slurm-16").write_text("1005: GPU-1\n")
    (settings.grants / "slurm-15").write_text("1005: GPU-0\n")
    (settings.grants / "staff").write_text("1006: GPU-1\n")
    os.mkfifo(settings.grants / "slurm-14")  # must not block
    with pytest.raises(NoAgentError):
        prolog(JOB, settings)
    (settings.grants / "slurm-14").unlink()
    assert sorted(granted(settings)) == ["slurm-15", "slurm-17", "staff"]


class LostAndFound:
    """A node whose first GPU is lost and whose second does not answer."""

    def open(self, uuid: str) -> Gpu:
        raise AssertionError("no GPU is opened to grant it")

    def inspect(self, uuid: str) -> GpuUse:
        if uuid == "GPU-1":
            raise GpuLostError("GPU-1: fell off the bus")
        return GpuUse(2, "/dev/nvidia2", ())

    def listed(self) -> list[str | GpuError]:
        return [GpuLostError("GPU 0: fell off the bus"), "GPU-1", "GPU-2"]


def test_a_lost_gpu_does_not_block_jobs_on_others(
    settings: AgentSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "backend", lambda _: LostAndFound())
    with pytest.raises(NoAgentError):
        prolog(SlurmJob("17", 1004, (2,)), settings)
    assert granted(settings) == {"slurm-17": "1004: GPU-2 slurm-job=17\n"}
    with pytest.raises(NoSuchGpuError, match=r"expected GPUs of this node \(2\), found 1"):
        prolog(SlurmJob("18", 1004, (1,)), settings)


def test_a_job_without_gpus_leaves_no_trace(settings: AgentSettings) -> None:
    job = SlurmJob("17", 1004, ())
    prolog(job, settings)
    assert not settings.grants.exists()
    epilog(job, settings)


def test_the_epilog_restores_the_jobs_gpus_of_a_dead_agent_and_no_others(settings: AgentSettings) -> None:
    with pytest.raises(NoAgentError):
        prolog(JOB, settings)
    lock(settings, "GPU-1").close()
    other = lock(settings, "GPU-0")
    assert clock_mhz(settings, "GPU-1") == MODEL.clocks_mhz[-1]
    epilog(JOB, settings)
    assert clock_mhz(settings, "GPU-1") == MODEL.highest_clock_mhz
    assert clock_mhz(settings, "GPU-0") == MODEL.clocks_mhz[-1]
    assert granted(settings) == {}
    assert RecordFolder(settings.restore_folder).gpu_uuids() == ["GPU-0"]
    other.close()


@pytest.mark.parametrize("has_grant", [False, True])
def test_the_epilog_names_the_gpu_of_a_living_agent(
    settings: AgentSettings, monkeypatch: pytest.MonkeyPatch, has_grant: bool
) -> None:
    """It knows the job's GPUs without a grant, too."""
    monkeypatch.setattr(hooks, "_RESTORE_S", 0.3)
    if has_grant:
        with pytest.raises(NoAgentError):
            prolog(JOB, settings)
    held = lock(settings, "GPU-1")
    with pytest.raises(NotRestoredError, match="GPU GPU-1: not back at stock: an agent holds it"):
        epilog(JOB, settings)
    assert not has_grant or granted(settings) == {}, "the grant is revoked all the same"
    held.close()


def test_an_agent_for_all_jobs_inherits_no_variables_of_one() -> None:
    message = {"SLURM_JOB_ID": "17", "CUDA_VISIBLE_DEVICES": "1", "PATH": "/bin", "GPU_DEVICE_ORDINAL": "1"}
    assert for_all_jobs(message) == {"PATH": "/bin"}


# --- A job --------------------------------------------------------------------------------------------------

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
