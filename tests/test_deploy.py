"""What deploy/ says to systemd is what the command line understands."""

import configparser
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer

from perseus import configuration
from perseus.agent.restore.supervisor import STOP_S
from perseus.agent.sidecar.local import _FILES_FOR_ALL_ELSE, _MAX_CONNECTIONS
from perseus.agent.sidecar.settings import AgentSettings
from perseus.cli.main import app
from perseus.tls.files import TlsFiles

UNIT = Path(__file__).parent.parent / "deploy" / "perseus-agent.service"


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT.read_text())
    return parser["Service"]


@pytest.mark.parametrize("key", ["ExecStart", "ExecStopPost"])
def test_commands_are_parsed(key: str) -> None:
    env, perseus, name, *flags = unit()[key].split()
    assert (env, perseus, name) == ("/usr/bin/env", "perseus", "agent")
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    context = command.make_context("agent", flags)
    assert context.params["config"] == Path("/etc/perseus/agent.toml")
    assert context.params["restore"] == (key == "ExecStopPost")


def test_the_settings_that_it_shows_are_settings() -> None:
    lines = UNIT.read_text().splitlines()
    shown = tomllib.loads(
        "\n".join(line.removeprefix("#     ") for line in lines if line.startswith("#     "))
    )
    settings = configuration.load(AgentSettings, None, shown)
    assert settings.tls_files == TlsFiles(
        Path("/etc/perseus/agent.pem"), Path("/etc/perseus/agent.key"), Path("/etc/perseus/ca.pem")
    )


def test_records_outlive_the_service() -> None:
    service = unit()
    assert service["StateDirectory"] == "perseus"
    assert "RemainAfterExit" not in service
    assert service["KillMode"] == "mixed"


def test_a_stop_is_over_before_systemd_ends_it() -> None:
    assert int(unit()["TimeoutStopSec"]) >= STOP_S + 2


def test_every_capability_that_is_kept_has_its_reason() -> None:
    text = UNIT.read_text()
    kept = re.findall(
        r"CAP_[A-Z_]+", " ".join(re.findall(r"^CapabilityBoundingSet=(.*)$", text, re.MULTILINE))
    )
    said = re.findall(r"CAP_[A-Z_]+", " ".join(re.findall(r"^#   (.*)$", text, re.MULTILINE)))
    assert sorted(kept) == sorted(said)
    assert len(kept) == len(set(kept)) > 0


def test_files_for_all_connections_and_nothing_for_others() -> None:
    service = unit()
    assert int(service["LimitNOFILE"]) >= 2 * _MAX_CONNECTIONS + _FILES_FOR_ALL_ELSE
    assert service["UMask"] == "0077"
    assert service["DevicePolicy"] == "closed"
    assert service["NoNewPrivileges"] == "yes"


needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


@needs_systemd
def test_systemd_understands_the_unit() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(UNIT)], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0 and "Failed to initialize manager" in done.stderr:
        pytest.skip("systemd-analyze can't run here")
    assert UNIT.name not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


@needs_systemd
def test_systemd_finds_it_little_exposed() -> None:
    """What is left is what the unit gives reasons for; a service without any of it has 9.6."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=41", "--no-pager", str(UNIT)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unrecognized option" in done.stderr or "Failed to" in done.stderr:
        pytest.skip("this systemd-analyze can't look at a file")
    assert done.returncode == 0, done.stdout
