"""Settings of a long-running command: flags win over environment variables, those over a TOML file.

The coordinator and the agent each declare a `BaseSettings` model; this module is the one way to fill it, so
that both name a mistake in the same words.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import SecretStr, ValidationError
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


def flags(model: type[BaseSettings]) -> dict[str, type]:
    """Return the settings that a command line has flags for, with what it reads each as.

    A model's own come first, then those that it inherits. Secrets are none, as everybody sees a command line,
    nor are tables. What is neither a number, a path nor a switch is text to the command line.
    """
    found: dict[str, type] = {}
    for name in (name for base in model.__mro__ for name in vars(base).get("__annotations__", ())):
        if name not in model.model_fields:
            continue
        annotation = model.model_fields[name].annotation
        is_union = get_origin(annotation) in (Union, UnionType)
        kinds = set(get_args(annotation) if is_union else (annotation,)) - {NoneType}
        if SecretStr not in kinds and all(get_origin(kind) is not dict for kind in kinds):
            found[name] = kinds.pop() if len(kinds) == 1 and kinds < {bool, int, float, Path} else str
    return found


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
