"""The processes of the demo on loopback: one coordinator, an agent per pipeline, a trainer per rank.

Coordinator and agents authenticate each other by certificates and tokens made for the run
(`perseus.demo.security`).

The agents use the emulated GPUs directly, or through a stand-in for NVML (`perseus.demo.nvml_stub`).
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from perseus.agent.link.address import SOCKET_VARIABLE
from perseus.demo import nvml_stub
from perseus.demo.security import Security
from perseus.demo.tasks import rank_tasks
from perseus.demo.trainer import STOP_FILE, evaluations_file
from perseus.demo.workload import Workload
from perseus.emulation.gpu import EmulatedGpu

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 15.0
_POLL_S = 0.05

_OF_THE_MACHINE = ("PERSEUS_", "CUDA_VISIBLE_DEVICES", "NOTIFY_SOCKET")
"""Beginnings of variables that are about this machine's own Perseus, GPUs and service."""

ENVIRONMENT: dict[str, str] = {}
"""More variables of every process that starts here. Tests set coordinators' measurements to be short."""


class ClusterError(Exception):
    """A process of the demo did not start, or ended unexpectedly."""


class Cluster:
    """All processes of one demo. Leaving the context ends those still running.

    `run_dir` holds sockets, GPU files and the database: a short path, since a socket's may have 107 bytes.
    `log_dir` receives each process's output. With `nvml_library`, the agents use that stand-in for NVML.
    `guard_tolerance_percent`: None for the coordinator's own default. `serves_page`: the coordinator serves
    the live page, and asks no client for a certificate. `observing`: pipelines whose agents never set clocks.

    Attributes:
        page_url: where the started coordinator serves the page; empty without it.
    """

    def __init__(
        self,
        workload: Workload,
        run_dir: Path,
        log_dir: Path,
        *,
        nvml_library: Path | None = None,
        guard_tolerance_percent: float | None = None,
        serves_page: bool = False,
        observing: Collection[int] = (),
    ) -> None:
        self._workload = workload
        self._run_dir = run_dir
        self._log_dir = log_dir
        self._nvml_library = nvml_library
        self._guard = (
            []
            if guard_tolerance_percent is None
            else [f"--guard-tolerance-percent={guard_tolerance_percent}"]
        )
        self._serves_page = serves_page
        self._observing = observing
        self.page_url = ""
        self.security = Security(run_dir / "security", has_browsers=serves_page)
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._agents: list[subprocess.Popen[bytes]] = []
        self._trainers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Cluster":
        self._log_dir.mkdir(parents=True, exist_ok=True)
        for pipeline, stage in self._workload.ranks:
            path = self.gpu_file(pipeline, stage)
            path.parent.mkdir(parents=True, exist_ok=True)
            gpu_uuid = f"GPU-{self._workload.job_id}-{pipeline}-{stage}"
            EmulatedGpu.create(path, self._workload.gpu, gpu_uuid).close()
        return self

    def __exit__(self, *_: object) -> None:
        end_processes([*self._trainers, *self._agents, *([self._coordinator] if self._coordinator else [])])

    def start_coordinator(self, port: int = 0) -> str:
        """Start the coordinator, by default on any free port; return its address as host:port.

        Raises:
            ClusterError: the coordinator ended, or did not listen in time.
        """
        log = self._log_dir / "coordinator.log"
        self._coordinator = start_process(
            log,
            "-m",
            "perseus.cli",
            "coordinator",
            f"--listen=127.0.0.1:{port}",
            f"--database={self._run_dir / 'perseus.db'}",
            "--log-format=json",
            *self._guard,
            *(["--http=127.0.0.1:0"] if self._serves_page else []),
            environment=self.security.of_coordinator(),
        )
        address = await_log(self._coordinator, "coordinator", log, "listening", "address")
        self.security.admit_agents(address)
        if self._serves_page:
            self.page_url = await_log(self._coordinator, "coordinator", log, "listening for HTTP", "url")
        return address

    def page_lines(self, address: str) -> list[str]:
        """Return lines on where the page is, and how to log in; the coordinator at `address` serves it."""
        return [
            f"Live page while it runs: {self.page_url} (the demo's own certificate)",
            f"Log in there with {self.security.reader_token(address)}",
        ]

    def kill_coordinator(self) -> None:
        """Kill the coordinator as a crash would; `start_coordinator` restarts it on the same database."""
        assert self._coordinator is not None
        self._coordinator.kill()
        self._coordinator.wait()
        self._coordinator = None

    def start_agents(self, coordinator: str) -> None:
        """Start one agent for each pipeline's GPUs, and wait until they serve their sockets."""
        for pipeline in range(self._workload.pipeline_count):
            log = self._log_dir / f"agent-{pipeline}.log"
            gpu_folder = self.gpu_file(pipeline, 0).parent
            backend = ["--gpu-backend=emulated", f"--emulated-gpus={gpu_folder}"]
            environment = dict(self.security.of_agent())
            if self._nvml_library is not None:
                backend = ["--gpu-backend=nvml"]
                environment |= nvml_stub.environment(self._nvml_library, gpu_folder)
            agent = start_process(
                log,
                "-m",
                "perseus.cli",
                "agent",
                f"--coordinator={coordinator}",
                f"--socket={self.socket(pipeline)}",
                f"--restore-folder={self._run_dir / 'restore'}",
                f"--grants={self._run_dir / 'grants'}",
                *backend,
                *(["--observe"] if pipeline in self._observing else []),
                "--log-format=json",
                environment=environment,
            )
            self._agents.append(agent)
        for pipeline, agent in enumerate(self._agents):
            log = self._log_dir / f"agent-{pipeline}.log"
            await_start(agent, f"agent {pipeline}", log, self.socket(pipeline).exists)

    def start_trainers(self) -> None:
        """Start all ranks of the training job."""
        for task in rank_tasks(self._workload, self._run_dir, self.socket, self.gpu_file):
            name = f"trainer-{task.pipeline}-{task.stage}"
            self.start_trainer(name, "-m", "perseus.demo.trainer", task.to_json())

    def start_trainer(self, name: str, *arguments: str) -> None:
        """Start a Python process of the training job, the demo's own or another."""
        environment = {
            SOCKET_VARIABLE: str(self.socket(0))
        }  # for a script with more hooks than the demo replaces
        self._trainers.append(
            start_process(self._log_dir / f"{name}.log", *arguments, environment=environment)
        )

    def evaluations(self, *, but: int) -> list[tuple[int, float]]:
        """Return (iteration before it, duration in seconds) of each evaluation of all pipelines but one."""
        ranks = [rank for rank in self._workload.ranks if rank[0] != but]
        files = [evaluations_file(self._run_dir, *rank) for rank in ranks]
        return [
            (iteration, time_s)
            for file in files
            if file.exists()
            for iteration, time_s in json.loads(file.read_text())
        ]

    def degrade(self, pipeline: int, slowdown: float) -> None:
        """Slow down every GPU of a pipeline by a factor, as a hot node does; 1 restores full speed."""
        for stage in range(self._workload.stage_count):
            gpu = EmulatedGpu(self.gpu_file(pipeline, stage))
            gpu.degrade(slowdown)
            gpu.close()

    def stop_training(self) -> None:
        """Let the trainers finish their iteration and exit.

        Raises:
            ClusterError: one of them failed or did not end in time.
        """
        (self._run_dir / STOP_FILE).touch()
        for trainer in self._trainers:
            try:
                trainer.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise ClusterError(f"expected the trainers to end within {_END_TIMEOUT_S} s") from None
        self.check()

    def end_training(self) -> None:
        """End the trainers at once, with SIGTERM."""
        end_processes(self._trainers)

    def stop_services(self) -> None:
        """End agents and coordinator as an operator would, with SIGTERM.

        Raises:
            ClusterError: one of them did not end cleanly.
        """
        services = [*self._agents, *([self._coordinator] if self._coordinator else [])]
        for process in services:
            process.send_signal(signal.SIGTERM)
            if process.wait(_END_TIMEOUT_S) != 0:
                raise ClusterError(
                    f"expected a clean end, found exit status {process.returncode}; {self._logs}"
                )

    def check(self) -> None:
        """Check that all processes are alive.

        Raises:
            ClusterError: a process has ended with an error.
        """
        services = [*self._agents, *([self._coordinator] if self._coordinator else [])]
        if any(process.poll() is not None for process in services) or any(t.poll() for t in self._trainers):
            raise ClusterError(f"a process of the demo has ended; {self._logs}")

    def socket(self, pipeline: int) -> Path:
        """Return the socket of a pipeline's agent."""
        return self._run_dir / f"agent-{pipeline}.sock"

    def gpu_file(self, pipeline: int, stage: int) -> Path:
        """Return the file of a rank's emulated GPU."""
        return self._run_dir / f"gpus-{pipeline}" / f"gpu-{stage}.bin"

    @property
    def _logs(self) -> str:
        return f"its log is in {self._log_dir}"


