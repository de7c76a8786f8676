"""A real Dask cluster on this machine: a scheduler, and workers of one thread each, by their commands."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
_START_S = 90.0


class DaskProcesses:
    """A scheduler and its workers; `address` is the scheduler's."""

    def __init__(self, folder: Path, environment: dict[str, str], scheme: str = "tcp") -> None:
        self._folder = folder
        self._environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": ""} | environment
        port = free_port()
        self.address = f"{scheme}://127.0.0.1:{port}"
        arguments = ["--host", self.address.removesuffix(f":{port}"), "--port", str(port), "--no-dashboard"]
        self.scheduler = self._start("scheduler", "Scheduler at", *arguments)
        self.workers: list[subprocess.Popen[bytes]] = []

    def add_worker(self, *options: str) -> None:
        """Start a worker, with a nanny unless the options say otherwise."""
        scratch = str(self._folder / "scratch")
        options = ("--nthreads", "1", "--no-dashboard", "--local-directory", scratch, *options)
        self.workers.append(self._start("worker", "Registered to", self.address, *options))

    def _start(self, kind: str, awaited: str, *arguments: str) -> "subprocess.Popen[bytes]":
        log = self._folder / f"{kind}-{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", "distributed.cli.dask_" + kind, *arguments]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, env=self._environment, stdout=stream, stderr=stream, cwd=self._folder
            )
        until_s = time.monotonic() + _START_S
        while awaited not in log.read_text(errors="replace"):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until_s, log.read_text()
            time.sleep(0.05)
        return process

    def close(self) -> None:
        for process in [*self.workers, self.scheduler]:
            process.terminate()
        for process in [*self.workers, self.scheduler]:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def dask_processes(
    folder: Path, worker_count: int = 2, environment: dict[str, str] | None = None, scheme: str = "tcp"
) -> Iterator[DaskProcesses]:
    """Run a cluster for the length of the block; its first worker has a nanny, as by default."""
    cluster = DaskProcesses(folder, environment or {}, scheme)
    try:
        for number in range(worker_count):
            cluster.add_worker(*(["--no-nanny"] if number else []))
        yield cluster
    finally:
        cluster.close()
