"""`perseus slurm`: exit codes and one-line errors."""

from pathlib import Path

import pytest

from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from tests.cli.commands import perseus

JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_UID": "1004", "SLURM_JOB_GPUS": "0"}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A node with one emulated GPU and no agent."""
    (tmp_path / "gpus").mkdir()
    EmulatedGpu.create(tmp_path / "gpus" / "gpu0", A100_SXM.with_clocks(4), "GPU-a").close()
    folders = {"emulated_gpus": "gpus", "socket": "s", "grants": "grants", "restore_folder": "restore"}
    lines = [f'{name} = "{tmp_path / folder}"' for name, folder in folders.items()]
    path = tmp_path / "agent.toml"
    path.write_text("\n".join(['gpu_backend = "emulated"', *lines]) + "\n")
    return path


@pytest.mark.parametrize("name", ["prolog", "epilog"])
def test_outside_of_slurm_the_missing_variable_is_named(name: str, config: Path) -> None:
    done = perseus(f"slurm {name} --config", config, **{**JOB, "SLURM_JOB_ID": None})
    expected = "SLURM_JOB_ID: expected a number, as slurmd gives its prolog and epilog, found ''"
    assert (done.exit_code, done.stderr) == (2, f"error: {expected}\n")


def test_without_an_agent_the_job_has_its_grant(config: Path, tmp_path: Path) -> None:
    grant = tmp_path / "grants" / "slurm-17"
    done = perseus("slurm prolog --config", config, **JOB)
    expected = f"no agent at {tmp_path / 's'}: the job will train at stock clocks"
    assert (done.exit_code, done.stderr) == (1, f"error: {expected}\n")
    assert grant.read_text() == "1004: GPU-a slurm-job=17\n"
    done = perseus("slurm epilog --config", config, **JOB)
    assert (done.exit_code, done.stderr, grant.exists()) == (0, "", False)


def test_a_missing_gpu_is_named(config: Path) -> None:
    done = perseus("slurm prolog --config", config, **{**JOB, "SLURM_JOB_GPUS": "1"})
    expected = "SLURM_JOB_GPUS: expected GPUs of this node (0), found 1"
    assert (done.exit_code, done.stderr) == (1, f"error: {expected}\n")


def test_a_wrong_setting_is_named(config: Path) -> None:
    config.write_text('grantz = "/x"\n')
    done = perseus("slurm epilog --config", config, **JOB)
    assert (done.exit_code, "grantz" in done.stderr) == (2, True)
