"""Consoles, exit codes and error messages that the commands share."""

import sys
from collections.abc import Iterable
from typing import Annotated, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.measure import Measurement

from perseus.printable import os_error_text as os_error_text
from perseus.printable import printable

BAD_INPUT = 2
"""Exit code for errors that the user can fix: a flag, a file, an unknown name."""
FAILURE = 1
"""Exit code for failures despite valid input."""
TOO_BUSY = 75
"""Exit code of a demo on a machine too busy to judge it, as of sysexits.h: try again later."""
STORE_FAILED = 3
"""Exit code of a coordinator whose database failed while it ran: a full disk, a lost connection."""


YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


class _Console(Console):
    """A console that leaves a closed pipe to `entry`, as other outputs do."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


# No markup and no emoji codes: texts often contain names from others, which must not be read as styles.
# Lines are not wrapped: terminals wrap them themselves, and scripts need them whole.
console = _Console(soft_wrap=True, markup=False, emoji=False)
error_console = Console(stderr=True, soft_wrap=True, markup=False, emoji=False)
screen_console = _Console(markup=False, emoji=False)
"""For screens that are drawn again and again: their lines wrap, as they would be cut at the edge."""

_ANY_WIDTH = 1_000_000


def print_whole(*tables: RenderableType, to: Console = console) -> None:
    """Print tables without cutting or breaking words: in a pipe at full width, a line for each row.

    On a terminal, texts wrap within their cell; the terminal wraps a table that is still too wide.
    """
    for table in tables:
        measured = Measurement.get(to, to.options.update(width=_ANY_WIDTH), table)
        width = max(to.width, measured.minimum) if to.is_terminal else measured.maximum
        _Console(file=to.file, width=width, markup=False, emoji=False).print(table, crop=False)


def warn(message: str) -> None:
    """Print a warning to standard error."""
    error_console.print(f"warning: {printable(message)}", style="yellow", highlight=False)


def fail(message: str, code: int = BAD_INPUT) -> NoReturn:
    """Print an error to standard error, and exit. The message may quote untrusted text."""
    error_console.print("error:", end=" ", style="bold red", highlight=False)
    lines = (printable(line) for line in message.split("\n"))
    error_console.print("\n".join(lines), highlight=False)
    raise typer.Exit(code)


def confirm(consequence: str, question: str) -> None:
    """Ask before a change with this consequence; exit unless the answer is yes."""
    if not can_ask():
        fail(f"{consequence}: expected --yes, as there is no terminal to ask")
    typer.confirm(f"{printable(consequence)}. {question}", abort=True, err=True)


def can_ask() -> bool:
    """Return whether a person can answer a question."""
    return sys.stdin is not None and sys.stdin.isatty()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message on an unknown name: the most similar known one, if any is similar."""
    from difflib import get_close_matches

    spelled = {each.casefold(): each for each in known}
    close = get_close_matches(name.casefold(), spelled, n=1)
    return f": did you mean {spelled[close[0]]}?" if close else ""
