"""Several training jobs under one coordinator, with the power of their GPUs: for power budgets.

Power comes from the emulated GPUs themselves, not from reports.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from perseus.demo.cluster import Cluster
from perseus.demo.security import Security
from perseus.demo.workload import Workload
from perseus.emulation.gpu import EmulatedGpu

_GUARD_PERCENT = 10.0
"""Dozens of processes share a machine: waiting for each other must not look like a violated prediction."""


class Site:
    """All processes of some jobs. Leaving the context ends those still running.

    `run_dir`, `log_dir` and `serves_page` are as for `Cluster`; each job has its own folder in them.
    """

    def __init__(
        self, workloads: Sequence[Workload], run_dir: Path, log_dir: Path, *, serves_page: bool = False
    ) -> None:
        self.workloads = {workload.job_id: workload for workload in workloads}
        self.address = ""
        self._run_dir = run_dir
        self._log_dir = log_dir
        self._serves_page = serves_page
        self._stack = ExitStack()
        self._clusters: list[Cluster] = []

    @property
    def security(self) -> Security:
        """Credentials of the site's processes."""
        return self._clusters[0].security

    def __enter__(self) -> "Site":
        for job_id, workload in self.workloads.items():
            (self._run_dir / job_id).mkdir()
            cluster = Cluster(
                workload,
                self._run_dir / job_id,
                self._log_dir / job_id,
                guard_tolerance_percent=_GUARD_PERCENT,
                serves_page=self._serves_page,
            )
            self._clusters.append(self._stack.enter_context(cluster))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.__exit__(*exception)  # type: ignore[arg-type]

    def start(self) -> None:
        """Start everything.

        Raises:
            ClusterError: a process did not start.
        """
        self.address = self._clusters[0].start_coordinator()
        for cluster in self._clusters:
            cluster.security = self.security
            cluster.start_agents(self.address)
        for cluster in self._clusters:
            cluster.start_trainers()

    def page_lines(self) -> list[str]:
        """Return lines on where the page is, and how to log in."""
        return self._clusters[0].page_lines(self.address)

    def kill_coordinator(self) -> None:
        """Kill the coordinator as a crash would."""
        assert self._clusters[0].coordinator is not None
        self._clusters[0].coordinator.kill()

    def restart_coordinator(self) -> None:
        """Start the coordinator again at its old address.

        Raises:
            ClusterError: the coordinator did not start.
        """
        self._clusters[0].start_coordinator()

    def stop(self) -> None:
        """Let all jobs finish, and end agents and coordinator.

        Raises:
            ClusterError: a process failed, or did not end in time.
        """
        for cluster in self._clusters:
            cluster.stop_training()
        for cluster in reversed(self._clusters):
            cluster.stop_services()

    def check(self) -> None:
        """Check that all processes are alive.

        Raises:
            ClusterError: a process has ended with an error.
        """
        for cluster in self._clusters:
            cluster.check()

    def power_meter(self) -> "PowerMeter":
        """Return a meter of the GPUs' power from now on; a context."""
        files = {
            cluster_id: [cluster.gpu_file(*rank) for rank in workload.ranks]
            for (cluster_id, workload), cluster in zip(self.workloads.items(), self._clusters, strict=True)
        }
        return PowerMeter(files)


class PowerMeter:
    """Mean power of jobs' GPUs between polls, from their energy counters."""

    def __init__(self, files: Mapping[str, Sequence[Path]]) -> None:
        self._gpus = {job_id: [EmulatedGpu(path) for path in paths] for job_id, paths in files.items()}
        self._before = self._read()

    def __enter__(self) -> "PowerMeter":
        return self

    def __exit__(self, *_: object) -> None:
        for gpus in self._gpus.values():
            for gpu in gpus:
                gpu.close()

    def poll(self) -> dict[str, float]:
        """Return each job's mean power since the last poll, watts."""
        before, self._before = self._before, self._read()
        (then_s, then_j), (now_s, now_j) = before, self._before
        return {job_id: (now_j[job_id] - then_j[job_id]) / (now_s - then_s) for job_id in now_j}

    def _read(self) -> tuple[float, dict[str, float]]:
        energy_j = {job_id: sum(gpu.total_energy_j() for gpu in gpus) for job_id, gpus in self._gpus.items()}
        return time.monotonic(), energy_j
