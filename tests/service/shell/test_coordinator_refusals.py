"""Invalid requests over gRPC: each ends with its status, a stable reason and the values, and breaks nothing.

Numbers beyond their bounds are in `tests/service/api/test_bounds_of_requests.py`, texts in `test_texts.py`,
specifications in `test_invalid_specs.py`.
"""

from typing import Any

import grpc
import pytest

from perseus.v1 import computation_pb2, frontier_pb2, rank_pb2
from tests.service.grpc_fakes import Client, refusal, spec_message

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
NOT_YET = grpc.StatusCode.FAILED_PRECONDITION
STRAGGLER = {"job_id": "job", "slowdown_factor": 1.2}
EARLIER, LATER = {"seconds": 3600}, {"seconds": 7200}

Fields = dict[str, Any]


async def test_an_unknown_job_is_not_found_by_any_method(client: Client) -> None:
    calls: list[tuple[str, Fields]] = [
        ("GetJob", {}),
        ("ListRuns", {}),
        ("FinishJob", {}),
        ("DeleteJob", {}),
        ("ResumeJob", {}),
        ("MeasureBaseline", {"request_id": "r"}),
        ("ReportStraggler", {"slowdown_factor": 2}),
        ("ClearStraggler", {}),
        ("SetPolicy", {}),
        ("ListJobEvents", {}),
        ("GetReport", {}),
        ("GetTimeline", {}),
        ("GetFrontier", {}),
        ("GetPlan", {"iteration_time_s": 1.0}),
        ("WatchJob", {}),
    ]
    for method, fields in calls:
        refused = await refusal(client.ask(method, job_id="no", **fields))
        assert refused == (NOT_FOUND, "JOB_NOT_FOUND", {"job_id": "no"}), method


async def test_an_unknown_run_is_not_found_by_any_method(client: Client) -> None:
    await client.register()
    for method in ("GetJob", "GetReport", "ListJobEvents", "WatchJob"):
        for number in (2, -1):
            refused = await refusal(client.ask(method, job_id="job", run_number=number))
            values = {"job_id": "job", "run_number": str(number)}
            assert refused == (NOT_FOUND, "RUN_NOT_FOUND", values), method


async def test_invalid_fields_are_named(client: Client) -> None:
    await client.register()
    token = (await client.ask("ListRanks", job_id="job", page_size=1)).next_page_token
    job = {"job_id": "job"}
    cases: list[tuple[str, Fields, str]] = [
        ("RegisterJob", {"request_id": "r"}, "spec"),
        ("ListJobs", {"page_size": -1}, "page_size"),
        ("ListJobs", {"page_token": "%%%"}, "page_token"),
        ("ListJobs", {"page_token": token}, "page_token"),
        ("ListJobs", {"states": [99]}, "states"),
        ("ListJobs", {"view": 99}, "view"),
        ("GetJob", job | {"view": 99}, "view"),
        ("WatchJob", job | {"view": 7}, "view"),
        ("WatchJob", job | {"after_sequence": -1}, "after_sequence"),
        ("ListRanks", job | {"stage": 0, "page_token": token}, "page_token"),
        ("ListRanks", job | {"page_size": 1001}, "page_size"),
        ("ListRanks", job | {"stage": 2}, "stage"),
        ("ListRanks", job | {"states": [rank_pb2.RANK_STATE_UNSPECIFIED]}, "states"),
        ("ListRuns", job | {"page_token": "eA=="}, "page_token"),
        ("ListJobEvents", job | {"page_size": -1}, "page_size"),
        ("GetReport", job | {"page_size": -1}, "page_size"),
        ("GetPlan", job | {"iteration_time_s": 1e308}, "iteration_time_s"),
        ("ReportStraggler", job, "slowness"),
        ("ReportStraggler", job | {"slowdown_factor": 0.5}, "slowdown_factor"),
        ("ReportStraggler", job | {"iteration_time_s": -1.0}, "iteration_time_s"),
        ("ReportStraggler", job | {"iteration_time_s": 5e-324}, "iteration_time_s"),
        ("ListLedgerEntries", {"page_size": -1}, "page_size"),
        ("ListLedgerEntries", {"page_token": "x"}, "page_token"),
        ("ListLedgerEntries", {"start_time": LATER, "end_time": EARLIER}, "end_time"),
        ("ListLedgerEntries", {"start_time": {"seconds": 2**60}}, "start_time"),
        *(
            (method, fields | {"request_id": request_id}, "request_id")
            for request_id in ("", "x" * 65, "tab\t", "naïve")
            for method, fields in (("RegisterJob", {"spec": spec_message("new")}), ("MeasureBaseline", job))
        ),
    ]
    for method, fields, field in cases:
        code, reason, metadata = await refusal(client.ask(method, **fields))
        assert (code, reason, metadata["field"]) == (INVALID, "INVALID_FIELD", field), (method, fields)
    assert [job.job_id for job in (await client.ask("ListJobs")).jobs] == ["job"]


