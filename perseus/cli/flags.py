"""Flags that are defined elsewhere: a settings model's fields become flags with their descriptions."""

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from perseus.cli.terminal import fail

if TYPE_CHECKING:
    from perseus.configuration import Settings

Command = Callable[..., None]
Decorator = Callable[[Command], Command]


def in_place_of(name: str, flags: Sequence[inspect.Parameter], make: Callable[..., Any]) -> Decorator:
    """Replace a command's parameter `name` by `flags`, from whose values `make` builds the argument."""

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for each in (*(each for each in own if each.name != name), *flags)
        ]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            made = make(**{flag.name: given.pop(flag.name) for flag in flags})
            command(**given, **{name: made})

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def configured(model: "type[Settings]") -> Decorator:
    """Replace a command's parameter `settings` by `--config` and a flag for each field of a settings model.

    A flag has the setting's name, type and description; the model validates the values.
    """
    from perseus import configuration

    def flag(name: str, kind: Any, option: Any) -> inspect.Parameter:
        annotation = Annotated[kind | None, option]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def load(config: Path | None, **given: object) -> "Settings":
        try:
            return configuration.load(model, config, given)
        except configuration.ConfigurationError as error:
            fail(str(error))

    flags = [flag("config", Path, typer.Option(help="TOML file with the settings below."))]
    for name, kind in configuration.flags(model).items():
        switch = [f"--{name.replace('_', '-')}"] if kind is bool else []  # else typer adds a --no-…, too
        text = escape(configuration.describe(model, name))  # brackets in it are not markup
        flags.append(flag(name, kind, typer.Option(*switch, help=text, show_default=False)))
    return in_place_of("settings", flags, load)
