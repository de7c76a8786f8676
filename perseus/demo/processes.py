"""Processes of the demo, of tests and of benchmarks: started with a log, awaited by what they log, and ended.

They see none of this machine's settings of Perseus, only those that they are given.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

TIMEOUT_S = 240.0
"""Long enough for a machine that starts dozens of processes at once."""
_END_TIMEOUT_S = 15.0
_POLL_S = 0.02

_OF_THE_MACHINE = ("PERSEUS_", "CUDA_VISIBLE_DEVICES", "NOTIFY_SOCKET")
"""Beginnings of variables that are about this machine's own Perseus, GPUs and service."""

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""For numerical libraries: a dozen processes share this machine."""

ENVIRONMENT: dict[str, str] = {}
"""More variables of every process that starts here. Tests set coordinators' measurements to be short."""

_NOTHING: Mapping[str, str] = MappingProxyType({})


class ClusterError(Exception):
    """A process did not start, or ended unexpectedly, or something did not happen in time."""


class Process:
    """A process whose output goes to a log. It can be ended, and started again.

    `arguments` are Python's, or those of another `program`, which runs in a `folder`. Leaving the context
    ends it.

    Attributes:
        log: since the last start; logs of earlier starts have a number in their names.
    """

    start_timeout_s = TIMEOUT_S

    def __init__(
        self,
        log: Path,
        *arguments: str,
        environment: Mapping[str, str] = _NOTHING,
        program: Sequence[str] = (sys.executable,),
        folder: Path | None = None,
    ) -> None:
        self.log = log
        self.arguments = [*program, *arguments]
        self.environment = dict(environment)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._start_count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end(self)

    def launch(self, output: int | None = None) -> None:
        """Start it without waiting; its output goes to the log, or to a file descriptor."""
        if self._start_count:
            self.log.rename(self.log.with_suffix(f".{self._start_count}.log"))
        self._start_count += 1
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_MACHINE)
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command(),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log if output is None else output,
                stderr=subprocess.STDOUT,
                env={**inherited, **_ONE_THREAD, **ENVIRONMENT, **self.environment},
            )

    def command(self) -> list[str]:
        """Return the command of the next start."""
        return self.arguments

    @property
    def pid(self) -> int:
        """Process ID of the running process, or of the last one."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started, and has not ended."""
        return self._process is not None and self._process.poll() is None

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for its end; return the exit status."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it as a crash would."""
        self.signal(signal.SIGKILL)
        self.wait()

    def terminate(self, timeout_s: float = TIMEOUT_S) -> int:
        """End it as an operator would, with SIGTERM; return the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def until(self, is_so: Callable[[], bool], what: str, timeout_s: float | None = None) -> None:
        """Wait until something is so while it runs; by default for as long as it may take to start.

        Raises:
            ClusterError: it ended, or took too long.
        """
        limit_s = timeout_s or self.start_timeout_s
        begun_s = time.monotonic()
        while not is_so():
            if not self.is_running or time.monotonic() > begun_s + limit_s:
                raise ClusterError(
                    f"expected {what} within {limit_s:g} s, found exit status {self.poll()}; "
                    f"its log is {self.log}"
                )
            time.sleep(_POLL_S)

    def logged(self, event: str) -> dict[str, Any]:
        """Wait until it has logged an event since its start; return the first entry.

        Raises:
            ClusterError: it ended, or took too long.
        """
        return logged(self.log, event, self.until)

    def count(self, event: str) -> int:
        """Return how often it has logged an event since its start."""
        return sum(entry["event"] == event for entry in entries(self.log))


class Coordinator(Process):
    """`perseus coordinator`, which keeps its address when it is started again.

    Args:
        folder: of its log.
        database: a path, or a URL.
        environment: more variables, with its credentials; without any it authenticates nobody.
        module: has the command.
    """

    def __init__(
        self,
        folder: Path,
        database: Path | str,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        address: str = "127.0.0.1:0",
        module: str = "perseus.cli",
        program: Sequence[str] = (sys.executable,),
    ) -> None:
        command = ["-m", module, "coordinator", f"--database={database}", "--log-format=json", *flags]
        if environment is None:
            command.append("--insecure")
        super().__init__(folder / "coordinator.log", *command, environment=environment or {}, program=program)
        self.address = address

    def command(self) -> list[str]:
        """Return the command, with the latest address."""
        return [*self.arguments, f"--listen={self.address}"]

    def start(self) -> str:
        """Start it, and wait until it listens; return its address."""
        self.launch()
        self.address = str(self.logged("listening")["address"])
        return self.address


class Agent(Process):
    """`perseus agent` under its supervisor, with a socket for trainers."""

    def __init__(
        self,
        log: Path,
        socket: Path,
        coordinator: str,
        *flags: str,
        environment: Mapping[str, str] = _NOTHING,
    ) -> None:
        command = ["-m", "perseus.cli", "agent", f"--coordinator={coordinator}", f"--socket={socket}"]
        super().__init__(log, *command, "--log-format=json", *flags, environment=environment)
        self.socket = socket

    def launch(self, output: int | None = None) -> None:
        """Start it without waiting."""
        self.socket.unlink(missing_ok=True)  # of one that was killed
        super().launch(output)

    def await_socket(self) -> None:
        """Wait until trainers can connect."""
        self.until(self.socket.exists, f"the socket of {self.log.stem}")


def until(
    is_so: Callable[[], bool],
    what: str,
    timeout_s: float = TIMEOUT_S,
    *,
    state: Callable[[], str] = str,
) -> float:
    """Wait until something is so; return the time that it took, seconds.

    Raises:
        ClusterError: it took too long; the message has the state.
    """
    begun_s = time.monotonic()
    while not is_so():
        if time.monotonic() > begun_s + timeout_s:
            raise ClusterError(f"expected {what} within {timeout_s:g} s\n{state()}".rstrip())
        time.sleep(_POLL_S)
    return time.monotonic() - begun_s


def entries(log: Path) -> list[dict[str, Any]]:
    """Return the entries of a log of JSON lines so far; the last line may be incomplete."""
    lines = log.read_text(errors="replace").splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]


def logged(
    log: Path, event: str, wait: Callable[[Callable[[], bool], str], object] = until
) -> dict[str, Any]:
    """Wait until a log has an entry of an event; return the first one. ClusterError if it does not come."""

    def found() -> Iterator[dict[str, Any]]:
        return (entry for entry in entries(log) if entry["event"] == event)

    wait(lambda: any(found()), f"{event!r} in {log.name}")
    return next(found())


def end(*processes: Process) -> None:
    """End the processes that still run, with SIGTERM; with SIGKILL if they take too long."""
    running = [process for process in processes if process.is_running]
    for process in running:
        process.signal(signal.SIGTERM)
        process.signal(signal.SIGCONT)  # one that is stopped would not end
    for process in running:
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
