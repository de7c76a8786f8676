"""Every setting of a process is a flag of its command, except for a few; the help of flags and commands."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import BaseSettings
from typer.main import get_group

from perseus.agent.sidecar.settings import AgentSettings
from perseus.cli.connection import Connection
from perseus.cli.main import app
from perseus.grid.settings import DsxFlexSettings
from perseus.service.settings import CoordinatorSettings
from tests.cli.commands import perseus

# Everybody can see the command line, so it takes no secrets; tables go into the configuration file.
NO_FLAGS = {"token", "certificate_scopes", "feeds", "instances", "signals"}

COMMANDS = [
    (["coordinator"], CoordinatorSettings),
    (["agent"], AgentSettings),
    (["grid", "dsx-flex"], DsxFlexSettings),
]

RECORDED = Path(__file__).with_name("flags.txt")
"""A line for each flag of these."""

# Defaults that depend on the user.
FOLDERS: list[tuple[type[BaseSettings], str]] = [
    (CoordinatorSettings, "operator_token_file"),
    (AgentSettings, "restore_folder"),
    (DsxFlexSettings, "state"),
]


def flags(names: list[str]) -> Iterator[str]:
    """Yield each flag of a command with its default and its help."""
    command: Any = get_group(app)
    for name in names:
        command = command.get_command(None, name)
    for each in command.params:
        text = each.help
        for model, name in FOLDERS:
            text = text.replace(
                str(model.model_fields[name].get_default(call_default_factory=True)), f"<{name}>"
            )
        yield f"{' '.join([*names, *each.opts])} ({each.default}): {text}"


def test_flags_are_those_recorded() -> None:
    found = sorted(line for names, _ in COMMANDS for line in flags(names))
    assert found == RECORDED.read_text().splitlines()


@pytest.mark.parametrize(("command", "settings"), COMMANDS)
def test_every_setting_is_a_flag_with_its_description(
    command: list[str], settings: type[BaseSettings]
) -> None:
    reported = perseus(" ".join(command), "--help", COLUMNS="1000").stdout
    for name, setting in settings.model_fields.items():
        assert (f"--{name.replace('_', '-')} " in reported) is (name not in NO_FLAGS)
        assert name in NO_FLAGS or str(setting.description) in reported


def tree(command: Any) -> Iterator[Any]:
    """Yield all commands below one."""
    for name in command.list_commands(None) if hasattr(command, "commands") else ():
        below = command.get_command(None, name)
        yield below
        yield from tree(below)


def test_variables_of_flags_are_named_like_the_flags() -> None:
    # `perseus.cli.environment` identifies them by their names.
    read = {
        (each.name, each.envvar)
        for command in tree(get_group(app))
        for each in command.params
        if each.envvar is not None
    }
    assert read == {(field.name, f"PERSEUS_{field.name.upper()}") for field in fields(Connection)}


def test_the_overview_has_the_first_paragraph_of_each_commands_help() -> None:
    group: Any = get_group(app)
    for name, in_overview in group.commands.items():
        first, _, _ = group.get_command(None, name).help.partition("\n\n")
        assert in_overview.help == " ".join(first.split())


HEAVY = {"grpc", "igraph", "matplotlib", "numpy", "pydantic", "sqlalchemy", "structlog"}


def imported(*arguments: str) -> set[str]:
    call = f"import sys; sys.argv = ['perseus', *{arguments}]; from perseus.cli.entry import main\n"
    call += "try: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    # Variables that look like settings are compared with all of them.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PERSEUS_")}
    command = [sys.executable, "-c", call]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "Usage: perseus" in done.stdout
    return {name.partition(".")[0] for name in done.stderr.split()}


@pytest.mark.parametrize("arguments", [["--help"], ["solve", "--help"]], ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    assert HEAVY & imported(*arguments) == set()
