"""Where the command `perseus` begins, before anything heavy is imported: streams, signals, exit codes.

Standard library only, so that the first second, which goes into imports, already has them. `run` is what
happens around every command:

- Ctrl-C, SIGTERM and SIGHUP end it with 128 and the signal's number, without a word, at any time. While the
  imports go on there is nothing to tidy up; after them, what is open is closed and drafts are removed.
  The coordinator and the agent take these signals over once they serve.
- An output that nobody reads any more ends it as SIGPIPE would; one that can't be written (a full disk, a
  stream that is closed) ends it with one line.
- What an output's encoding lacks is shown as an escape.
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
"""Until a signal comes again; what it came in the midst of is over then."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class OutputError(OSError):
    """Standard output can't be written."""


class _Output(io.TextIOWrapper):
    """Standard output that tells its own errors from those of other files."""

    def write(self, text: str, /) -> int:
        """See `io.TextIOWrapper.write`."""
        try:
            return super().write(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from None

    def flush(self) -> None:
        """See `io.TextIOWrapper.flush`."""
        try:
            super().flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from None


def main() -> None:
    """The console script."""
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
        signal.signal(number, signal.SIG_DFL)  # nothing is left that they could spoil
    sys.exit(code)


def run(command: Callable[[], object]) -> int:
    """Run a command, and return the exit code to end with; what it has printed is out by then."""
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
    """Where a signal comes while an object is being deleted, Python drops what is raised: send it again."""
    match unraisable.exc_value:
        case SystemExit(code=int(code)) if code - 128 in _SIGNALS:
            main_thread = threading.main_thread().ident
            assert main_thread is not None
            threading.Timer(_AGAIN_S, signal.pthread_kill, (main_thread, code - 128)).start()
        case _:
            sys.__unraisablehook__(unraisable)


def _open_streams() -> None:
    """See to it that the three streams are there, and take every character.

    A file that is opened would otherwise get the number of one that is missing, and what is printed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDONLY)) <= 2:
        pass
    os.close(descriptor)
    # Written to, a missing one fails as it would for any other program.
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(plain := sys.stdout, io.TextIOWrapper):
        encoding, is_line_buffered = plain.encoding, plain.line_buffering
        sys.stdout = _Output(
            plain.detach(), encoding, errors="backslashreplace", line_buffering=is_line_buffered
        )


def _drop_output() -> None:
    """Let what is waiting go nowhere, so that the interpreter's end does not fail at it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
