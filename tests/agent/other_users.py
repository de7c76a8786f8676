"""Run code as another user in tests: real user ids, which need no names on the node."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534
OWNER = 65533

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be other users")

# Import everything before switching: the user may have no access to the interpreter's folder.
_BECOME = """
import importlib, os, sys
uid, module, function = int(sys.argv[1]), sys.argv[2], sys.argv[3]
run = getattr(importlib.import_module(module), function)
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
run(*sys.argv[4:])
"""


def command_as(uid: int, module: str, function: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command that calls a function of a module as a user."""
    return [sys.executable, "-c", _BECOME, str(uid), module, function, *arguments]


def start_as(uid: int, module: str, function: str, arguments: Sequence[str] = ()) -> "subprocess.Popen[str]":
    """Call a function of a module as a user, in its own process with piped input and output."""
    return subprocess.Popen(
        command_as(uid, module, function, arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def passable_folder() -> Iterator[Path]:
    """A folder that other users can access; pytest's own folders are closed to them."""
    with tempfile.TemporaryDirectory(prefix="perseus-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        yield folder
