"""Checks that a framework has the attributes that a hook needs: versions differ.

ValueErrors name the place, the expected attributes and the missing ones. Standard library only.
"""

import inspect
from collections.abc import Callable
from typing import Any

Argument = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""Returns one argument of a call, or its default."""


def check_attributes(owner: object, where: str, *names: str) -> None:
    """Raise ValueError if an object or a module lacks one of the attributes."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise ValueError(
            f"{where}: expected {', '.join(names)}, as in the versions of docs/frameworks.md, "
            f"found it without {', '.join(missing)}"
        )


def find_argument(function: Callable[..., Any], name: str, where: str) -> Argument:
    """Return a finder for a named argument, at its position in this version. ValueError if it has none."""
    parameters = inspect.signature(function).parameters
    if name not in parameters:
        raise ValueError(f"{where}: expected a parameter {name!r}, found {', '.join(parameters) or 'none'}")
    parameter = parameters[name]
    position = list(parameters).index(name)
    default = None if parameter.default is parameter.empty else parameter.default
    if parameter.kind is parameter.KEYWORD_ONLY:
        return lambda _args, kwargs: kwargs.get(name, default)

    def find(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[position] if position < len(args) else kwargs.get(name, default)

    return find
