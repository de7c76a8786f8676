"""Invalid requests over gRPC: each ends with its status, a stable reason and the values, and breaks
nothing."""

import math
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from perseus.v1 import computation_pb2, frontier_pb2, frontier_service_pb2, job_pb2, job_service_pb2
from tests.service.grpc_fakes import TIMEOUT_S, Client, connected, make_settings, refusal, spec_message

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with connected(make_settings(tmp_path)) as client:
        await client.register()
        yield client


def with_policy(max_slowdown_percent: float) -> job_pb2.JobSpec:
    spec = spec_message("new")
    spec.policy.max_slowdown_percent = max_slowdown_percent
    return spec


def with_rule(**rule: Any) -> job_pb2.JobSpec:
    spec = spec_message("new")
    spec.policy.CopyFrom(job_pb2.OperatingPolicy(**rule))
    return spec


def explicit(
    *stages: Sequence[tuple[computation_pb2.ComputationKind.ValueType, int]],
    paths: Sequence[Sequence[tuple[int, int]]] = (),
) -> computation_pb2.Schedule:
    orders = [
        computation_pb2.StageOrder(
            computations=[
                computation_pb2.Computation(kind=kind, microbatch=microbatch) for kind, microbatch in stage
            ]
        )
        for stage in stages
    ]
    flows = [
        computation_pb2.Path(
            steps=[computation_pb2.PathStep(stage=stage, chunk=chunk) for stage, chunk in path]
        )
        for path in paths
    ]
    return computation_pb2.Schedule(explicit=computation_pb2.ExplicitSchedule(stages=orders, paths=flows))


async def test_invalid_specifications_are_refused(client: Client) -> None:
    no_name = computation_pb2.Schedule(named=computation_pb2.NamedSchedule(microbatch_count=4))
    cases: list[tuple[job_pb2.JobSpec, str, dict[str, str]]] = [
        (spec_message(job_id="GPT 3"), "INVALID_JOB_ID", {"job_id": "GPT 3"}),
        (spec_message(job_id=".GPT3"), "INVALID_JOB_ID", {"job_id": ".GPT3"}),
        (spec_message(job_id=""), "INVALID_JOB_ID", {"job_id": ""}),
        (spec_message(job_id="x" * 64), "INVALID_JOB_ID", {}),
        (
            spec_message("new", pipelines=0),
            "INVALID_FIELD",
            {"field": "parallelism.pipeline_count", "found": "0"},
        ),
        (
            spec_message("new", stages=-2),
            "INVALID_FIELD",
            {"field": "parallelism.stage_count", "found": "-2"},
        ),
        (spec_message("new", pipelines=10**6), "INVALID_FIELD", {"field": "parallelism.pipeline_count"}),
        (spec_message("new", pipelines=4096, stages=256), "INVALID_FIELD", {"field": "parallelism"}),
        (spec_message("new", microbatches=0), "INVALID_FIELD", {"field": "schedule.named.microbatch_count"}),
        (job_pb2.JobSpec(job_id="new"), "INVALID_FIELD", {"field": "parallelism"}),
        (
            job_pb2.JobSpec(job_id="new", parallelism=spec_message().parallelism, schedule=no_name),
            "INVALID_FIELD",
            {"field": "schedule.named.name", "found": "0"},
        ),
        (
            job_pb2.JobSpec(job_id="new", parallelism=spec_message().parallelism),
            "INVALID_FIELD",
            {"field": "schedule"},
        ),
        (
            with_policy(math.nan),
            "INVALID_FIELD",
            {"field": "policy.max_slowdown_percent", "found": "nan"},
        ),
        (
            with_policy(101),
            "INVALID_FIELD",
            {"found": "101.0"},
        ),
        (with_rule(max_average_power_w=1e308), "INVALID_FIELD", {"field": "policy.max_average_power_w"}),
        (with_rule(max_average_power_w=5e-324), "INVALID_FIELD", {"field": "policy.max_average_power_w"}),
        (
            with_rule(deadline=job_pb2.Deadline(iteration_count=2**63 - 1, time_s=1)),
            "INVALID_FIELD",
            {"field": "policy.deadline.iteration_count"},
        ),
        (
            with_rule(deadline=job_pb2.Deadline(iteration_count=1, time_s=1e308)),
            "INVALID_FIELD",
            {"field": "policy.deadline.time_s"},
        ),
    ]
    for spec, reason, metadata in cases:
        code, found, details = await refusal(
            client.jobs.RegisterJob(
                job_service_pb2.RegisterJobRequest(spec=spec, request_id="r"), timeout=TIMEOUT_S
            )
        )
        assert (code, found) == (INVALID, reason), spec
        assert metadata.items() <= details.items(), spec
    listed = await client.jobs.ListJobs(job_service_pb2.ListJobsRequest(), timeout=TIMEOUT_S)
    assert [job.job_id for job in listed.jobs] == ["job"]


