"""Settings of a long-running command: flags win over environment variables, those over a TOML file.

The coordinator and the agent each declare a `BaseSettings` model; this module is the one way to fill it, so
that both name a mistake in the same words.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

Settings = TypeVar("Settings", bound=BaseSettings)


class ConfigurationError(Exception):
    """A setting is missing, unknown or out of range; the text names it, and where it came from."""


def load(model: type[Settings], toml: Path | None, overrides: Mapping[str, object]) -> Settings:
    """Fill `model` from `overrides` (flags; None means not given), the environment and `toml`, in that order.

    Raises:
        ConfigurationError: the file can't be read or parsed, or a value does not fit.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    from_file = _read(toml) if toml is not None else {}

    class Layered(model):  # type: ignore[misc, valid-type]
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, from_file)

    try:
        layered = Layered(**given)
    except ValidationError as error:
        prefix = str(model.model_config.get("env_prefix", ""))
        lines = [_explain(problem, given, from_file, prefix, toml) for problem in error.errors()]
        raise ConfigurationError("\n".join(lines)) from None
    return model.model_construct(**{name: getattr(layered, name) for name in model.model_fields})


def describe(model: type[BaseSettings], name: str) -> str:
    """A setting's description and default, if it has one, for the help of its flag."""
    field = model.model_fields[name]
    default = field.get_default(call_default_factory=True, validated_data={})
    return f"{field.description}" if default is None else f"{field.description} (default {default})"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: expected TOML in UTF-8, found: {error}") from None


def _explain(
    problem: ErrorDetails,
    given: Mapping[str, object],
    from_file: Mapping[str, object],
    env_prefix: str,
    toml: Path | None,
) -> str:
    name = str(problem["loc"][0]) if problem["loc"] else ""
    if name in given:
        where = f"--{name.replace('_', '-')}"
    elif name in from_file:
        where = f"{toml}: {name}"
    else:
        where = f"{env_prefix}{name}".upper()
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown setting"
    if problem["type"] == "missing":  # what it was missed in is everything, secrets too
        return f"{where}: expected a value, found none"
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}, found {problem['input']!r}"
