"""A real Dask cluster on this machine: a scheduler, and workers of one thread each, by their commands."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perseus.demo.processes import Process, end
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[3]


class DaskProcesses:
    """A scheduler and its workers; `address` is the scheduler's."""

    def __init__(self, folder: Path, environment: dict[str, str], scheme: str = "tcp") -> None:
        self._folder = folder
        self._environment = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "", **environment}
        port = free_port()
        self.address = f"{scheme}://127.0.0.1:{port}"
        arguments = ["--host", self.address.removesuffix(f":{port}"), "--port", str(port), "--no-dashboard"]
        self.workers: list[Process] = []
        self.scheduler = self._start("scheduler", "Scheduler at", *arguments)

    def add_worker(self, *options: str) -> None:
        """Start a worker, with a nanny unless the options say otherwise."""
        scratch = str(self._folder / "scratch")
        options = ("--nthreads", "1", "--no-dashboard", "--local-directory", scratch, *options)
        self.workers.append(self._start("worker", "Registered to", self.address, *options))

    def _start(self, kind: str, awaited: str, *arguments: str) -> Process:
        log = self._folder / f"{kind}-{len(self.workers)}.log"
        command = ("-m", f"distributed.cli.dask_{kind}", *arguments)
        process = Process(log, *command, environment=self._environment, folder=self._folder)
        process.launch()
        process.until(lambda: awaited in log.read_text(errors="replace"), f"{awaited!r} of the {kind}")
        return process


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
        end(*cluster.workers, cluster.scheduler)