@pytest.mark.slow("orders of hundreds of thousands of computations")
async def test_invalid_explicit_orders_are_refused(client: Client) -> None:
    forward, backward = computation_pb2.COMPUTATION_KIND_FORWARD, computation_pb2.COMPUTATION_KIND_BACKWARD
    unspecified = computation_pb2.COMPUTATION_KIND_UNSPECIFIED
    fixed = computation_pb2.COMPUTATION_KIND_FIXED
    fine = [(forward, 0), (backward, 0)]
    cases: list[tuple[computation_pb2.Schedule, str, dict[str, str]]] = [
        (explicit(fine), "INVALID_FIELD", {"field": "schedule.explicit.stages", "found": "1"}),
        (explicit(fine, [(forward, 0), (unspecified, 0)]), "INVALID_FIELD", {"found": "0"}),
        (explicit(fine, [(forward, 0)]), "INVALID_SCHEDULE", {"stage": "1"}),
        (explicit(fine, [(backward, 0), (forward, 0)]), "INVALID_SCHEDULE", {}),
        (explicit(fine, fine, paths=[[(0, 0), (2, 0)]]), "INVALID_SCHEDULE", {"stage": "2", "chunk": "0"}),
        (explicit(fine, fine, paths=[[(0, 0)]]), "INVALID_SCHEDULE", {"stage": "1"}),
        (explicit(fine, [*fine, (fixed, 2**31 - 1)]), "INVALID_FIELD", {"found": str(2**31 - 1)}),
        (
            explicit(fine, fine, paths=[[(0, 0), (1, 0)] * 300_000]),
            "INVALID_FIELD",
            {"field": "schedule.explicit.paths", "found": "600000"},
        ),
    ]
    for schedule, reason, metadata in cases:
        spec = spec_message("new")
        spec.schedule.CopyFrom(schedule)
        code, found, details = await refusal(
            client.jobs.RegisterJob(
                job_service_pb2.RegisterJobRequest(spec=spec, request_id="r"), timeout=TIMEOUT_S
            )
        )
        assert (code, found) == (INVALID, reason)
        assert metadata.items() <= details.items()


async def test_registering_again_returns_the_job(client: Client) -> None:
    assert (await client.register()) == (await client.job())


async def test_an_unknown_job_is_not_found_by_any_method(client: Client) -> None:
    jobs, frontiers, pb = client.jobs, client.frontiers, job_service_pb2
    calls: list[Awaitable[object]] = [
        jobs.GetJob(pb.GetJobRequest(job_id="no"), timeout=TIMEOUT_S),
        jobs.ListRuns(pb.ListRunsRequest(job_id="no"), timeout=TIMEOUT_S),
        jobs.FinishJob(pb.FinishJobRequest(job_id="no"), timeout=TIMEOUT_S),
        jobs.DeleteJob(pb.DeleteJobRequest(job_id="no"), timeout=TIMEOUT_S),
        jobs.ResumeJob(pb.ResumeJobRequest(job_id="no"), timeout=TIMEOUT_S),
        jobs.MeasureBaseline(pb.MeasureBaselineRequest(job_id="no", request_id="r"), timeout=TIMEOUT_S),
        jobs.ReportStraggler(pb.ReportStragglerRequest(job_id="no", slowdown_factor=2), timeout=TIMEOUT_S),
        jobs.ClearStraggler(pb.ClearStragglerRequest(job_id="no"), timeout=TIMEOUT_S),
        jobs.SetPolicy(pb.SetPolicyRequest(job_id="no"), timeout=TIMEOUT_S),
        jobs.ListJobEvents(pb.ListJobEventsRequest(job_id="no"), timeout=TIMEOUT_S),
        jobs.GetReport(pb.GetReportRequest(job_id="no"), timeout=TIMEOUT_S),
        jobs.GetTimeline(pb.GetTimelineRequest(job_id="no"), timeout=TIMEOUT_S),
        frontiers.GetFrontier(frontier_service_pb2.GetFrontierRequest(job_id="no"), timeout=TIMEOUT_S),
        frontiers.GetPlan(
            frontier_service_pb2.GetPlanRequest(job_id="no", iteration_time_s=1.0), timeout=TIMEOUT_S
        ),
        jobs.WatchJob(pb.WatchJobRequest(job_id="no"), timeout=TIMEOUT_S).read(),
    ]
    for call in calls:
        assert await refusal(call) == (NOT_FOUND, "JOB_NOT_FOUND", {"job_id": "no"})


