"""Calls of commands in this process, and what they print."""

import io
import shlex

from rich.console import Console, RenderableType
from typer.testing import CliRunner, Result

from perseus.cli.main import app


def perseus(command: str, *more: object, answer: str | None = None, **environment: str | None) -> Result:
    """Run a command line, with more arguments that need no quotes; `answer`: what the user types.

    A variable of the environment that is None is unset.

    An error that the command does not anticipate is raised.
    """
    return CliRunner().invoke(
        app,
        [*shlex.split(command), *map(str, more)],
        input=answer,
        env={"COLUMNS": "200", **environment},
        catch_exceptions=False,
    )


def text(result: Result) -> str:
    """Return the whole output, without line breaks."""
    return " ".join(result.output.split())


def rendered(shown: RenderableType, width: int = 200) -> str:
    """Return what is printed of a table."""
    console = Console(file=io.StringIO(), width=width, markup=False, emoji=False)
    with console.capture() as printed:
        console.print(shown)
    return printed.get()


def lines(shown: RenderableType, width: int = 200) -> list[str]:
    """Return the lines of a table, without frames and repeated blanks."""
    return [" ".join(line.replace("│", " ").split()) for line in rendered(shown, width).splitlines()]
