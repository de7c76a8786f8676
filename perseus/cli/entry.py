"""Entry point of the command `perseus`, before any heavy import: streams, signals, exit codes.

It uses the standard library only, so that these rules hold from the start, while the imports take their
first second. `run` wraps every command:

- Ctrl-C, SIGTERM and SIGHUP end it silently with 128 plus the signal's number, at any time. During the
  imports there is nothing to clean up; after them, open files are closed and drafts are removed.
  The coordinator and the agent handle these signals themselves once they serve.
- An output whose reader is gone ends it as SIGPIPE would; an output that can't be written (a full disk, a
  closed stream) ends it with one line.
- Characters that an output's encoding lacks are escaped.
"""

import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

OUTPUT_FAILED = 1
PIPE_CLOSED = 128 + signal.SIGPIPE

_AGAIN_S = 0.01
"""Delay before the signal is sent again; the deletion that swallowed the first one is over by then."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class OutputError(OSError):
    """Standard output can't be written."""


class _Output(io.TextIOWrapper):
    """Standard output that distinguishes its own errors from those of other files."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from None

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from None


def main() -> None:
    """Run the console script."""
    _open_streams()
    ours = [number for number in _SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    for number in ours:
        signal.signal(number, signal.SIG_DFL)
    from perseus.cli.main import main as command

    sys.unraisablehook = _end_all_the_same
    for number in ours:
        signal.signal(number, _end)
    code = run(command)
    for number in ours:
        signal.signal(number, signal.SIG_DFL)  # nothing is left to clean up
    sys.exit(code)


def run(command: Callable[[], object]) -> int:
    """Run a command, flush its output, and return the exit code to end with."""
    try:
        try:
            command()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return PIPE_CLOSED
    except OutputError as error:
        _drop_output()
        sys.stderr.write(f"error: standard output can't be written: {error.strerror}\n")
        return OUTPUT_FAILED
    return code


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _end_all_the_same(unraisable: "sys.UnraisableHookArgs") -> None:
    """Send a signal again that came while an object was being deleted: Python drops that exception."""
    match unraisable.exc_value:
        case SystemExit(code=int(code)) if code - 128 in _SIGNALS:
            main_thread = threading.main_thread().ident
            assert main_thread is not None
            threading.Timer(_AGAIN_S, signal.pthread_kill, (main_thread, code - 128)).start()
        case _:
            sys.__unraisablehook__(unraisable)


def _open_streams() -> None:
    """Make sure that the three streams exist and accept every character.

    Otherwise the next opened file would get a missing stream's number, and its output.
    """
    while (descriptor := os.open(os.devnull, os.O_RDONLY)) <= 2:
        pass
    os.close(descriptor)
    # Writing to a missing stream then fails as in any other program.
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(plain := sys.stdout, io.TextIOWrapper):
        encoding, is_line_buffered = plain.encoding, plain.line_buffering
        sys.stdout = _Output(
            plain.detach(), encoding, errors="backslashreplace", line_buffering=is_line_buffered
        )


def _drop_output() -> None:
    """Discard buffered output, so that the interpreter does not fail at it on exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
