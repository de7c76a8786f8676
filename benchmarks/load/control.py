"""Control of a load's processes: a coordinator (or the echo), the agents, and the lag probe."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from perseus.demo.processes import Coordinator

_END_LIMIT_S = 60.0

LOAD_FLAGS = ("--lease-s", "60", "--profile-clocks", "2", "--guard-tolerance-percent", "1000")
"""Settings for jobs that are planned soon and stay so, even on a busy machine."""


class GeneratorError(Exception):
    """The generator failed at a command."""


def on_core(number: int) -> list[str]:
    """Return a prefix that pins a command to a core, if there is another core for the rest."""
    return ["taskset", "-c", str(number)] if (os.cpu_count() or 1) > 1 else []


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile; nan without values."""
    return float(np.quantile(values, share)) if len(values) else float("nan")


def raise_file_limit() -> None:
    """Raise this process's file limit to the machine's."""
    maximum = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))


class CoordinatorProcess(Coordinator):
    """A coordinator for a load, with its database in a path or at a URL; `is_pinned`: limited to one core."""

    start_timeout_s = 300.0

    def __init__(
        self,
        folder: Path,
        database: str,
        flags: Sequence[str] = LOAD_FLAGS,
        *,
        is_pinned: bool = True,
        environment: Mapping[str, str] | None = None,
        module: str = "perseus.cli",
    ) -> None:
        program = [*(on_core(0) if is_pinned else ()), sys.executable]
        super().__init__(folder, database, *flags, environment=environment, module=module, program=program)


class _Child:
    """A process that answers lines with lines."""

    def __init__(self, module: str, target: str) -> None:
        command = [*on_core(1), sys.executable, "-m", module, target]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def exchange(self, line: Any) -> Any:
        """Send a line, and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise GeneratorError(f"{self._process.args!r} has ended")
        return json.loads(answer)

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Agents:
    """The generator's process, with the commands of `benchmarks.load.generator.Generator`."""

    def __init__(self, target: str) -> None:
        self._child = _Child("benchmarks.load.generator", target)

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, *_: object) -> None:
        self._child.end()

    def ask(self, command: str, **arguments: Any) -> Any:
        """Run a command. GeneratorError if it fails."""
        answer = self._child.exchange({"command": command, **arguments})
        if "error" in answer:
            raise GeneratorError(f"{command}: {answer['error']}")
        return answer["answer"]


class LagProbe:
    """The process that checks the coordinator's health all the time."""

    def __init__(self, target: str) -> None:
        self._child = _Child("benchmarks.load.lag", target)

    def __enter__(self) -> "LagProbe":
        return self

    def __exit__(self, *_: object) -> None:
        self._child.end()

    def between(self, since_s: float, until_s: float) -> list[tuple[float, float | None]]:
        """Return the begin and duration of each check; the duration is None if it failed."""
        return [(begun_s, took_s) for begun_s, took_s in self._child.exchange([since_s, until_s])]


@contextmanager
def echo() -> Iterator[tuple[str, int]]:
    """Run the echo server; yield its address and process."""
    command = [*on_core(0), sys.executable, "-m", "benchmarks.load.echo"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.terminate()
        process.wait(30)
