"""Warnings for PERSEUS_ environment variables that nothing reads, such as misspelt settings."""

from collections.abc import Iterator, Mapping
from dataclasses import fields

PREFIX = "PERSEUS_"

# Variables that are read without being a setting or a flag.
_OTHERS = frozenset({"PERSEUS_TOKEN", "PERSEUS_NVML_STUB", "PERSEUS_SPEED", "PERSEUS_JOB"})


def unknown(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each variable with our prefix that nothing reads.

    Yield nothing under a supervisor: the command that started it has warned already.
    """
    named = {name for name in environment if name.startswith(PREFIX)} - _OTHERS
    if not named:
        return
    from perseus.agent.restore.supervisor import LIFELINE
    from perseus.cli.connection import Connection
    from perseus.cli.terminal import did_you_mean

    of_flags = {f"{PREFIX}{field.name}".upper() for field in fields(Connection)}
    if LIFELINE in named or named <= of_flags:
        return
    known = _OTHERS | of_flags | {LIFELINE, *_of_settings()}
    for name in sorted(named - known):
        yield f"environment variable {name} is unknown to Perseus{did_you_mean(name, known)}"


def _of_settings() -> Iterator[str]:
    from perseus.agent.sidecar.settings import AgentSettings
    from perseus.grid.settings import DsxFlexSettings
    from perseus.service.settings import CoordinatorSettings

    for model in (AgentSettings, CoordinatorSettings, DsxFlexSettings):
        prefix = model.model_config["env_prefix"]
        yield from (f"{prefix}{field}".upper() for field in model.model_fields)
