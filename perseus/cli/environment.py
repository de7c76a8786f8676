"""Environment variables that look like ours and are none: a setting misspelt is a setting not made."""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from perseus.agent.restore.supervisor import LIFELINE
from perseus.agent.sidecar.settings import AgentSettings
from perseus.grid.settings import DsxFlexSettings
from perseus.service.settings import CoordinatorSettings

PREFIX = "PERSEUS_"

# What is read where no setting and no flag says so.
_OTHERS = frozenset({"PERSEUS_TOKEN", LIFELINE, "PERSEUS_NVML_STUB", "PERSEUS_SPEED", "PERSEUS_JOB"})


def unknown(environment: Mapping[str, str], command: Any) -> Iterator[str]:
    """Yield a sentence for each variable with our prefix that nothing reads.

    `command` is the whole command line, whose flags' variables are known.
    """
    known = {*_OTHERS, *_of_settings(), *_of_flags(command)}
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f": did you mean {close[0]}?" if close else ""
            yield f"environment variable {name} is none of Perseus{hint}"


def _of_settings() -> Iterator[str]:
    for model in (AgentSettings, CoordinatorSettings, DsxFlexSettings):
        prefix = model.model_config["env_prefix"]
        yield from (f"{prefix}{field}".upper() for field in model.model_fields)


def _of_flags(command: Any) -> Iterator[str]:
    for parameter in command.params:
        names: str | Iterable[str] = getattr(parameter, "envvar", None) or ()
        yield from [names] if isinstance(names, str) else names
    for each in getattr(command, "commands", {}).values():
        yield from _of_flags(each)
