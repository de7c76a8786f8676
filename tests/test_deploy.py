"""The files in deploy/ match the command line and its settings."""

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel

from perseus import configuration
from perseus.agent.restore.supervisor import SILENCE_S, STOP_S
from perseus.agent.sidecar.instance_settings import InstanceSettings
from perseus.agent.sidecar.local import _FILES_FOR_ALL_ELSE, _MAX_CONNECTIONS
from perseus.agent.sidecar.settings import AgentSettings
from perseus.cli.main import app
from perseus.cli.terminal import BAD_INPUT
from perseus.demo.processes import Process
from perseus.demo.security import Security
from perseus.service.settings import CoordinatorSettings, FeedSettings
from perseus.service.signal_settings import SignalSettings
from perseus.tls.files import TlsFiles

DEPLOY = Path(__file__).parent.parent / "deploy"
UNIT = DEPLOY / "perseus-agent.service"
COORDINATOR_UNIT = DEPLOY / "perseus-coordinator.service"
UNITS = [UNIT, COORDINATOR_UNIT]
INSTALLED = "/opt/perseus/bin/perseus"


def unit(path: Path = UNIT) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(path.read_text())
    return parser["Service"]


def shown_settings(path: Path) -> dict[str, object]:
    """Return the settings in a unit's comment, as TOML."""
    lines = path.read_text().splitlines()
    return tomllib.loads(
        "\n".join(line.removeprefix("#     ") for line in lines if line.startswith("#     "))
    )


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Return the install script with a fake wheel."""
    folder = tmp_path / "bundle"
    (folder / "wheels").mkdir(parents=True)
    (folder / "wheels" / "perseus_energy-1-py3-none-any.whl").touch()
    shutil.copy(DEPLOY / "install", folder)
    return folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("is_writable", [False, True])
def test_root_installs_into_no_folder_of_another_user(
    bundle: Path, tmp_path: Path, is_writable: bool
) -> None:
    planted = tmp_path / "perseus" / "bin" / "python"
    planted.parent.mkdir(parents=True)
    planted.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    planted.chmod(0o777 if is_writable else 0o755)
    if not is_writable:
        os.chown(planted, 65534, -1)
    done = subprocess.run(
        [bundle / "install", "agent", tmp_path / "perseus"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"found what others own or may write: {planted}" in done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow("makes a virtual environment")
def test_the_install_script_loads_nothing_from_the_current_folder(bundle: Path, tmp_path: Path) -> None:
    current = tmp_path / "current"
    current.mkdir()
    for name in ("venv", "pip", "ensurepip"):
        (current / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    command = [str(bundle / "install"), "agent", str(tmp_path / "perseus")]
    done = subprocess.run(command, cwd=current, capture_output=True, text=True, check=False)
    assert "perseus_energy-1-py3-none-any.whl" in done.stderr, "as far as pip, which refuses the wheel"
    assert not (tmp_path / "ran").exists()


def test_units_and_scripts_use_the_install_script_s_folder() -> None:
    assert f"folder=${{2:-{INSTALLED.removesuffix('/bin/perseus')}}}" in (DEPLOY / "install").read_text()
    for script in ("prolog", "epilog"):
        assert f'"${{perseus:-{INSTALLED}}}"' in (DEPLOY / "slurm" / script).read_text()


def parsed(command: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the parameters of a command of the installed program."""
    perseus, name, *flags = command.split()
    assert perseus == INSTALLED
    found = typer.main.get_group(app).get_command(None, name)  # type: ignore[arg-type]
    assert found is not None
    return name, found.make_context(name, flags).params


@pytest.mark.parametrize(
    ("path", "key"), [(UNIT, "ExecStart"), (UNIT, "ExecStopPost"), (COORDINATOR_UNIT, "ExecStart")]
)
def test_commands_are_parsed(path: Path, key: str) -> None:
    name, parameters = parsed(unit(path)[key])
    assert path.stem == f"perseus-{name}"
    assert parameters["config"] == Path(f"/etc/perseus/{name}.toml")
    assert parameters.get("restore", False) == (key == "ExecStopPost")


