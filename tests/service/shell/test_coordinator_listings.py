"""Listings over gRPC: jobs, ranks and reports in pages, and how large their messages are."""

from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import grpc
import pytest

from perseus.service.api import paging
from perseus.service.domain.specification import Coordinates
from perseus.v1 import agent_service_pb2, computation_pb2, job_pb2, rank_pb2
from perseus.v1 import job_service_pb2 as pb
from tests.service.grpc_fakes import (
    ALL_PLACES,
    TIMEOUT_S,
    Client,
    FakeAgent,
    connected,
    make_settings,
    refusal,
    spec_message,
)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with connected(make_settings(tmp_path)) as client:
        yield client


async def finish(client: Client, job_id: str) -> None:
    await client.jobs.FinishJob(pb.FinishJobRequest(job_id=job_id), timeout=TIMEOUT_S)


async def job_pages(client: Client, request: pb.ListJobsRequest) -> list[list[str]]:
    pages = []
    while True:
        response = await client.jobs.ListJobs(request, timeout=TIMEOUT_S)
        pages.append([job.job_id for job in response.jobs])
        request.page_token = response.next_page_token
        if not request.page_token:
            return pages


async def test_jobs_are_listed_in_pages_and_by_state(client: Client) -> None:
    for letter in "edcba":
        await client.register(job_id=f"job-{letter}")
    assert await job_pages(client, pb.ListJobsRequest(page_size=2)) == [
        ["job-a", "job-b"],
        ["job-c", "job-d"],
        ["job-e"],
    ]
    await finish(client, "job-b")
    await finish(client, "job-d")
    waiting, finished = job_pb2.JOB_STATE_WAITING, job_pb2.JOB_STATE_FINISHED
    for states, pages in (
        ([waiting], [["job-a", "job-c"], ["job-e"]]),
        ([finished], [["job-b", "job-d"]]),
        ([waiting, finished], [["job-a", "job-b"], ["job-c", "job-d"], ["job-e"]]),
        ([job_pb2.JOB_STATE_STOCK], [[]]),
    ):
        assert await job_pages(client, pb.ListJobsRequest(page_size=2, states=states)) == pages


async def test_a_job_is_returned_in_summary_or_in_full(client: Client) -> None:
    registered = await client.register()
    assert registered == await client.job()
    assert registered.spec == spec_message_as_registered()
    summary = job_pb2.Job()
    summary.CopyFrom(registered)
    summary.ClearField("spec")
    request = pb.GetJobRequest(job_id="job", view=job_pb2.JOB_VIEW_SUMMARY)
    assert (await client.jobs.GetJob(request, timeout=TIMEOUT_S)).job == summary
    for view, expected in ((job_pb2.JOB_VIEW_UNSPECIFIED, summary), (job_pb2.JOB_VIEW_FULL, registered)):
        listed = await client.jobs.ListJobs(pb.ListJobsRequest(view=view), timeout=TIMEOUT_S)
        assert list(listed.jobs) == [expected]


def spec_message_as_registered() -> job_pb2.JobSpec:
    spec = spec_message()
    spec.policy.no_slowdown.SetInParent()
    return spec


async def test_ranks_are_listed_in_pages(client: Client) -> None:
    await client.register()
    agent = FakeAgent(client, "agent", ALL_PLACES[:3])
    await agent.join()
    found, request = [], pb.ListRanksRequest(job_id="job", page_size=3)
    while True:
        response = await client.jobs.ListRanks(request, timeout=TIMEOUT_S)
        found.append([(rank.coordinates.pipeline, rank.coordinates.stage) for rank in response.ranks])
        request.page_token = response.next_page_token
        if not request.page_token:
            break
    assert found == [[(0, 0), (0, 1), (1, 0)], [(1, 1)]]
    (expected,) = await client.ranks(states=[rank_pb2.RANK_STATE_EXPECTED])
    assert (expected.coordinates, expected.gpu_uuid) == (agent.place(Coordinates(1, 1, 0)), "")
    (joined,) = await client.ranks(pipeline=1, stage=0)
    assert (joined.state, joined.hostname, joined.gpu_uuid) == (
        rank_pb2.RANK_STATE_CONNECTED,
        "host",
        "GPU-1-0-0",
    )
    counts = (await client.job()).rank_counts
    assert counts == job_pb2.RankCounts(connected_count=3, expected_count=1)


