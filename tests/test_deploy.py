"""What deploy/ says to systemd is what the command line understands."""

import configparser
import tomllib
from pathlib import Path

import pytest
import typer

from perseus import configuration
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
