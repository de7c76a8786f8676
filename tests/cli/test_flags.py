"""Every setting of a process is a flag of its command, but for those that can be none."""

import inspect
from collections.abc import Callable

import pytest
from pydantic_settings import BaseSettings
from typer.testing import CliRunner

from perseus.agent.sidecar.settings import AgentSettings
from perseus.cli.agent import agent
from perseus.cli.coordinator import coordinator
from perseus.cli.grid import dsx_flex
from perseus.cli.main import app
from perseus.grid.settings import DsxFlexSettings
from perseus.service.settings import CoordinatorSettings

# A secret is not for the command line, which everybody sees; a table is for the configuration's file.
NO_FLAGS = {"token", "certificate_scopes", "feeds", "signals"}


@pytest.mark.parametrize(
    ("command", "settings"),
    [(coordinator, CoordinatorSettings), (agent, AgentSettings), (dsx_flex, DsxFlexSettings)],
)
def test_every_setting_is_a_flag(command: Callable[..., None], settings: type[BaseSettings]) -> None:
    assert set(settings.model_fields) - NO_FLAGS <= set(inspect.signature(command).parameters)


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        (["coordinator"], CoordinatorSettings),
        (["agent"], AgentSettings),
        (["grid", "dsx-flex"], DsxFlexSettings),
    ],
)
def test_the_help_has_every_word_of_what_settings_are_described_with(
    command: list[str], settings: type[BaseSettings]
) -> None:
    told = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "1000"}, catch_exceptions=False)
    for name in set(settings.model_fields) - NO_FLAGS:
        assert str(settings.model_fields[name].description) in told.stdout