async def test_an_agent_of_a_job_s_first_rank_learns_its_saving(client: Client) -> None:
    async def savings(agent: FakeAgent) -> list[agent_service_pb2.JobSaving]:
        agent.received.clear()
        await agent.send(heartbeat=agent_service_pb2.Heartbeat())
        await agent.until(lambda: any(message.HasField("heartbeat") for message in agent.received))
        return [saving for message in agent.received for saving in message.heartbeat.savings]

    await client.register()
    agent = FakeAgent(client, "agent", ALL_PLACES)
    await agent.join()
    assert await savings(agent) == [], "it is unknown"
    await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
    await agent.iterate(6)
    saving = (await client.job()).figures.saving
    assert await savings(agent) == [
        agent_service_pb2.JobSaving(
            job_id="job", energy_percent=saving.energy_percent, slowdown_percent=saving.slowdown_percent
        )
    ]
    other = FakeAgent(client, "other", [])
    await other.join()
    assert await savings(other) == []
    await other.end()


async def test_a_report_comes_in_pages_with_savings(client: Client) -> None:
    await client.register()
    agent = FakeAgent(client, "agent", ALL_PLACES)
    await agent.join()
    await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
    await agent.iterate(6)
    periods: list[job_pb2.ReportPeriod] = []
    request = pb.GetReportRequest(job_id="job", page_size=2)
    while True:
        page = await client.jobs.GetReport(request, timeout=TIMEOUT_S)
        assert len(page.periods) <= 2
        periods += page.periods
        request.page_token = page.next_page_token
        if not request.page_token:
            break
    request = pb.GetReportRequest(job_id="job", run_number=1)
    assert periods == list((await client.jobs.GetReport(request, timeout=TIMEOUT_S)).periods)
    assert [period.number for period in periods] == list(range(len(periods)))

    stock, plan = periods[0], periods[-1]
    assert not stock.HasField("saving")
    assert (stock.state, plan.state) == (job_pb2.JOB_STATE_BASELINE, job_pb2.JOB_STATE_PLANNED)
    assert list(stock.plan_versions) == [0]
    assert len(plan.plan_versions) == 1
    assert plan.last_iteration == plan.first_iteration + plan.iteration_count - 1
    registered_ns = (await client.job()).create_time.ToNanoseconds()
    times_ns = [moment.ToNanoseconds() for each in periods for moment in (each.start_time, each.end_time)]
    assert [registered_ns, *times_ns] == sorted([registered_ns, *times_ns])
    assert (await client.job()).baseline.energy_j == pytest.approx(stock.energy_j)
    # The emulated iterations all take equally long, whatever the clocks.
    assert plan.saving.baseline_period_number == 0
    assert plan.saving.energy_percent == pytest.approx(0.0)
    assert plan.saving.slowdown_se_percent == pytest.approx(0.0)


async def test_a_finished_job_shows_when_and_why(client: Client) -> None:
    registered = await client.register()
    assert not registered.HasField("finish_time")
    await finish(client, "job")
    job = await client.job()
    assert job.state_reason == "ended on request"
    assert job.finish_time.ToNanoseconds() >= registered.create_time.ToNanoseconds()
    assert job.last_event_sequence == registered.last_event_sequence + 1


