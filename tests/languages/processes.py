"""A real coordinator, and clients in other languages, as processes."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from perseus.demo.processes import Coordinator, Process, end
from perseus.demo.security import Security
from perseus.tls.channels import Channels
from perseus.v1 import event_pb2, job_pb2, job_service_pb2
from perseus.v1.job_service_pb2_grpc import JobServiceStub
from tests.ports import free_port

# Clients in other languages present certificates, and no tokens.
_CLIENT_IS_OPERATOR = {"PERSEUS_COORDINATOR_CERTIFICATE_SCOPES": '{"client": "operator"}'}


class CoordinatorProcess(Coordinator):
    """A coordinator on its own port, started on entering the context.

    It requires mutual TLS, unless its client doesn't support it: then it uses plaintext. By default it has a
    database of its own.
    """

    def __init__(
        self, folder: Path, *, has_tls: bool = True, database: str | None = None, slot_count: int = 1
    ) -> None:
        self.security = Security(folder / "security") if has_tls else None
        super().__init__(
            folder,
            database or folder / "perseus.db",
            f"--slots={slot_count}",
            environment={**self.security.of_coordinator(), **_CLIENT_IS_OPERATOR} if self.security else None,
            address=f"127.0.0.1:{free_port()}",
        )

    def __enter__(self) -> "CoordinatorProcess":
        self.start()
        return self

    def start(self) -> str:
        """Start it, and wait until it listens."""
        self.address = super().start().replace("127.0.0.1", "localhost")  # Node.js warns of TLS to an address
        return self.address

    def command(self) -> list[str]:
        """Return the command."""
        return [each.replace("localhost", "127.0.0.1") for each in super().command()]

    @property
    def channels(self) -> Channels:
        """The way to the coordinator."""
        return self.security.channels(self.address) if self.security else Channels(self.address)

    @property
    def of_client(self) -> Mapping[str, str]:
        """A client's environment variables for certificates."""
        return self.security.of_operator() if self.security else {}

    @contextmanager
    def jobs(self) -> Iterator[JobServiceStub]:
        """Connect to its job service."""
        with self.channels.open_blocking() as channel:
            yield JobServiceStub(channel)


class ClientProcess:
    """A client whose output can be read while it runs."""

    def __init__(self, command: Sequence[str], folder: Path, log: Path, **environment: str) -> None:
        self._process = Process(log, environment=environment, program=command, folder=folder)
        self._process.launch()

    def __enter__(self) -> "ClientProcess":
        return self

    def __exit__(self, *_: object) -> None:
        end(self._process)

    @property
    def text(self) -> str:
        """The output so far."""
        return self._process.log.read_text()

    def wait_for(self, text: str) -> None:
        """Wait until it has printed a text; ClusterError if it ends before."""
        self._process.until(lambda: text in self.text, f"{text!r} in\n{self.text}")

    def wait(self) -> str:
        """Wait until it ends successfully, and return its output."""
        assert self._process.wait() == 0, self.text
        return self.text

    async def wait_async(self) -> str:
        """Do the same without blocking the event loop."""
        return await asyncio.to_thread(self.wait)


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
