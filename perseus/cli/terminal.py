"""What the commands share: consoles, exit codes, and how a mistake is said."""

from typing import NoReturn

import typer
from rich.console import Console, RenderableType
from rich.measure import Measurement

from perseus.printable import printable

BAD_INPUT = 2
"""Exit code for what the user can put right: a flag, a file, an unknown name."""
FAILURE = 1
"""Exit code for what went wrong although the input was fine."""
STORE_FAILED = 3
"""Exit code of a coordinator whose database failed while it ran: a full disk, a lost connection."""


class _Console(Console):
    """A console that leaves a closed pipe to `entry`, as other outputs do."""

    def on_broken_pipe(self) -> NoReturn:
        """See `Console.on_broken_pipe`."""
        raise BrokenPipeError


# No markup and no emoji codes: what is shown is seldom ours alone, and a name is not to be read as a style.
# Lines are as long as they are: whoever reads them, a terminal or a script, knows how to go on.
console = _Console(soft_wrap=True, markup=False, emoji=False)
error_console = Console(stderr=True, soft_wrap=True, markup=False, emoji=False)


_ANY_WIDTH = 1_000_000


def print_whole(*tables: RenderableType, to: Console = console) -> None:
    """Print tables in which no word is cut or broken: in a pipe as wide as they are, a line for each row.

    On a terminal texts go on in the next line of their cell, and a table that is too wide all the same goes
    on as the terminal has it.
    """
    for table in tables:
        measured = Measurement.get(to, to.options.update(width=_ANY_WIDTH), table)
        width = max(to.width, measured.minimum) if to.is_terminal else measured.maximum
        _Console(file=to.file, width=width, markup=False, emoji=False).print(table, crop=False)


def os_error_text(error: OSError) -> str:
    """Return an error of the system's in words: which file, and what of it; or the words it was made with."""
    if error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror


def warn(message: str) -> None:
    """Say what looks wrong on standard error, and go on."""
    error_console.print(f"warning: {printable(message)}", style="yellow", highlight=False)


def fail(message: str, code: int = BAD_INPUT) -> NoReturn:
    """Say what is wrong on standard error, and exit. The message may quote others."""
    error_console.print("error:", end=" ", style="bold red", highlight=False)
    lines = (printable(line) for line in message.split("\n"))
    error_console.print("\n".join(lines), highlight=False)
    raise typer.Exit(code)
