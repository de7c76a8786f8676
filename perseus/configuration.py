"""Settings of long-running commands: flags override environment variables, which override a TOML file.

The coordinator and the agent each declare a `BaseSettings` model; both fill it through this module, so that
both report a mistake in the same words.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

from perseus.regular_file import MAX_SMALL_FILE_BYTES, read_bounded

Settings = TypeVar("Settings", bound=BaseSettings)


class ConfigurationError(Exception):
    """A setting is missing, unknown or out of range; the text names the setting and its source."""


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
    """Return the settings with flags on the command line, and the type of each flag.

    A model's own settings come first, then inherited ones. Secrets have no flag, since all users can see a
    command line, nor have tables. A setting that is no number, path or switch is text on the command line.
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
    """Return a setting's description, and its default if it has one, for the help of its flag."""
    field = model.model_fields[name]
    default = field.get_default(call_default_factory=True, validated_data={})
    return f"{field.description}" if default is None else f"{field.description} (default {default})"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_bounded(path, MAX_SMALL_FILE_BYTES).decode())
    except OSError as error:
        raise ConfigurationError(f"{path}: can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
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
    if problem["type"] == "missing":  # the input would be all settings, including secrets
        return f"{where}: expected a value, found none"
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}, found {problem['input']!r}"
