"""`perseus.v1.JobService`: a thin adapter over the coordinator."""

# ruff: noqa: N802 (the contract names the methods)

import base64
import binascii
from collections.abc import AsyncIterator
from typing import Any

import grpc

from perseus.service.api.statuses import mapped, mapped_stream
from perseus.service.api.translate_jobs import (
    event_to_proto,
    job_to_proto,
    period_to_proto,
    policy_from_proto,
    spec_from_proto,
    straggler_from_proto,
    summary_to_proto,
    timeline_to_proto,
)
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.model import IterationSummary, JobEvent, JobView
from perseus.service.domain.specification import Registration
from perseus.service.shell.coordinator import LATEST, Coordinator
from perseus.v1 import job_service_pb2 as pb
from perseus.v1 import job_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000


class JobService(job_service_pb2_grpc.JobServiceServicer):
    """Registers, observes and steers jobs."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @mapped
    async def RegisterJob(self, request: pb.RegisterJobRequest, context: Context) -> pb.RegisterJobResponse:
        """See the contract."""
        registration = Registration(request.request_id, request.spec_fingerprint)
        view = await self._coordinator.register(spec_from_proto(request.spec), registration)
        return pb.RegisterJobResponse(job=job_to_proto(view))

    @mapped
    async def GetJob(self, request: pb.GetJobRequest, context: Context) -> pb.GetJobResponse:
        """See the contract."""
        view = await self._coordinator.job(request.job_id, request.run_number)
        return pb.GetJobResponse(job=job_to_proto(view))

    @mapped
    async def ListJobs(self, request: pb.ListJobsRequest, context: Context) -> pb.ListJobsResponse:
        """See the contract."""
        size = _page_size(request.page_size)
        views, has_more = self._coordinator.jobs(_decode_token(request.page_token), size)
        return pb.ListJobsResponse(
            jobs=[job_to_proto(view) for view in views],
            next_page_token=_encode_token(views[-1].spec.job_id) if has_more else "",
        )

    @mapped
    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        """See the contract."""
        size = _page_size(request.page_size)
        before = _decode_token(request.page_token) or str(LATEST)
        if not before.isdecimal():
            raise _no_token(request.page_token)
        views, has_more = await self._coordinator.runs(request.job_id, int(before), size)
        return pb.ListRunsResponse(
            runs=[job_to_proto(view) for view in views],
            next_page_token=_encode_token(str(views[-1].run_number)) if has_more else "",
        )

    @mapped
    async def DeleteJob(self, request: pb.DeleteJobRequest, context: Context) -> pb.DeleteJobResponse:
        """See the contract."""
        await self._coordinator.delete(request.job_id, allow_missing=request.allow_missing)
        return pb.DeleteJobResponse()

    @mapped
    async def ResumeJob(self, request: pb.ResumeJobRequest, context: Context) -> pb.ResumeJobResponse:
        """See the contract."""
        return pb.ResumeJobResponse(job=job_to_proto(await self._coordinator.resume(request.job_id)))

    @mapped
    async def FinishJob(self, request: pb.FinishJobRequest, context: Context) -> pb.FinishJobResponse:
        """See the contract."""
        return pb.FinishJobResponse(job=job_to_proto(await self._coordinator.finish(request.job_id)))

    @mapped
    async def ReportStraggler(
        self, request: pb.ReportStragglerRequest, context: Context
    ) -> pb.ReportStragglerResponse:
        """See the contract."""
        view = await self._coordinator.report_straggler(request.job_id, straggler_from_proto(request))
        return pb.ReportStragglerResponse(job=job_to_proto(view))

    @mapped
    async def ClearStraggler(
        self, request: pb.ClearStragglerRequest, context: Context
    ) -> pb.ClearStragglerResponse:
        """See the contract."""
        view = await self._coordinator.clear_straggler(request.job_id, request.pipeline)
        return pb.ClearStragglerResponse(job=job_to_proto(view))

    @mapped
    async def SetPolicy(self, request: pb.SetPolicyRequest, context: Context) -> pb.SetPolicyResponse:
        """See the contract."""
        view = await self._coordinator.set_policy(request.job_id, policy_from_proto(request.policy))
        return pb.SetPolicyResponse(job=job_to_proto(view))

    @mapped
    async def MeasureBaseline(
        self, request: pb.MeasureBaselineRequest, context: Context
    ) -> pb.MeasureBaselineResponse:
        """See the contract."""
        view = await self._coordinator.measure_baseline(request.job_id, request.request_id)
        return pb.MeasureBaselineResponse(job=job_to_proto(view))

    @mapped
    async def GetReport(self, request: pb.GetReportRequest, context: Context) -> pb.GetReportResponse:
        """See the contract."""
        periods = await self._coordinator.report(request.job_id, request.run_number)
        return pb.GetReportResponse(periods=[period_to_proto(period) for period in periods])

    @mapped
    async def GetTimeline(self, request: pb.GetTimelineRequest, context: Context) -> pb.GetTimelineResponse:
        """See the contract."""
        return timeline_to_proto(self._coordinator.timeline(request.job_id, request.pipeline))

    @mapped_stream
    async def WatchJob(
        self, request: pb.WatchJobRequest, context: Context
    ) -> AsyncIterator[pb.WatchJobResponse]:
        """See the contract."""
        if request.after_sequence < 0:
            raise InvalidFieldError(
                field="after_sequence", expected="0 or more", found=request.after_sequence
            )
        updates = self._coordinator.watch(request.job_id, request.after_sequence, request.run_number)
        async for update in updates:
            match update:
                case JobView():
                    yield pb.WatchJobResponse(job=job_to_proto(update))
                case JobEvent():
                    yield pb.WatchJobResponse(event=event_to_proto(update))
                case IterationSummary():
                    yield pb.WatchJobResponse(iteration=summary_to_proto(update))


def _page_size(asked: int) -> int:
    size = asked or DEFAULT_PAGE_SIZE
    if not 1 <= size <= MAX_PAGE_SIZE:
        raise InvalidFieldError(field="page_size", expected=f"0 to {MAX_PAGE_SIZE}", found=size)
    return size


def _encode_token(last: str) -> str:
    return base64.urlsafe_b64encode(last.encode()).decode()


def _decode_token(token: str) -> str:
    try:
        return base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        raise _no_token(token) from None


def _no_token(token: str) -> InvalidFieldError:
    return InvalidFieldError(field="page_token", expected="a next_page_token", found=repr(token))
