"""Calls of the command as by a user: in its own process, with its streams."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

COMMAND = [sys.executable, "-m", "perseus.cli"]


class Ended(NamedTuple):
    """A process's exit status and output."""

    exit_code: int
    stdout: bytes
    stderr: str

    @property
    def error(self) -> str:
        """The one line on standard error."""
        lines = self.stderr.splitlines()
        assert len(lines) == 1, self.stderr
        return lines[0]


def call(
    *arguments: object,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    stdout: Any = subprocess.PIPE,
    before: Sequence[str] = (),
) -> Ended:
    """Run the command to its end; `before` is what starts it, if not this process."""
    done = subprocess.run(
        [*before, *COMMAND, *(os.fsencode(str(each)) for each in arguments)],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdout=stdout,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return Ended(done.returncode, done.stdout or b"", done.stderr.decode("utf-8", "replace"))