@pytest.mark.parametrize(
    ("method", "fields", "code", "reason"),
    [
        ("RegisterJob", {"spec": spec_message("a b"), "request_id": "r"}, INVALID, "INVALID_JOB_ID"),
        ("ListLedgerEntries", {"job_id": "not a job"}, INVALID, "INVALID_JOB_ID"),
        ("ListRanks", {"job_id": "job", "pipeline": 2}, INVALID, "PIPELINE_OUT_OF_RANGE"),
        ("GetTimeline", {"job_id": "job", "pipeline": 9}, INVALID, "PIPELINE_OUT_OF_RANGE"),
        ("ReportStraggler", STRAGGLER | {"pipeline": 2}, INVALID, "PIPELINE_OUT_OF_RANGE"),
        ("GetTimeline", {"job_id": "job"}, NOT_YET, "TIMELINE_NOT_READY"),
        ("GetFrontier", {"job_id": "job"}, NOT_YET, "JOB_NOT_SOLVED"),
        ("GetPlan", {"job_id": "job", "iteration_time_s": 1}, NOT_YET, "JOB_NOT_SOLVED"),
    ],
)
async def test_other_invalid_requests_are_refused(
    client: Client, method: str, fields: Fields, code: grpc.StatusCode, reason: str
) -> None:
    await client.register()
    assert (await refusal(client.ask(method, **fields)))[:2] == (code, reason)


async def test_unsolvable_problems_are_refused(client: Client) -> None:
    spec = spec_message(stages=1, microbatches=2)
    forward, backward = computation_pb2.COMPUTATION_KIND_FORWARD, computation_pb2.COMPUTATION_KIND_BACKWARD

    def measured(kind: int = forward, copies: int = 1, **changes: float) -> Fields:
        measurement = {"clock_mhz": 1000, "time_s": 0.1, "energy_j": 20.0, **changes}
        return {"kind": kind, "measurements": [measurement] * copies}

    both = [measured(forward), measured(backward)]
    parts = {"schedule": spec.schedule, "stage_count": 1, "profiles": both, "blocking_power_w": [50.0]}
    cases: list[tuple[Fields, int, str]] = [
        ({}, 2, "INVALID_FIELD"),
        ({}, 10_001, "INVALID_FIELD"),
        ({"profiles": [*both, both[0]]}, 0, "INVALID_FIELD"),
        ({"profiles": [measured(copies=1025)]}, 0, "INVALID_FIELD"),
        ({"profiles": both[:1]}, 0, "INVALID_PROFILE"),
        ({"profiles": [measured(time_s=5e-324)]}, 0, "INVALID_PROFILE"),
        ({"profiles": [measured(energy_j=5e-324)]}, 0, "INVALID_PROFILE"),
        ({"blocking_power_w": []}, 0, "INVALID_PIPELINE"),
        ({"blocking_power_w": [-1.0]}, 0, "INVALID_PIPELINE"),
    ]
    for changes, point_count, reason in cases:
        problem = frontier_pb2.PipelineProblem(**{**parts, **changes})
        refused = await refusal(client.ask("Solve", problem=problem, point_count=point_count))
        assert refused[:2] == (INVALID, reason), changes
