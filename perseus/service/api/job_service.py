"""`perseus.v1.JobService`: a thin adapter over the coordinator."""

# ruff: noqa: N802 (the contract names the methods)

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from perseus.service.api.authentication import caller
from perseus.service.api.paging import Page
from perseus.service.api.statuses import mapped, mapped_stream
from perseus.service.api.translate_jobs import (
    event_filter_from_proto,
    is_full,
    job_states_from_proto,
    labels_from_proto,
    period_to_proto,
    policy_from_proto,
    rank_filter_from_proto,
    rank_to_proto,
    spec_from_proto,
    straggler_from_proto,
)
from perseus.service.domain.errors import InvalidFieldError, JobNotFoundError
from perseus.service.domain.inputs import (
    BaselineRequested,
    FinishRequested,
    PolicySet,
    StragglerCleared,
    StragglerReported,
)
from perseus.service.domain.specification import Registration
from perseus.service.shell.jobs import LATEST, Jobs
from perseus.service.shell.quotas import Quotas
from perseus.v1 import event_pb2, job_pb2, job_service_pb2_grpc
from perseus.v1 import job_service_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]


class JobService(job_service_pb2_grpc.JobServiceServicer):
    """Registers, observes and steers jobs. `unmarked`: why a job's training marks no iterations, if known."""

    def __init__(self, jobs: Jobs, quotas: Quotas, unmarked: Callable[[str], str] = lambda _: "") -> None:
        self._jobs = jobs
        self._unmarked = unmarked
        self._quotas = quotas

    @mapped
    async def RegisterJob(self, request: pb.RegisterJobRequest, context: Context) -> pb.RegisterJobResponse:
        """Register a job, or return the run that the request led to before."""
        if not request.HasField("spec"):
            raise InvalidFieldError(field="spec", expected="a job's specification", found="none")
        caller().check_job(request.spec.job_id)
        registration = Registration(
            request.request_id,
            request.spec_fingerprint,
            request.owner,
            caller().name,
            labels_from_proto(request.labels),
        )
        job = await self._jobs.register(spec_from_proto(request.spec), registration)
        return pb.RegisterJobResponse(job=job)

    @mapped
    async def GetJob(self, request: pb.GetJobRequest, context: Context) -> pb.GetJobResponse:
        """Return a run of a job."""
        unmarked = self._unmarked(request.job_id) if request.run_number == LATEST else ""
        try:
            job = await self._jobs.job(
                request.job_id, request.run_number, is_full=is_full(request.view, default=True)
            )
        except JobNotFoundError:
            raise JobNotFoundError(job_id=request.job_id, unmarked=unmarked) from None
        response = pb.GetJobResponse(job=job)  # a copy: the job may be a snapshot
        if unmarked:
            response.job.next_step = unmarked
        return response

    @mapped
    async def ListJobs(self, request: pb.ListJobsRequest, context: Context) -> pb.ListJobsResponse:
        """Return a page of jobs."""
        page = Page.asked(request)
        found = self._jobs.jobs(
            page.after,
            job_states_from_proto(request.states),
            labels_from_proto(request.labels),
            is_full=is_full(request.view, default=False),
        )
        jobs, next_page_token = page.fill(found)
        return pb.ListJobsResponse(jobs=jobs, next_page_token=next_page_token)

    @mapped
    async def ListRanks(self, request: pb.ListRanksRequest, context: Context) -> pb.ListRanksResponse:
        """Return a page of a job's ranks."""
        page = Page.asked(request)
        found = await self._jobs.ranks(request.job_id, rank_filter_from_proto(request), page.first_number)
        ranks, next_page_token = page.fill((index, rank_to_proto(rank)) for index, rank in found)
        return pb.ListRanksResponse(ranks=ranks, next_page_token=next_page_token)

    @mapped
    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        """Return a page of a job's runs, the latest first."""
        page = Page.asked(request)
        before = page.first_number - 1 if page.after else LATEST
        views = await self._jobs.runs(request.job_id, before, page.size + 1)
        runs, next_page_token = page.fill((view.run_number, view) for view in views)
        return pb.ListRunsResponse(runs=runs, next_page_token=next_page_token)

    @mapped
    async def ListJobEvents(
        self, request: pb.ListJobEventsRequest, context: Context
    ) -> pb.ListJobEventsResponse:
        """Return a page of a run's events."""
        page = Page.asked(request)
        found = await self._jobs.events(
            request.job_id,
            request.run_number,
            event_filter_from_proto(request),
            page.first_number - 1,
            page.size + 1,
        )
        events, next_page_token = page.fill((event.sequence, event) for event in found)
        return pb.ListJobEventsResponse(events=events, next_page_token=next_page_token)

    @mapped
    async def DeleteJob(self, request: pb.DeleteJobRequest, context: Context) -> pb.DeleteJobResponse:
        """Delete a finished job with all its runs."""
        await self._jobs.delete(request.job_id, allow_missing=request.allow_missing)
        return pb.DeleteJobResponse()

    @mapped
    async def ResumeJob(self, request: pb.ResumeJobRequest, context: Context) -> pb.ResumeJobResponse:
        """Resume a stalled or quarantined job."""
        return pb.ResumeJobResponse(job=await self._jobs.resume(request.job_id))

    @mapped
    async def FinishJob(self, request: pb.FinishJobRequest, context: Context) -> pb.FinishJobResponse:
        """Finish a job."""
        return pb.FinishJobResponse(job=await self._jobs.change(request.job_id, FinishRequested()))

    @mapped
    async def ReportStraggler(
        self, request: pb.ReportStragglerRequest, context: Context
    ) -> pb.ReportStragglerResponse:
        """Note a straggler that a client reports."""
        job = await self._jobs.change(request.job_id, StragglerReported(straggler_from_proto(request)))
        return pb.ReportStragglerResponse(job=job)

    @mapped
    async def ClearStraggler(
        self, request: pb.ClearStragglerRequest, context: Context
    ) -> pb.ClearStragglerResponse:
        """Clear a straggler."""
        job = await self._jobs.change(request.job_id, StragglerCleared(request.pipeline))
        return pb.ClearStragglerResponse(job=job)

    @mapped
    async def SetPolicy(self, request: pb.SetPolicyRequest, context: Context) -> pb.SetPolicyResponse:
        """Set a job's operating policy."""
        job = await self._jobs.change(request.job_id, PolicySet(policy_from_proto(request.policy)))
        return pb.SetPolicyResponse(job=job)

    @mapped
    async def MeasureBaseline(
        self, request: pb.MeasureBaselineRequest, context: Context
    ) -> pb.MeasureBaselineResponse:
        """Measure the stock baseline again."""
        job = await self._jobs.change(request.job_id, BaselineRequested(request.request_id))
        return pb.MeasureBaselineResponse(job=job)

    @mapped
    async def GetReport(self, request: pb.GetReportRequest, context: Context) -> pb.GetReportResponse:
        """Return a page of a run's report."""
        page = Page.asked(request)
        found = await self._jobs.report(request.job_id, request.run_number, page.first_number)
        periods, next_page_token = page.fill(
            (period.number, period_to_proto(period, saving)) for period, saving in found
        )
        job = await self._jobs.job(request.job_id, request.run_number, is_full=False)
        return pb.GetReportResponse(
            periods=periods,
            profiling_cost=job.profiling_cost,
            profiling_budget=job.profiling_budget,
            next_page_token=next_page_token,
            no_slowdown_time=job.no_slowdown_time if job.HasField("no_slowdown_time") else None,
        )

    @mapped
    async def GetTimeline(self, request: pb.GetTimelineRequest, context: Context) -> pb.GetTimelineResponse:
        """Return a pipeline's latest complete iteration, or that of its stock baseline."""
        return await self._jobs.timeline(
            request.job_id, request.pipeline, from_baseline=request.from_baseline
        )

    @mapped_stream
    async def WatchJob(
        self, request: pb.WatchJobRequest, context: Context
    ) -> AsyncIterator[pb.WatchJobResponse]:
        """Stream a run, its events and its iterations until it has ended."""
        if request.after_sequence < 0:
            raise InvalidFieldError(
                field="after_sequence", expected="0 or more", found=request.after_sequence
            )
        with self._quotas.stream(caller().name):
            async for update in self._jobs.watch(
                request.job_id,
                request.run_number,
                request.after_sequence,
                is_full=is_full(request.view, default=False),
            ):
                match update:
                    case job_pb2.Job():
                        yield pb.WatchJobResponse(job=update)
                    case event_pb2.JobEvent():
                        yield pb.WatchJobResponse(event=update)
                    case job_pb2.IterationSummary():
                        yield pb.WatchJobResponse(iteration=update)
                    case pb.CaughtUp():
                        yield pb.WatchJobResponse(caught_up=update)
                    case pb.WatchGap():
                        yield pb.WatchJobResponse(gap=update)
