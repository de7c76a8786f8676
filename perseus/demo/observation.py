"""The demo's view of its job: the coordinator's WatchJob stream, and an operator's calls."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import grpc.aio

from perseus.demo.summary import Iteration, Measurements
from perseus.v1 import (
    event_pb2,
    frontier_pb2,
    frontier_service_pb2,
    frontier_service_pb2_grpc,
    job_pb2,
    job_service_pb2,
    job_service_pb2_grpc,
)

_POLL_S = 0.25
_RPC_TIMEOUT_S = 10.0


class ObservationError(Exception):
    """An awaited state did not come in time, or can no longer come."""


async def registered_job(channel: grpc.aio.Channel, timeout_s: float) -> str:
    """Wait for a coordinator's first job, and return its identifier.

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


class Observer:
    """Follows one job. `job` is None until it is registered."""

    def __init__(
        self, channel: grpc.aio.Channel, job_id: str, measurements: Measurements, notify: Callable[[], None]
    ) -> None:
        self.job: job_pb2.Job | None = None
        self.events: list[event_pb2.JobEvent] = []
        self.measurements = measurements
        self._jobs = job_service_pb2_grpc.JobServiceStub(channel)
        self._frontiers = frontier_service_pb2_grpc.FrontierServiceStub(channel)
        self._state: int = job_pb2.JOB_STATE_UNSPECIFIED
        self._offered: dict[int, int] = {}
        self._in_force: dict[int, event_pb2.PipelineClocks] = {}
        self.job_id = job_id
        self._notify = notify
        self._changed = asyncio.Event()

    @property
    def state(self) -> int:
        """The job's state; UNSPECIFIED before registration."""
        return self._state

    @property
    def stragglers(self) -> set[int]:
        """The pipelines that the coordinator currently regards as stragglers."""
        return {straggler.pipeline for straggler in self.job.stragglers} if self.job is not None else set()

    @property
    def next_whole_iteration(self) -> int:
        """The first iteration that certainly begins after now.

        An iteration is reported some 0.1 s after its end: the one after the newest known may have ended, and
        the one after that may be under way.
        """
        return self.measurements.latest + 3

    async def follow(self) -> None:
        """Wait for the job to be registered, then follow it until it ends."""
        request = job_service_pb2.GetJobRequest(job_id=self.job_id)
        while self.job is None:
            try:
                self._take_job((await self._jobs.GetJob(request, timeout=_RPC_TIMEOUT_S)).job)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                await asyncio.sleep(_POLL_S)
        watch = job_service_pb2.WatchJobRequest(job_id=self.job_id, view=job_pb2.JOB_VIEW_FULL)
        async for update in self._jobs.WatchJob(watch):
            self._take(update)

    async def until(self, what: str, is_true: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `is_true`, which is called again after every update.

        Raises:
            ObservationError: it did not become true in time, or the job went back to stock, which no scenario
            expects; the text contains `what`.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_true():
                    if self.state == job_pb2.JOB_STATE_STOCK:
                        raise ObservationError(f"expected {what}, found the job {await self._why_at_stock()}")
                    self._changed.clear()
                    await self._changed.wait()
                return
        state = job_pb2.JobState.Name(self.state)  # type: ignore[arg-type]
        last = f"; last event: {self.events[-1].message}" if self.events else ""
        raise ObservationError(f"expected {what} within {timeout_s:.0f} s, found {state}{last}")

    async def collect(
        self, name: str, count: int, timeout_s: float, compared_with: str | None = None
    ) -> None:
        """Make a phase of the next `count` iterations that begin after now."""
        first = self.next_whole_iteration
        numbers = range(first, first + count)
        await self.until(
            f"{count} iterations of {name}", lambda: self.measurements.are_complete(numbers), timeout_s
        )
        self.measurements.close_phase(name, numbers, compared_with)
        self._notify()

    async def timeline(self, pipeline: int) -> job_service_pb2.GetTimelineResponse:
        """Return the latest whole iteration of a pipeline."""
        request = job_service_pb2.GetTimelineRequest(job_id=self.job_id, pipeline=pipeline)
        return await self._jobs.GetTimeline(request, timeout=_RPC_TIMEOUT_S)

    async def frontier(self) -> frontier_pb2.Frontier:
        """Return the job's frontier.

        Raises:
            ObservationError: the job has no frontier any more, as its plans violated their predictions.
        """
        request = frontier_service_pb2.GetFrontierRequest(job_id=self.job_id)
        try:
            return (await self._frontiers.GetFrontier(request, timeout=_RPC_TIMEOUT_S)).frontier
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
            raise ObservationError(
                f"expected a frontier, found the job {await self._why_at_stock()}"
            ) from None

    async def _why_at_stock(self) -> str:
        request = job_service_pb2.GetJobRequest(job_id=self.job_id)
        job = (await self._jobs.GetJob(request, timeout=_RPC_TIMEOUT_S)).job
        return f"at {job_pb2.JobState.Name(job.state)}: {job.state_reason}"

    def is_in_force(self) -> bool:
        """Whether every pipeline runs with its latest offered clocks."""
        if self.job is None or not self.events or self.events[-1].sequence < self.job.last_event_sequence:
            return False
        pipelines = range(self.job.parallelism.pipeline_count)
        return all(
            self._offered.get(pipeline, 0) == self.in_force_version(pipeline) > 0 for pipeline in pipelines
        )

    def in_force_version(self, pipeline: int) -> int:
        """Return the version of the clocks in force on all ranks of a pipeline, 0 before the first."""
        clocks = self._in_force.get(pipeline)
        return clocks.version if clocks is not None else 0

    def in_force_since(self) -> int:
        """Return the first iteration under the plan that came into force last."""
        return max(clocks.start_iteration for clocks in self._in_force.values())

    def _take_job(self, job: job_pb2.Job) -> None:
        self.job = job
        self._state = job.state

    def _take_event(self, event: event_pb2.JobEvent) -> None:
        self.events.append(event)
        match event.type:
            case event_pb2.JOB_EVENT_TYPE_PLAN_OFFERED:
                self._offered[event.pipeline_clocks.pipeline] = event.pipeline_clocks.version
            case event_pb2.JOB_EVENT_TYPE_PLAN_IN_FORCE:
                self._in_force[event.pipeline_clocks.pipeline] = event.pipeline_clocks
            case event_pb2.JOB_EVENT_TYPE_STATE_CHANGED:
                # Snapshots are rare. The latest one may include this event already.
                if self.job is None or event.sequence > self.job.last_event_sequence:
                    self._state = event.state_changed.after

    def _take(self, update: job_service_pb2.WatchJobResponse) -> None:
        match update.WhichOneof("update"):
            case "job":
                self._take_job(update.job)
            case "event":
                self._take_event(update.event)
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
        self._changed.set()
        self._notify()
