"""The processes of the demo on loopback: one coordinator, an agent per pipeline, a trainer per rank.

Coordinator and agents authenticate each other by certificates and tokens made for the run
(`perseus.demo.security`).

The agents use the emulated GPUs directly, or through a stand-in for NVML (`perseus.demo.nvml_stub`).
"""

import json
import subprocess
from pathlib import Path
from typing import Self

from perseus.agent.link.address import SOCKET_VARIABLE
from perseus.demo import nvml_stub
from perseus.demo.processes import Agent, ClusterError, Coordinator, Process, end
from perseus.demo.security import Security
from perseus.demo.tasks import rank_tasks
from perseus.demo.trainer import STOP_FILE, evaluations_file
from perseus.demo.workload import Workload
from perseus.emulation.gpu import EmulatedGpu

_END_TIMEOUT_S = 15.0


class Cluster:
    """All processes of one demo. Leaving the context ends those still running.

    `run_dir` holds sockets, GPU files and the database: a short path, since a socket's may have 107 bytes.
    `log_dir` receives each process's output. With `nvml_library`, the agents use that stand-in for NVML.
    `guard_tolerance_percent`: None for the coordinator's own default. `serves_page`: the coordinator serves
    the live page, and asks no client for a certificate.

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
    ) -> None:
        self._workload = workload
        self._run_dir = run_dir
        self._log_dir = log_dir
        self._nvml_library = nvml_library
        self._serves_page = serves_page
        self._flags = ["--http=127.0.0.1:0"] if serves_page else []
        if guard_tolerance_percent is not None:
            self._flags.append(f"--guard-tolerance-percent={guard_tolerance_percent}")
        self.page_url = ""
        self.security = Security(run_dir / "security", has_browsers=serves_page)
        self.coordinator: Coordinator | None = None
        self.agents: list[Agent] = []
        self.trainers: list[Process] = []

    def __enter__(self) -> Self:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        for pipeline, stage in self._workload.ranks:
            path = self.gpu_file(pipeline, stage)
            path.parent.mkdir(parents=True, exist_ok=True)
            gpu_uuid = f"GPU-{self._workload.job_id}-{pipeline}-{stage}"
            EmulatedGpu.create(path, self._workload.gpu, gpu_uuid).close()
        return self

    def __exit__(self, *_: object) -> None:
        end(*self.trainers, *self._services)

    def start_coordinator(self) -> str:
        """Start the coordinator, again at its address; return the address as host:port.

        Raises:
            ClusterError: the coordinator ended, or did not listen in time.
        """
        if self.coordinator is None:
            self.coordinator = Coordinator(
                self._log_dir,
                self._run_dir / "perseus.db",
                *self._flags,
                environment=self.security.of_coordinator(),
            )
        address = self.coordinator.start()
        self.security.admit_agents(address)
        if self._serves_page:
            self.page_url = str(self.coordinator.logged("listening for HTTP")["url"])
        return address

    def page_lines(self, address: str) -> list[str]:
        """Return lines on where the page is, and how to log in; the coordinator at `address` serves it."""
        return [
            f"Live page while it runs: {self.page_url} (the demo's own certificate)",
            f"Log in there with {self.security.reader_token(address)}",
        ]

    def start_agents(self, coordinator: str) -> None:
        """Start one agent for each pipeline's GPUs, and wait until they serve their sockets.

        Raises:
            ClusterError: one ended, or took too long.
        """
        self.agents = [
            self._agent(pipeline, coordinator) for pipeline in range(self._workload.pipeline_count)
        ]
        for agent in self.agents:
            agent.launch()
        for agent in self.agents:
            agent.await_socket()

    def _agent(self, pipeline: int, coordinator: str) -> Agent:
        gpu_folder = self.gpu_file(pipeline, 0).parent
        flags = [f"--restore-folder={self._run_dir / 'restore'}", f"--grants={self._run_dir / 'grants'}"]
        environment = dict(self.security.of_agent())
        if self._nvml_library is None:
            flags += ["--gpu-backend=emulated", f"--emulated-gpus={gpu_folder}"]
        else:
            flags += ["--gpu-backend=nvml"]
            environment |= nvml_stub.environment(self._nvml_library, gpu_folder)
        log = self._log_dir / f"agent-{pipeline}.log"
        return Agent(log, self.socket(pipeline), coordinator, *flags, environment=environment)

    def start_trainers(self) -> None:
        """Start all ranks of the training job."""
        for task in rank_tasks(self._workload, self._run_dir, self.socket, self.gpu_file):
            name = f"trainer-{task.pipeline}-{task.stage}"
            self.start_trainer(name, "-m", "perseus.demo.trainer", task.to_json())

    def start_trainer(self, name: str, *arguments: str) -> None:
        """Start a Python process of the training job, the demo's own or another."""
        # For a script with more hooks than the demo replaces.
        environment = {SOCKET_VARIABLE: str(self.socket(0))}
        self.trainers.append(Process(self._log_dir / f"{name}.log", *arguments, environment=environment))
        self.trainers[-1].launch()

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
        for trainer in self.trainers:
            try:
                trainer.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise ClusterError(f"expected the trainers to end within {_END_TIMEOUT_S} s") from None
        self.check()

    def end_training(self) -> None:
        """End the trainers at once, with SIGTERM."""
        end(*self.trainers)

    def stop_services(self) -> None:
        """End agents and coordinator as an operator would, with SIGTERM.

        Raises:
            ClusterError: one of them did not end cleanly.
        """
        for process in self._services:
            if (status := process.terminate()) != 0:
                raise ClusterError(f"expected a clean end, found exit status {status}; {self._logs}")

    def check(self) -> None:
        """Check that all processes are alive.

        Raises:
            ClusterError: a process has ended with an error.
        """
        if not all(process.is_running for process in self._services) or any(
            trainer.poll() for trainer in self.trainers
        ):
            raise ClusterError(f"a process of the demo has ended; {self._logs}")

    def socket(self, pipeline: int) -> Path:
        """Return the socket of a pipeline's agent."""
        return self._run_dir / f"agent-{pipeline}.sock"

    def gpu_file(self, pipeline: int, stage: int) -> Path:
        """Return the file of a rank's emulated GPU."""
        return self._run_dir / f"gpus-{pipeline}" / f"gpu-{stage}.bin"

    @property
    def _services(self) -> list[Process]:
        return [*self.agents, *([self.coordinator] if self.coordinator else [])]

    @property
    def _logs(self) -> str:
        return f"its log is in {self._log_dir}"
