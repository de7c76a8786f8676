"""What the commands share: consoles, exit codes, and files that are whole or not there."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console

from perseus.printable import printable

BAD_INPUT = 2
"""Exit code for what the user can put right: a flag, a file, an unknown name."""
FAILURE = 1
"""Exit code for what went wrong although the input was fine."""
STORE_FAILED = 3
"""Exit code of a coordinator whose database failed while it ran: a full disk, a lost connection."""

# No markup and no emoji codes: what is shown is seldom ours alone, and a name is not to be read as a style.
console = Console(markup=False, emoji=False)
error_console = Console(stderr=True, soft_wrap=True, markup=False, emoji=False)


def fail(message: str, code: int = BAD_INPUT) -> NoReturn:
    """Say what is wrong on standard error, and exit. The message may quote others."""
    error_console.print("error:", end=" ", style="bold red", highlight=False)
    lines = (printable(line) for line in message.split("\n"))
    error_console.print("\n".join(lines), highlight=False)
    raise typer.Exit(code)


def check_destination(flag: str, path: Path | None) -> None:
    """Exit unless a file could be put there, before any work is done for it."""
    if path is not None and not path.parent.is_dir():
        fail(f"{flag}: expected a path in an existing folder, found {path}")
    if path is not None and path.is_dir():
        fail(f"{flag}: expected a path for a file, found the folder {path}")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then put it in place at once: never half a file under that name.

    Raises:
        OSError: the file can't be written.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    draft = Path(name)
    try:
        write(draft)
        draft.chmod(0o644)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
