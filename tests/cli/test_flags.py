"""Every setting of a process is a flag of its command, but for those that can be none."""

import inspect
from collections.abc import Callable

import pytest
from pydantic_settings import BaseSettings

from perseus.agent.sidecar.settings import AgentSettings
from perseus.cli.agent import agent
from perseus.cli.coordinator import coordinator
from perseus.cli.grid import dsx_flex
from perseus.grid.settings import DsxFlexSettings
from perseus.service.settings import CoordinatorSettings

# A secret is not for the command line, which everybody sees; a table is for the configuration's file.
NO_FLAGS = {"token", "certificate_scopes", "feeds"}


@pytest.mark.parametrize(
    ("command", "settings"),
    [(coordinator, CoordinatorSettings), (agent, AgentSettings), (dsx_flex, DsxFlexSettings)],
)
def test_every_setting_is_a_flag(command: Callable[..., None], settings: type[BaseSettings]) -> None:
    assert set(settings.model_fields) - NO_FLAGS <= set(inspect.signature(command).parameters)
