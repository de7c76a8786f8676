"""A run that has ended gives up its state machine, and looks as before, after a restart, too."""

import gc
from pathlib import Path

import grpc
import pytest

from perseus.service.domain.records import EndedRun
from perseus.service.job import views
from perseus.service.job.machine import JobMachine
from perseus.service.job.run import Run
from perseus.service.shell import live_runs
from perseus.v1 import agent_service_pb2, frontier_service_pb2, job_pb2, rank_pb2
from perseus.v1 import job_service_pb2 as pb
from tests.service.grpc_fakes import (
    ALL_PLACES,
    TIMEOUT_S,
    Client,
    FakeAgent,
    connected,
    make_settings,
    refusal,
    until,
)


async def train(client: Client, job_id: str) -> FakeAgent:
    """Register a job and run some iterations of it; return its agent, which stays connected."""
    await client.register(job_id=job_id, request_id=f"request-{job_id}")
    agent = FakeAgent(client, f"agent-{job_id}", ALL_PLACES, job_id=job_id)
    await agent.join()
    await agent.iterate(6)
    return agent


async def leave(client: Client, agent: FakeAgent) -> None:
    """Let an agent say goodbye, and wait until its ranks are gone."""

    async def are_lost() -> bool:
        return (await client.job(agent.job_id)).rank_counts == job_pb2.RankCounts(lost_count=4)

    await agent.send(goodbye=agent_service_pb2.Goodbye())
    await until(are_lost)
    await agent.end()


def machines(job_id: str) -> list[JobMachine]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, JobMachine) and each.spec.job_id == job_id]


async def shown(client: Client, job_id: str) -> list[object]:
    """Return everything that clients see of a job's latest run."""
    report = pb.GetReportRequest(job_id=job_id)
    return [
        await client.job(job_id),
        await client.ranks(job_id),
        await client.jobs.GetReport(report, timeout=TIMEOUT_S),
        await client.events(job_id),
    ]


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("a state machine is made")


async def test_the_whole_of_a_run_is_viewed_once_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    viewed: list[str] = []
    view = views.ended

    def counted(run: Run) -> EndedRun:
        viewed.append(run.spec.job_id)
        return view(run)

    monkeypatch.setattr(views, "ended", counted)
    async with connected(make_settings(tmp_path)) as client:
        agent = await train(client, "ended")
        await client.finish("ended")
        await leave(client, agent)

        async def has_gone() -> bool:
            return not machines("ended")

        await until(has_gone)
    assert viewed == ["ended"]


async def test_an_ended_run_looks_as_before_and_no_machine_is_made_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(tmp_path)
    timeline = pb.GetTimelineRequest(job_id="ended")
    async with connected(settings) as client:
        agent = await train(client, "ended")
        before = await client.jobs.GetTimeline(timeline, timeout=TIMEOUT_S)
        report = await client.jobs.GetReport(pb.GetReportRequest(job_id="ended"), timeout=TIMEOUT_S)
        await client.finish("ended")
        assert len(machines("ended")) == 1, "ranks are served"
        await leave(client, agent)

        async def has_gone() -> bool:
            return not machines("ended")

        await until(has_gone)
        found = await shown(client, "ended")
        assert [rank.state for rank in await client.ranks("ended")] == [rank_pb2.RANK_STATE_LOST] * 4
        assert found[2] == report
        assert await client.jobs.GetTimeline(timeline, timeout=TIMEOUT_S) == before
        assert await client.ranks("ended", pipeline=1, stage=0) == (await client.ranks("ended"))[2:3]
    monkeypatch.setattr(Run, "__init__", refuse)
    async with connected(settings) as client:
        assert await shown(client, "ended") == found
        assert await client.jobs.GetTimeline(timeline, timeout=TIMEOUT_S) == before
        timeline.pipeline = 1
        code, reason, _ = await refusal(client.jobs.GetTimeline(timeline, timeout=TIMEOUT_S))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TIMELINE_NOT_READY")


async def test_the_frontier_and_the_baselines_timeline_outlive_a_restart(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    baseline = pb.GetTimelineRequest(job_id="job", from_baseline=True)
    of_job = frontier_service_pb2.GetFrontierRequest(job_id="job")
    async with connected(settings) as client:
        await client.register()
        agent = FakeAgent(client, "agent", ALL_PLACES)
        await agent.join()
        await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
        await client.finish()
        await leave(client, agent)
        before = await client.jobs.GetTimeline(baseline, timeout=TIMEOUT_S)
        frontier = await client.frontiers.GetFrontier(of_job, timeout=TIMEOUT_S)
        assert frontier.frontier.points
    async with connected(settings) as client:
        assert await client.jobs.GetTimeline(baseline, timeout=TIMEOUT_S) == before
        assert await client.frontiers.GetFrontier(of_job, timeout=TIMEOUT_S) == frontier
        plan = frontier_service_pb2.GetPlanRequest(job_id="job", iteration_time_s=frontier.frontier.t_slow_s)
        assert (await refusal(client.frontiers.GetPlan(plan, timeout=TIMEOUT_S)))[1] == "JOB_NOT_SOLVED"


async def test_runs_are_listed_without_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(make_settings(tmp_path)) as client:
        agents = []
        for number in range(4):
            await client.register(request_id=f"request-{number}")
            agents.append(FakeAgent(client, f"agent-{number}", ALL_PLACES))
            await agents[-1].join()
            await agents[-1].iterate(4)
            await client.finish()
            if number % 2:
                await leave(client, agents[-1])  # the others' ranks are still served when the next run begins
            else:
                await agents[-1].end()
        await client.register(request_id="the last")
        with monkeypatch.context() as patched:
            patched.setattr(Run, "__init__", refuse)
            request = pb.ListRunsRequest(job_id="job", page_size=3)
            first = await client.jobs.ListRuns(request, timeout=TIMEOUT_S)
            request.page_token = first.next_page_token
            second = await client.jobs.ListRuns(request, timeout=TIMEOUT_S)
            runs = [*first.runs, *second.runs]
            assert [run.run_number for run in runs] == [5, 4, 3, 2, 1]
            assert [run.state for run in runs] == [
                job_pb2.JOB_STATE_WAITING,
                *[job_pb2.JOB_STATE_FINISHED] * 4,
            ]
            assert [run.rank_counts.lost_count for run in runs] == [0, 4, 0, 4, 0]
            for run in runs:
                assert not run.HasField("spec")
                full = await client.job(run_number=run.run_number)
                assert (full.create_time, full.spec.job_id) == (run.create_time, "job")


async def test_unstored_details_are_kept_of_the_latest_ended_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_runs, "_KEPT_MEASURED", 1)
    async with connected(make_settings(tmp_path)) as client:
        for job_id in ("first", "second"):
            agent = await train(client, job_id)
            await leave(client, agent)
            await client.finish(job_id)
        later = pb.GetTimelineRequest(job_id="second")
        assert (await client.jobs.GetTimeline(later, timeout=TIMEOUT_S)).entries
        gone = client.jobs.GetTimeline(pb.GetTimelineRequest(job_id="first", pipeline=1), timeout=TIMEOUT_S)
        assert (await refusal(gone))[1] == "TIMELINE_NOT_READY"
