"""Control of a load's processes: a coordinator (or the echo), the agents, and the lag probe."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

_START_LIMIT_S = 300.0
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


class CoordinatorProcess:
    """A coordinator that can be killed and restarted with the same database and port.

    Args:
        database: a path, or a URL.
        is_pinned: whether it is limited to one core, for measurements.
        environment: more variables, with its credentials; without them it authenticates nobody.
        module: has the command.

    Attributes:
        address: the address that it listens on, once it does; or is to listen on.
        start_count: how often it was started.
    """

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
        self._environment = environment
        self.address = "127.0.0.1:0"
        self._folder = folder
        self._command = [
            *(on_core(0) if is_pinned else ()),
            sys.executable,
            "-m",
            module,
            "coordinator",
        ]
        self._command += ["--database", database, "--log-format", "json", *flags]
        self._command += ["--insecure"] if environment is None else []
        self._process: subprocess.Popen[bytes] | None = None
        self.start_count = 0

    def __enter__(self) -> "CoordinatorProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """Process ID of the running process, or of the last one."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> Path:
        """Its log since the last start."""
        return self._folder / f"coordinator-{self.start_count}.log"

    def start(self) -> float:
        """Start it, and wait until it listens; return the time, seconds."""
        begun_s = time.monotonic()
        self.launch()
        while not self.is_listening():
            status, waited_s = self.poll(), time.monotonic() - begun_s
            if status is not None or waited_s > _START_LIMIT_S:
                raise RuntimeError(
                    f"the coordinator does not listen after {waited_s:.0f} s, exit status {status}: "
                    f"{self.log.read_text()[-2000:]}"
                )
            time.sleep(0.005)
        return time.monotonic() - begun_s

    def launch(self) -> None:
        """Start it without waiting."""
        self.start_count += 1
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [*self._command, "--listen", self.address],
                stdin=subprocess.DEVNULL,
                stdout=output,
                env={**os.environ, **(self._environment or {})},
                stderr=subprocess.STDOUT,
            )

    def is_listening(self) -> bool:
        """Whether it has logged that it listens."""
        for line in self.log.read_text().splitlines():
            with suppress(ValueError):
                if line.startswith("{") and (entry := json.loads(line)).get("event") == "listening":
                    self.address = str(entry["address"])
                    return True
        return False

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def standing(self) -> str:
        """Its state, for people: whether it works, waits or has ended, and its last log lines."""
        status = Path(f"/proc/{self.pid}/stat")
        ticks = []
        for _ in range(2):
            fields = (
                status.read_text().rpartition(")")[2].split() if status.exists() else ["ended", *12 * "0"]
            )
            ticks.append(int(fields[11]) + int(fields[12]))
            time.sleep(1.0)
        words = self.log.read_text()[-1000:]
        return f"state {fields[0]}, {ticks[1] - ticks[0]} ticks in a second, load {os.getloadavg()}, {words}"

    def wait(self, limit_s: float = _END_LIMIT_S) -> int:
        """Wait for its end; return the exit status."""
        assert self._process is not None
        return self._process.wait(limit_s)

    def kill(self) -> float:
        """Send SIGKILL; return the time of the monotonic clock."""
        assert self._process is not None
        self._process.kill()
        killed_s = time.monotonic()
        self._process.wait()
        return killed_s

    def terminate(self) -> int:
        """Send SIGTERM, and wait for its end; return the exit status."""
        assert self._process is not None
        self._process.terminate()
        return self.wait()


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