def test_an_agent_is_alive_if_it_answers_in_good_time_whatever_that_is() -> None:
    text = (DEPLOY / "helm" / "perseus" / "templates" / "agent.yaml").read_text()
    probe = yaml.safe_load(text.partition("livenessProbe:")[2].partition("          resources:")[0])
    name, parameters = parsed(" ".join(probe["exec"]["command"]))
    assert (name, parameters["alive"]) == ("health", True)
    assert parameters["timeout_s"] + 5 <= probe["timeoutSeconds"] <= probe["periodSeconds"]


def test_the_settings_in_the_unit_s_comment_are_valid() -> None:
    settings = configuration.load(AgentSettings, None, shown_settings(UNIT))
    assert settings.tls_files == TlsFiles(
        Path("/etc/perseus/agent.pem"), Path("/etc/perseus/agent.key"), Path("/etc/perseus/ca.pem")
    )


def test_the_settings_in_the_coordinator_s_unit_are_valid() -> None:
    settings = configuration.load(CoordinatorSettings, None, shown_settings(COORDINATOR_UNIT))
    state = Path("/var/lib") / unit(COORDINATOR_UNIT)["StateDirectory"]
    assert Path(settings.database).parent == settings.operator_token_file.parent == state


@pytest.mark.slow("processes of a coordinator, and of a command that asks it")
def test_the_coordinator_runs_with_the_settings_in_its_unit(tmp_path: Path) -> None:
    security = Security(tmp_path / "security")
    given = {
        **shown_settings(COORDINATOR_UNIT),
        "listen": "127.0.0.1:0",
        "http": "127.0.0.1:0",
        "database": str(tmp_path / "jobs.db"),
        "operator_token_file": str(security.token_file),
        "tls_certificate": str(security.coordinator_certificate),
        "tls_key": str(security.coordinator_key),
        "tls_client_ca": str(security.ca),
    }
    config = tmp_path / "coordinator.toml"
    config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items()))
    command = (
        unit(COORDINATOR_UNIT)["ExecStart"].replace("/etc/perseus/coordinator.toml", str(config)).split()
    )
    arguments = ["-m", "perseus.cli", *command[1:], "--log-format=json"]
    with Process(tmp_path / "coordinator.log", *arguments) as coordinator:
        coordinator.launch()
        address = str(coordinator.logged("listening")["address"])
        environment = {**os.environ, **security.of_operator(), "PERSEUS_COORDINATOR": address}
        ask = [sys.executable, "-m", "perseus.cli", "health"]
        assert subprocess.run(ask, env=environment, check=False, timeout=60).returncode == 0
        assert coordinator.terminate() == 0


def test_the_chart_accepts_exactly_the_settings_that_there_are() -> None:
    schema = json.loads((DEPLOY / "helm" / "perseus" / "values.schema.json").read_text())

    def keys(found: Any) -> set[str]:
        assert found["additionalProperties"] is False
        return set(found["properties"])

    for part, model in (("coordinator", CoordinatorSettings), ("agent", AgentSettings)):
        settings = schema["properties"][part]["properties"]["settings"]
        assert keys(settings) == set(model.model_fields)
        tables: dict[str, type[BaseModel]] = (
            {"feeds": FeedSettings, "signals": SignalSettings}
            if model is CoordinatorSettings
            else {"instances": InstanceSettings}
        )
        for table, of_one in tables.items():
            own = settings["properties"][table]["additionalProperties"]
            assert keys(own) == set(of_one.model_fields)


def test_the_coordinator_has_a_user_of_its_own_and_nothing_else() -> None:
    service = unit(COORDINATOR_UNIT)
    _, name, _, _, home = shlex.split((DEPLOY / "perseus-coordinator.sysusers").read_text().splitlines()[1])
    assert (service["User"], service["StateDirectory"]) == (name, Path(home).name)
    assert service["CapabilityBoundingSet"] == ""


@pytest.mark.parametrize("path", [UNIT, COORDINATOR_UNIT])
def test_a_wrong_setting_ends_a_service_for_good(path: Path) -> None:
    assert unit(path)["RestartPreventExitStatus"] == str(BAD_INPUT)


def test_records_outlive_the_agent_s_service() -> None:
    service = unit()
    assert service["StateDirectory"] == "perseus"
    assert "RemainAfterExit" not in service
    assert "KillMode" not in service, "a supervisor that the watchdog kills takes the agent along"


