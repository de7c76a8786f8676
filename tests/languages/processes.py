"""A real coordinator, and clients in other languages, as processes."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from perseus.demo.security import Security
from perseus.tls.channels import Channels
from perseus.v1 import event_pb2, job_pb2, job_service_pb2
from perseus.v1.job_service_pb2_grpc import JobServiceStub
from tests.ports import free_port

TIMEOUT_S = 60.0

# Clients in other languages present certificates, and no tokens.
_CLIENT_IS_OPERATOR = {"PERSEUS_COORDINATOR_CERTIFICATE_SCOPES": '{"client": "operator"}'}


class CoordinatorProcess:
    """A coordinator on its own port, which it keeps across restarts.

    It requires mutual TLS, unless its client doesn't support it: then it uses plaintext. By default it has a
    database of its own.
    """

    def __init__(
        self, folder: Path, *, has_tls: bool = True, database: str | None = None, slot_count: int = 1
    ) -> None:
        port = free_port()
        # A name, like most certificates: Node.js warns of TLS to an address.
        self.address, self._listen = f"localhost:{port}", f"127.0.0.1:{port}"
        self._folder = folder
        self._database = [f"--database={database or folder / 'perseus.db'}", f"--slots={slot_count}"]
        self.security = Security(folder / "security") if has_tls else None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "CoordinatorProcess":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(TIMEOUT_S)

    def start(self) -> None:
        """Start it on its database, and wait until it listens."""
        with (self._folder / "coordinator.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *[sys.executable, "-m", "perseus.cli", "coordinator", "--log-format=json"],
                    *[f"--listen={self._listen}", *self._database],
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._settings()},
            )
        wait_until(lambda: "listening" in self._logged(), "a coordinator that listens")

    def _settings(self) -> Mapping[str, str]:
        if self.security is None:
            return {"PERSEUS_COORDINATOR_INSECURE": "true"}
        return {**self.security.of_coordinator(), **_CLIENT_IS_OPERATOR}

    def kill(self) -> None:
        """Kill it without warning."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(TIMEOUT_S)

    @property
    def channels(self) -> Channels:
        """The way to the coordinator."""
        if self.security is None:
            return Channels(self.address)
        return self.security.channels(self.address)

    @property
    def of_client(self) -> Mapping[str, str]:
        """A client's environment variables for certificates."""
        return self.security.of_operator() if self.security is not None else {}

    @contextmanager
    def jobs(self) -> Iterator[JobServiceStub]:
        """Connect to its job service."""
        with self.channels.open_blocking() as channel:
            yield JobServiceStub(channel)

    def _logged(self) -> set[str]:
        lines = (self._folder / "coordinator.log").read_text().splitlines()
        return {json.loads(line)["event"] for line in lines if line.startswith("{") and line.endswith("}")}


class ClientProcess:
    """A client whose output goes to a file, which can be read while it runs."""

    def __init__(self, command: Sequence[str], folder: Path, log: Path, **environment: str) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )

    def __enter__(self) -> "ClientProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(TIMEOUT_S)

    @property
    def text(self) -> str:
        """The output so far."""
        return self._log.read_text()

    def wait_for(self, text: str) -> None:
        """Wait until it has printed a text; raise an error if it ends before."""
        wait_until(
            lambda: text in self.text or self._process.poll() is not None,
            f"{text!r} in\n{self.text}",
        )
        assert text in self.text, self.text

    def wait(self) -> str:
        """Wait until it ends successfully, and return its output."""
        assert self._process.wait(TIMEOUT_S) == 0, self.text
        return self.text

    async def wait_async(self) -> str:
        """Do the same without blocking the event loop."""
        return await asyncio.to_thread(self.wait)


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for a condition in another process."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"expected {what}"
        time.sleep(0.02)


def check_story(coordinator: CoordinatorProcess, job_id: str) -> list[event_pb2.JobEvent]:
    """Check the coordinator's final state of a job after a client's whole scenario.

    Returns its events.
    """
    with coordinator.jobs() as jobs:
        job = jobs.GetJob(job_service_pb2.GetJobRequest(job_id=job_id)).job
        request = job_service_pb2.ListJobEventsRequest(job_id=job_id, page_size=1000)
        events = list(jobs.ListJobEvents(request).events)
    assert job.state == job_pb2.JOB_STATE_FINISHED
    assert job.run_number == 1
    assert job.rank_counts.finished_count == 4
    clocks = [event.pipeline_clocks for event in events if event.HasField("pipeline_clocks")]
    planned = {each.pipeline for each in clocks if each.HasField("plan")}
    assert planned == {0, 1}
    assert any(each.HasField("hold") for each in clocks)
    reported = [event.straggler_reported for event in events if event.HasField("straggler_reported")]
    assert [(each.pipeline, each.slowdown_factor) for each in reported] == [(1, 1.25)]
    assert sum(event.HasField("straggler_cleared") for event in events) == 1
    return events