@pytest.mark.parametrize(
    ("slowness", "field"),
    [
        ({}, "slowness"),
        ({"slowdown_factor": 0.5}, "slowdown_factor"),
        ({"slowdown_factor": math.nan}, "slowdown_factor"),
        ({"iteration_time_s": -1.0}, "iteration_time_s"),
        ({"iteration_time_s": math.inf}, "iteration_time_s"),
        ({"iteration_time_s": 1e308}, "iteration_time_s"),
        ({"iteration_time_s": 5e-324}, "iteration_time_s"),
        ({"slowdown_factor": 1e308}, "slowdown_factor"),
    ],
)
async def test_an_impossible_straggler_is_refused(
    client: Client, slowness: dict[str, Any], field: str
) -> None:
    request = job_service_pb2.ReportStragglerRequest(job_id="job", **slowness)
    code, reason, metadata = await refusal(client.jobs.ReportStraggler(request, timeout=TIMEOUT_S))
    assert (code, reason, metadata["field"]) == (INVALID, "INVALID_FIELD", field)


async def test_other_invalid_requests_are_refused(client: Client) -> None:
    pb, jobs, frontiers = job_service_pb2, client.jobs, client.frontiers
    precondition = grpc.StatusCode.FAILED_PRECONDITION
    straggler = pb.ReportStragglerRequest(job_id="job", pipeline=2, slowdown_factor=1.2)
    assert await refusal(jobs.ReportStraggler(straggler, timeout=TIMEOUT_S)) == (
        INVALID,
        "PIPELINE_OUT_OF_RANGE",
        {"job_id": "job", "pipeline": "2", "last_pipeline": "1"},
    )
    cases: list[tuple[Awaitable[object], grpc.StatusCode, str]] = [
        (jobs.ListJobs(pb.ListJobsRequest(page_size=-1)), INVALID, "INVALID_FIELD"),
        (jobs.ListJobs(pb.ListJobsRequest(page_size=1001)), INVALID, "INVALID_FIELD"),
        (jobs.ListJobs(pb.ListJobsRequest(page_token="%%%")), INVALID, "INVALID_FIELD"),
        (jobs.ListJobEvents(pb.ListJobEventsRequest(job_id="job", page_size=-1)), INVALID, "INVALID_FIELD"),
        (jobs.ListJobEvents(pb.ListJobEventsRequest(job_id="job", page_size=1001)), INVALID, "INVALID_FIELD"),
        (
            jobs.ListJobEvents(pb.ListJobEventsRequest(job_id="job", page_token="%%%")),
            INVALID,
            "INVALID_FIELD",
        ),
        (jobs.ListJobEvents(pb.ListJobEventsRequest(job_id="job", run_number=2)), NOT_FOUND, "RUN_NOT_FOUND"),
        (
            jobs.ListJobEvents(pb.ListJobEventsRequest(job_id="job", run_number=-1)),
            NOT_FOUND,
            "RUN_NOT_FOUND",
        ),
        (jobs.GetTimeline(pb.GetTimelineRequest(job_id="job", pipeline=9)), INVALID, "PIPELINE_OUT_OF_RANGE"),
        (jobs.GetTimeline(pb.GetTimelineRequest(job_id="job")), precondition, "TIMELINE_NOT_READY"),
        (jobs.WatchJob(pb.WatchJobRequest(job_id="job", after_sequence=-1)).read(), INVALID, "INVALID_FIELD"),
        (jobs.WatchJob(pb.WatchJobRequest(job_id="job", view=7)).read(), INVALID, "INVALID_FIELD"),  # type: ignore[arg-type]
        (
            frontiers.GetFrontier(frontier_service_pb2.GetFrontierRequest(job_id="job")),
            precondition,
            "JOB_NOT_SOLVED",
        ),
        (
            frontiers.GetPlan(frontier_service_pb2.GetPlanRequest(job_id="job", iteration_time_s=1e308)),
            INVALID,
            "INVALID_FIELD",
        ),
        (
            frontiers.GetPlan(frontier_service_pb2.GetPlanRequest(job_id="job", iteration_time_s=1)),
            precondition,
            "JOB_NOT_SOLVED",
        ),
    ]
    for call, code, reason in cases:
        assert (await refusal(call))[:2] == (code, reason)


