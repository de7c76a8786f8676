"""Listings over gRPC: jobs, ranks and reports in pages, and how large their messages are."""

from typing import Any

import pytest

from perseus.v1 import agent_service_pb2, job_pb2, rank_pb2
from tests.service.grpc_fakes import ALL_PLACES, Client, FakeAgent, joined, planned, spec_message


async def all_pages(client: Client, method: str, part: str, **wanted: Any) -> list[list[Any]]:
    """Return the pages of a listing: a part of each answer."""
    pages: list[list[Any]] = []
    token = ""
    while not pages or token:
        answer = await client.ask(method, page_token=token, **wanted)
        pages.append(list(getattr(answer, part)))
        token = answer.next_page_token
    return pages


async def job_pages(client: Client, **wanted: Any) -> list[list[str]]:
    pages = await all_pages(client, "ListJobs", "jobs", **wanted)
    return [[job.job_id for job in page] for page in pages]


async def test_jobs_are_listed_in_pages_and_by_state(client: Client) -> None:
    for letter in "edcba":
        await client.register(job_id=f"job-{letter}")
    assert await job_pages(client, page_size=2) == [
        ["job-a", "job-b"],
        ["job-c", "job-d"],
        ["job-e"],
    ]
    await client.finish("job-b")
    await client.finish("job-d")
    waiting, finished = job_pb2.JOB_STATE_WAITING, job_pb2.JOB_STATE_FINISHED
    for states, pages in (
        ([waiting], [["job-a", "job-c"], ["job-e"]]),
        ([finished], [["job-b", "job-d"]]),
        ([waiting, finished], [["job-a", "job-b"], ["job-c", "job-d"], ["job-e"]]),
        ([job_pb2.JOB_STATE_STOCK], [[]]),
    ):
        assert await job_pages(client, page_size=2, states=states) == pages


async def test_a_job_is_returned_in_summary_or_in_full(client: Client) -> None:
    registered = await client.register()
    assert registered == await client.job() == await client.register()
    spec = spec_message()
    spec.policy.no_slowdown.SetInParent()
    assert registered.spec == spec
    summary = job_pb2.Job()
    summary.CopyFrom(registered)
    summary.ClearField("spec")
    for view, expected in ((job_pb2.JOB_VIEW_SUMMARY, summary), (job_pb2.JOB_VIEW_FULL, registered)):
        assert (await client.ask("GetJob", job_id="job", view=view)).job == expected
        assert list((await client.ask("ListJobs", view=view)).jobs) == [expected]
        assert (await client.ask("WatchJob", job_id="job", view=view).read()).job == expected
    assert list((await client.ask("ListJobs")).jobs) == [summary]
    assert (await client.ask("WatchJob", job_id="job").read()).job == summary


async def test_ranks_are_listed_in_pages(client: Client) -> None:
    agent = await joined(client, places=ALL_PLACES[:3])
    pages = await all_pages(client, "ListRanks", "ranks", job_id="job", page_size=3)
    places = [[(rank.coordinates.pipeline, rank.coordinates.stage) for rank in page] for page in pages]
    assert places == [[(0, 0), (0, 1), (1, 0)], [(1, 1)]]
    (expected,) = await client.ranks(states=[rank_pb2.RANK_STATE_EXPECTED])
    assert (expected.coordinates, expected.gpu_uuid) == (agent.place(ALL_PLACES[3]), "")
    (other,) = await client.ranks(pipeline=1, stage=0)
    connected = rank_pb2.RANK_STATE_CONNECTED
    assert (other.state, other.hostname, other.gpu_uuid) == (connected, "host", "GPU-1-0-0")
    counts = (await client.job()).rank_counts
    assert counts == job_pb2.RankCounts(connected_count=3, expected_count=1)


async def test_an_agent_of_a_job_s_first_rank_learns_its_saving(client: Client) -> None:
    agent = await joined(client)
    assert not (await agent.beat()).savings, "it is unknown"
    await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
    await agent.iterate(6)
    saving = (await client.job()).figures.saving
    (received,) = (await agent.beat()).savings
    names = ("energy_percent", "slowdown_percent", "energy_margin_percent", "slowdown_margin_percent")
    figures = {name: getattr(saving, name) for name in names}
    assert received == agent_service_pb2.JobSaving(job_id="job", **figures)
    other = FakeAgent(client, "other", [])
    await other.join()
    assert not (await other.beat()).savings


async def test_a_report_comes_in_pages_with_savings(client: Client) -> None:
    agent = await planned(client)
    await agent.iterate(2)
    pages = await all_pages(client, "GetReport", "periods", job_id="job", page_size=2)
    assert {len(page) for page in pages[:-1]} == {2}
    periods = [period for page in pages for period in page]
    assert periods == list((await client.ask("GetReport", job_id="job", run_number=1)).periods)
    assert [period.number for period in periods] == list(range(len(periods)))

    stock, plan = periods[0], periods[-1]
    assert (stock.state, plan.state) == (job_pb2.JOB_STATE_BASELINE, job_pb2.JOB_STATE_PLANNED)
    assert (list(stock.plan_versions), len(plan.plan_versions)) == ([0], 1)
    assert plan.last_iteration == plan.first_iteration + plan.iteration_count - 1
    registered_ns = (await client.job()).create_time.ToNanoseconds()
    times_ns = [moment.ToNanoseconds() for each in periods for moment in (each.start_time, each.end_time)]
    assert [registered_ns, *times_ns] == sorted([registered_ns, *times_ns])
    assert not stock.HasField("saving")
    assert (await client.job()).baseline.energy_j == pytest.approx(stock.energy_j)
    assert plan.saving.energy_percent == pytest.approx(0.0), "the emulated iterations are all alike"
