"""Real-time priority for ranks on emulated GPUs.

An emulated GPU is as punctual as its process, so it must not wait for other work on this machine's cores.
Such ranks sleep nearly all the time, so they hardly disturb other processes.
"""

import os
from contextlib import suppress
from pathlib import Path


def make_punctual(process: int) -> None:
    """Give a process and its future children priority over all others, if permitted."""
    for thread in os.listdir(f"/proc/{process}/task"):
        with suppress(PermissionError, ProcessLookupError):
            os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(1))


def descendants(command: str) -> list[int]:
    """Return the descendants of this process whose command line contains a text."""
    parents: dict[int, int] = {}
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if command in (folder / "cmdline").read_text():
                found.append(int(folder.name))
    return [process for process in found if _is_below(process, parents)]


def _is_below(process: int, parents: dict[int, int]) -> bool:
    while process := parents.get(process, 0):
        if process == os.getpid():
            return True
    return False