def test_systemd_waits_longer_for_the_supervisor_than_that_for_the_agent() -> None:
    service = unit()
    assert int(service["WatchdogSec"]) > SILENCE_S
    assert service["WatchdogSignal"] == "SIGKILL", "the only one that ends a process that is stopped"
    assert int(service["TimeoutStopSec"]) >= STOP_S + 2


def test_every_kept_capability_has_its_reason() -> None:
    text = UNIT.read_text()
    kept = re.findall(
        r"CAP_[A-Z_]+", " ".join(re.findall(r"^CapabilityBoundingSet=(.*)$", text, re.MULTILINE))
    )
    message = re.findall(r"CAP_[A-Z_]+", " ".join(re.findall(r"^#   (.*)$", text, re.MULTILINE)))
    assert sorted(kept) == sorted(message)
    assert len(kept) == len(set(kept)) > 0


def test_file_limits_and_permissions() -> None:
    service = unit()
    assert int(service["LimitNOFILE"]) >= 2 * _MAX_CONNECTIONS + _FILES_FOR_ALL_ELSE
    assert service["UMask"] == "0077"
    assert service["DevicePolicy"] == "closed"
    assert service["NoNewPrivileges"] == "yes"


needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


@needs_systemd
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_the_unit(path: Path, tmp_path: Path) -> None:
    # It checks that the program exists: use an existing one.
    copied = tmp_path / path.name
    copied.write_text(path.read_text().replace(INSTALLED, "/usr/bin/env"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copied)], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0 and "Failed to initialize manager" in done.stderr:
        pytest.skip("systemd-analyze can't run here")
    assert path.name not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


@needs_systemd
@pytest.mark.parametrize(("path", "threshold"), [(UNIT, 41), (COORDINATOR_UNIT, 20)])
def test_systemd_rates_the_exposure_as_low(path: Path, threshold: int) -> None:
    """The unit gives reasons for the remaining exposure; a service without any protection has 9.6."""
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={threshold}", "--no-pager"]
    done = subprocess.run([*command, path], capture_output=True, text=True, timeout=60, check=False)
    if "unrecognized option" in done.stderr or "Failed to" in done.stderr:
        pytest.skip("this systemd-analyze can't look at a file")
    assert done.returncode == 0, done.stdout


# --- Slurm --------------------------------------------------------------------------------------------------


def run_hook(name: str, folder: Path, status: int, **environment: str) -> tuple[int, str]:
    """Return the exit code of a Slurm script, and its call of Perseus, which ends with `status`."""
    perseus = folder / "perseus"
    perseus.write_text(f'#!/bin/sh\necho "$@"\nexit {status}\n')
    perseus.chmod(0o755)
    log = folder / "log"
    message = {"perseus": str(perseus), "perseus_log": str(log), **environment}
    done = subprocess.run([DEPLOY / "slurm" / name], env=message, check=False, timeout=60)
    return done.returncode, log.read_text() if log.exists() else ""


@pytest.mark.parametrize("name", ["prolog", "epilog"])
def test_a_job_without_gpus_is_ignored(name: str, tmp_path: Path) -> None:
    assert run_hook(name, tmp_path, 1) == (0, "")


def test_a_job_runs_even_if_the_prolog_fails(tmp_path: Path) -> None:
    status, called = run_hook("prolog", tmp_path, 1, SLURM_JOB_GPUS="0")
    assert (status, called) == (0, "slurm prolog --config /etc/perseus/agent.toml\n")


def test_the_prolog_starts_an_agent_if_configured(tmp_path: Path) -> None:
    _, called = run_hook("prolog", tmp_path, 0, SLURM_JOB_GPUS="0", perseus_start_agent="/var/log/agent.log")
    assert called == "slurm prolog --config /etc/perseus/agent.toml --start-agent /var/log/agent.log\n"


@pytest.mark.parametrize("status", [0, 1])
def test_a_gpu_that_is_not_restored_drains_the_node(status: int, tmp_path: Path) -> None:
    found, called = run_hook("epilog", tmp_path, status, SLURM_JOB_GPUS="0", perseus_config="/agent.toml")
    assert (found, called) == (status, "slurm epilog --config /agent.toml\n")