async def test_invalid_listings_are_refused(client: Client) -> None:
    await client.register()
    jobs = client.jobs
    token = (await jobs.ListRanks(pb.ListRanksRequest(job_id="job", page_size=1))).next_page_token
    cases: list[tuple[Awaitable[object], str, str]] = [
        (jobs.ListJobs(pb.ListJobsRequest(page_token=token)), "INVALID_FIELD", "page_token"),
        (
            jobs.ListRanks(pb.ListRanksRequest(job_id="job", stage=0, page_token=token)),
            "INVALID_FIELD",
            "page_token",
        ),
        (jobs.ListRanks(pb.ListRanksRequest(job_id="job", page_size=1001)), "INVALID_FIELD", "page_size"),
        (jobs.ListRanks(pb.ListRanksRequest(job_id="job", stage=2)), "INVALID_FIELD", "stage"),
        (jobs.ListRanks(pb.ListRanksRequest(job_id="job", pipeline=2)), "PIPELINE_OUT_OF_RANGE", ""),
        (
            jobs.ListRanks(pb.ListRanksRequest(job_id="job", states=[rank_pb2.RANK_STATE_UNSPECIFIED])),
            "INVALID_FIELD",
            "states",
        ),
        (jobs.ListJobs(pb.ListJobsRequest(states=[99])), "INVALID_FIELD", "states"),  # type: ignore[list-item]
        (jobs.ListJobs(pb.ListJobsRequest(view=99)), "INVALID_FIELD", "view"),  # type: ignore[arg-type]
        (jobs.GetJob(pb.GetJobRequest(job_id="job", view=99)), "INVALID_FIELD", "view"),  # type: ignore[arg-type]
        (jobs.GetReport(pb.GetReportRequest(job_id="job", page_size=-1)), "INVALID_FIELD", "page_size"),
    ]
    for call, reason, field in cases:
        code, found, metadata = await refusal(call)
        assert (code, found) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
        assert metadata.get("field", "") == field


@pytest.mark.parametrize("run_number", [2, -1])
async def test_an_unknown_run_of_a_report_is_not_found(client: Client, run_number: int) -> None:
    await client.register()
    for call in (
        client.jobs.GetJob(pb.GetJobRequest(job_id="job", run_number=run_number)),
        client.jobs.GetReport(pb.GetReportRequest(job_id="job", run_number=run_number)),
    ):
        assert await refusal(call) == (
            grpc.StatusCode.NOT_FOUND,
            "RUN_NOT_FOUND",
            {"job_id": "job", "run_number": str(run_number)},
        )


async def test_ten_jobs_of_4096_ranks_are_a_small_page(client: Client) -> None:
    for number in range(10):
        spec = spec_message(f"pretraining-of-something-large-{number}", 64, 8, 32)
        spec.parallelism.tensor_count = 8
        await client.jobs.RegisterJob(pb.RegisterJobRequest(spec=spec, request_id="r"), timeout=TIMEOUT_S)
    listed = await client.jobs.ListJobs(pb.ListJobsRequest(), timeout=TIMEOUT_S)
    assert len(listed.jobs) == 10
    assert all(job.rank_counts.expected_count == 4096 for job in listed.jobs)
    assert listed.ByteSize() < 10_000

    job_id = listed.jobs[0].job_id
    agent = FakeAgent(client, "agent", [Coordinates(0, stage, 0) for stage in range(2)], job_id)
    await agent.join()
    ranks = await client.jobs.ListRanks(pb.ListRanksRequest(job_id=job_id, page_size=1000), timeout=TIMEOUT_S)
    assert len(ranks.ranks) == 1000
    joined = next(rank for rank in ranks.ranks if rank.state == rank_pb2.RANK_STATE_CONNECTED)
    assert 1000 * joined.ByteSize() < 200_000
    assert ranks.ByteSize() < 200_000


async def test_jobs_in_full_are_listed_in_pages_of_limited_size(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is scaled down with the schedules, which take megabytes in real jobs."""
    forward, backward = computation_pb2.COMPUTATION_KIND_FORWARD, computation_pb2.COMPUTATION_KIND_BACKWARD
    order = [
        computation_pb2.Computation(kind=kind, microbatch=microbatch)
        for microbatch in range(40)
        for kind in (forward, backward)
    ]
    spec = spec_message()
    spec.schedule.Clear()
    for _ in range(2):
        spec.schedule.explicit.stages.add(computations=order)
    names = [f"job-{number}" for number in range(10)]
    for spec.job_id in names:
        await client.jobs.RegisterJob(pb.RegisterJobRequest(spec=spec, request_id="r"), timeout=TIMEOUT_S)
    size_bytes = (await client.job(names[0])).ByteSize()
    monkeypatch.setattr(paging, "PAGE_BYTES", 7 * size_bytes // 2)
    pages = await job_pages(client, pb.ListJobsRequest(page_size=1000, view=job_pb2.JOB_VIEW_FULL))
    assert pages == [names[:3], names[3:6], names[6:9], names[9:]]
    assert await job_pages(client, pb.ListJobsRequest(page_size=1000)) == [names]
