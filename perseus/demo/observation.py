"""What the demo sees of its job: the coordinator's WatchJob stream, and the calls of an operator."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import grpc.aio

from perseus.demo.summary import Iteration, Measurements
from perseus.v1 import job_pb2, job_service_pb2, job_service_pb2_grpc, rank_pb2

_POLL_S = 0.25
_RPC_TIMEOUT_S = 10.0


class ObservationError(Exception):
    """What the story waits for did not come in time."""


async def registered_job(channel: grpc.aio.Channel, timeout_s: float) -> str:
    """Wait for a coordinator's first job; its identifier.

    Raises:
        ObservationError: none was registered in time.
    """
    jobs = job_service_pb2_grpc.JobServiceStub(channel)
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while True:
                found = await jobs.ListJobs(job_service_pb2.ListJobsRequest(), timeout=_RPC_TIMEOUT_S)
                if found.jobs:
                    return found.jobs[0].job_id
                await asyncio.sleep(_POLL_S)
    raise ObservationError(f"expected a job to be registered within {timeout_s:.0f} s, found none")


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A job, and its ranks at the same moment."""

    job: job_pb2.Job
    ranks: list[rank_pb2.Rank]


class Observer:
    """Follows one job: its events and iterations, and the job as it was after them.

    Attributes:
        job: None until it is registered.
        ranks: in their order, as they were when the job was as it is here.
    """

    def __init__(
        self, channel: grpc.aio.Channel, job_id: str, measurements: Measurements, notify: Callable[[], None]
    ) -> None:
        self.job: job_pb2.Job | None = None
        self.ranks: list[rank_pb2.Rank] = []
        self.events: list[job_pb2.JobEvent] = []
        self.measurements = measurements
        self._jobs = job_service_pb2_grpc.JobServiceStub(channel)
        self.job_id = job_id
        self._notify = notify
        self._changed = asyncio.Event()
        # Seen already, but what led there has not all been told yet.
        self._ahead: _Snapshot | None = None

    @property
    def state(self) -> int:
        """The job's state; UNSPECIFIED before it is registered."""
        return self.job.state if self.job is not None else job_pb2.JOB_STATE_UNSPECIFIED

    @property
    def stragglers(self) -> set[int]:
        """The pipelines that the coordinator takes for stragglers now."""
        return {straggler.pipeline for straggler in self.job.stragglers} if self.job is not None else set()

    @property
    def next_whole_iteration(self) -> int:
        """The first iteration that surely begins from now on.

        An iteration is told of some 0.1 s after its end: the one after the newest known may have ended, and
        the one after that may be under way.
        """
        return self.measurements.latest + 3

    async def follow(self) -> None:
        """Wait for the job to be registered, then follow it until it has ended."""
        request = job_service_pb2.GetJobRequest(job_id=self.job_id)
        while self.job is None:
            try:
                self.job = (await self._jobs.GetJob(request, timeout=_RPC_TIMEOUT_S)).job
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                await asyncio.sleep(_POLL_S)
        async for update in self._jobs.WatchJob(job_service_pb2.WatchJobRequest(job_id=self.job_id)):
            if update.HasField("job"):
                self._ahead = await self._snapshot()
            self._take(update)

    async def until(self, what: str, is_true: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `is_true`, which is asked again after every update.

        Raises:
            ObservationError: it did not become true in time; the text says `what` was expected.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_true():
                    self._changed.clear()
                    await self._changed.wait()
                return
        state = job_pb2.JobState.Name(self.state)  # type: ignore[arg-type]
        last = f"; last event: {self.events[-1].message}" if self.events else ""
        raise ObservationError(f"expected {what} within {timeout_s:.0f} s, found {state}{last}")

    async def collect(
        self, name: str, count: int, timeout_s: float, compared_with: str | None = None
    ) -> None:
        """Make a phase of the next `count` iterations that begin from now on."""
        first = self.next_whole_iteration
        numbers = range(first, first + count)
        await self.until(
            f"{count} iterations of {name}", lambda: self.measurements.are_complete(numbers), timeout_s
        )
        self.measurements.close_phase(name, numbers, compared_with)
        self._notify()

    async def timeline(self, pipeline: int) -> job_service_pb2.GetTimelineResponse:
        """The latest whole iteration of a pipeline."""
        request = job_service_pb2.GetTimelineRequest(job_id=self.job_id, pipeline=pipeline)
        return await self._jobs.GetTimeline(request, timeout=_RPC_TIMEOUT_S)

    def is_in_force(self) -> bool:
        """Whether every rank runs under the plan that it was offered last."""
        return bool(self.ranks) and all(
            rank.in_force_version == rank.offered_version and rank.offered_version > 0 for rank in self.ranks
        )

    def in_force_since(self) -> int:
        """The first iteration under the plan that came into force last."""
        return max(
            int(event.attributes["start_iteration"])
            for event in self.events
            if event.type == job_pb2.JOB_EVENT_TYPE_PLAN_IN_FORCE
        )

    async def _snapshot(self) -> "_Snapshot":
        """Ask for the job and its ranks until nothing has happened between the two answers."""
        whole = job_service_pb2.GetJobRequest(job_id=self.job_id, view=job_pb2.JOB_VIEW_FULL)
        brief = job_service_pb2.GetJobRequest(job_id=self.job_id, view=job_pb2.JOB_VIEW_SUMMARY)
        while True:
            job = (await self._jobs.GetJob(whole, timeout=_RPC_TIMEOUT_S)).job
            ranks: list[rank_pb2.Rank] = []
            request = job_service_pb2.ListRanksRequest(job_id=self.job_id)
            while True:
                page = await self._jobs.ListRanks(request, timeout=_RPC_TIMEOUT_S)
                ranks += page.ranks
                request.page_token = page.next_page_token
                if not request.page_token:
                    break
            after = (await self._jobs.GetJob(brief, timeout=_RPC_TIMEOUT_S)).job
            if after.last_event_sequence == job.last_event_sequence:
                return _Snapshot(job, ranks)

    def _take(self, update: job_service_pb2.WatchJobResponse) -> None:
        match update.WhichOneof("update"):
            case "event":
                self.events.append(update.event)
            case "iteration":
                found = update.iteration
                self.measurements.add(
                    Iteration(
                        found.pipeline,
                        found.iteration,
                        found.plan_version,
                        found.iteration_time_s,
                        found.energy_j,
                    )
                )
        told_sequence = self.events[-1].sequence if self.events else 0
        if self._ahead is not None and self._ahead.job.last_event_sequence <= told_sequence:
            self.job, self.ranks = self._ahead.job, self._ahead.ranks
            self._ahead = None
        self._changed.set()
        self._notify()