async def test_unsolvable_problems_are_refused(client: Client) -> None:
    spec = spec_message(stages=1, microbatches=2)
    kinds = (computation_pb2.COMPUTATION_KIND_FORWARD, computation_pb2.COMPUTATION_KIND_BACKWARD)

    def problem(**changes: Any) -> frontier_pb2.PipelineProblem:
        measured = frontier_pb2.Measurement(clock_mhz=1000, time_s=0.1, energy_j=20.0)
        profiles = [frontier_pb2.ComputationProfile(kind=kind, measurements=[measured]) for kind in kinds]
        parts = {
            "schedule": spec.schedule,
            "stage_count": 1,
            "profiles": profiles,
            "blocking_power_w": [50.0],
        }
        return frontier_pb2.PipelineProblem(**{**parts, **changes})

    def measured_at(
        kind: computation_pb2.ComputationKind.ValueType = kinds[0], copies: int = 1, **changes: Any
    ) -> frontier_pb2.ComputationProfile:
        measured = frontier_pb2.Measurement(**{"clock_mhz": 1000, "time_s": 0.1, "energy_j": 20.0, **changes})
        return frontier_pb2.ComputationProfile(kind=kind, measurements=[measured] * copies)

    bad = frontier_pb2.Measurement(clock_mhz=1000, time_s=math.nan, energy_j=20.0)
    bad_profile = frontier_pb2.ComputationProfile(kind=kinds[0], measurements=[bad])
    cases = [
        (problem(), 2, "INVALID_FIELD"),
        (problem(), 10_001, "INVALID_FIELD"),
        (problem(stage_count=0), 0, "INVALID_FIELD"),
        (problem(profiles=problem().profiles[:1]), 0, "INVALID_PROFILE"),
        (problem(profiles=[*problem().profiles, problem().profiles[0]]), 0, "INVALID_FIELD"),
        (problem(profiles=[bad_profile]), 0, "INVALID_PROFILE"),
        (problem(blocking_power_w=[]), 0, "INVALID_PIPELINE"),
        (problem(blocking_power_w=[-1.0]), 0, "INVALID_PIPELINE"),
        (problem(transfer_lag_s=-1e-3), 0, "INVALID_FIELD"),
        (problem(transfer_lag_s=math.nan), 0, "INVALID_FIELD"),
        (problem(transfer_lag_s=1e308), 0, "INVALID_FIELD"),
        (problem(blocking_power_w=[1e308]), 0, "INVALID_PIPELINE"),
        (problem(profiles=[measured_at(time_s=1e308)]), 0, "INVALID_PROFILE"),
        (problem(profiles=[measured_at(time_s=5e-324)]), 0, "INVALID_PROFILE"),
        (problem(profiles=[measured_at(energy_j=1e308)]), 0, "INVALID_PROFILE"),
        (problem(profiles=[measured_at(energy_j=5e-324)]), 0, "INVALID_PROFILE"),
        (problem(profiles=[measured_at(time_se_s=1e308)]), 0, "INVALID_PROFILE"),
        (problem(profiles=[measured_at(clock_mhz=2**31 - 1)]), 0, "INVALID_PROFILE"),
        (problem(profiles=[measured_at(copies=1025)]), 0, "INVALID_FIELD"),
    ]
    for message, points, reason in cases:
        request = frontier_service_pb2.SolveRequest(problem=message, point_count=points)
        assert (await refusal(client.frontiers.Solve(request, timeout=TIMEOUT_S)))[:2] == (INVALID, reason)
