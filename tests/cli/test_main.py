"""The overview of all commands, and the imports of each."""

import os
import subprocess
import sys
from typing import Any

import pytest
from typer.main import get_group

from perseus.cli.main import app


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