def start_process(
    log: Path, *arguments: str, environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[bytes]:
    """Start a Python process of the demo, whose output goes to a file.

    It sees none of this machine's settings of Perseus, only those in `environment`.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_MACHINE)}
    # One thread per process in numerical libraries: a dozen processes share this machine.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**inherited, **threads, **ENVIRONMENT, **environment},
        )


def await_start(process: subprocess.Popen[bytes], name: str, log: Path, is_ready: Callable[[], bool]) -> None:
    """Wait until a process is ready.

    Raises:
        ClusterError: it ended, or took too long.
    """
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while not is_ready():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise ClusterError(
                f"expected the {name} to start within {_START_TIMEOUT_S} s; its log is in {log.parent}"
            )
        time.sleep(_POLL_S)


def await_log(process: subprocess.Popen[bytes], name: str, log: Path, event: str, key: str) -> str:
    """Wait until a process has logged an event, and return one of the entry's values.

    Raises:
        ClusterError: as `await_start`.
    """
    found: list[str] = []

    def seen() -> bool:
        for line in log.read_text().splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line may be half-written
            if entry.get("event") == event:
                found.append(entry[key])
        return bool(found)

    await_start(process, name, log, seen)
    return found[0]


def end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes that still run, with SIGTERM; with SIGKILL if they take too long."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
