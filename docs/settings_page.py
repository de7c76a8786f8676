"""The page of all settings, made from the settings models: `make settings`."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

from perseus.agent.sidecar.settings import AgentSettings
from perseus.configuration import flags
from perseus.grid.settings import DsxFlexSettings
from perseus.service.settings import CoordinatorSettings

_INTRODUCTION = """\
# Settings

`make settings` makes this page from the settings models. A flag wins over its environment variable, and the
variable over the TOML file that `--config` names. The file uses the names of the first column. A name ends
with its unit: `_s` seconds, `_w` watts, `_j` joules, `_mhz` megahertz, `_bytes` bytes.
"""

_COMMANDS: Mapping[str, type[BaseSettings]] = {
    "perseus coordinator": CoordinatorSettings,
    "perseus agent": AgentSettings,
    "perseus grid dsx-flex": DsxFlexSettings,
}

_UNITS = {
    "s": "s", "w": "W", "j": "J", "mhz": "MHz", "percent": "%", "bytes": "bytes", "days": "days",
    "kwh": "per kWh", "g_per_kwh": "g/kWh", "w_per_s": "W/s", "messages_per_s": "messages/s",
}  # fmt: skip


def page() -> str:
    """Return the page, as Markdown."""
    parts = [_INTRODUCTION]
    for command, model in _COMMANDS.items():
        prefix = str(model.model_config["env_prefix"])
        with_flag = flags(model)
        rows = []
        for name in _own_first(model):
            flag = f"`--{name.replace('_', '-')}`" if name in with_flag else "–"
            cells = (flag, f"`{prefix}{name.upper()}`", *_cells(model, name))
            rows.append(f"| `{name}` | {' | '.join(cells)} |")
        head = "| setting | flag | environment variable | default | unit | |\n|---|---|---|---|---|---|"
        parts.append("\n".join([f"## `{command}`\n", head, *rows]) + "\n")
        parts += [_table(name, kind) for name, kind in _tables(model)]
    return "\n".join(parts)


def _own_first(model: type[BaseSettings]) -> list[str]:
    """A model's own settings before those that it inherits, as the command line's help has them."""
    names = (name for base in model.__mro__ for name in vars(base).get("__annotations__", ()))
    return [name for name in dict.fromkeys(names) if name in model.model_fields]


def _tables(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Settings that are tables of models in the TOML file, and the model of each."""
    for name, field in model.model_fields.items():
        for kind in get_args(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield name, kind


def _table(name: str, model: type[BaseModel]) -> str:
    rows = [f"| `{each}` | {' | '.join(_cells(model, each))} |" for each in model.model_fields]
    head = "| setting | default | unit | |\n|---|---|---|---|"
    return "\n".join([f"### `[{name}.NAME]` in the TOML file\n", head, *rows]) + "\n"


def _cells(model: type[BaseModel], name: str) -> tuple[str, str, str]:
    """Default, unit and description."""
    text = str(model.model_fields[name].description).replace("|", "\\|").replace("\\[", "[")
    return _default(model, name), _unit(name), text


def _default(model: type[BaseModel], name: str) -> str:
    field = model.model_fields[name]
    value: Any = field.default
    if field.is_required():
        return "required"
    if value is PydanticUndefined:  # a function of the user or of the other settings
        return "by user"
    if value in (None, "", (), {}):
        return "–"
    return (
        "no limit" if value == math.inf else f"`{str(value).lower() if isinstance(value, bool) else value}`"
    )


def _unit(name: str) -> str:
    endings = [ending for ending in _UNITS if name.endswith(f"_{ending}")]
    return _UNITS[max(endings, key=len)] if endings else ""


if __name__ == "__main__":
    print(page(), end="")
