"""`perseus slurm`: exit codes and one-line errors."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from perseus.cli.main import app
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM

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


def run(name: str, config: Path, environment: dict[str, str | None]) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["slurm", name, "--config", str(config)], env=environment)
    return done.exit_code, done.stderr


@pytest.mark.parametrize("name", ["prolog", "epilog"])
def test_outside_of_slurm_the_missing_variable_is_named(name: str, config: Path) -> None:
    status, os_error_text = run(name, config, {**JOB, "SLURM_JOB_ID": None})
    assert (status, os_error_text) == (
        2,
        "error: SLURM_JOB_ID: expected a number, as slurmd gives its prolog and epilog, found ''\n",
    )


def test_without_an_agent_the_job_has_its_grant(config: Path, tmp_path: Path) -> None:
    status, os_error_text = run("prolog", config, {**JOB})
    assert status == 1
    assert os_error_text == f"error: no agent at {tmp_path / 's'}: the job will train at stock clocks\n"
    assert (tmp_path / "grants" / "slurm-17").read_text() == "1004: GPU-a slurm-job=17\n"
    assert run("epilog", config, {**JOB}) == (0, "")
    assert not (tmp_path / "grants" / "slurm-17").exists()


def test_a_missing_gpu_is_named(config: Path) -> None:
    status, os_error_text = run("prolog", config, {**JOB, "SLURM_JOB_GPUS": "1"})
    assert (status, os_error_text) == (1, "error: SLURM_JOB_GPUS: expected GPUs of this node (0), found 1\n")


def test_a_wrong_setting_is_named(config: Path) -> None:
    config.write_text('grantz = "/x"\n')
    status, os_error_text = run("epilog", config, {**JOB})
    assert status == 2
    assert "grantz" in os_error_text
