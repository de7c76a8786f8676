"""A run that has ended gives up its state machine, and looks as before, after a restart, too."""

import gc
from pathlib import Path
from typing import Any

import grpc
import pytest

from perseus.service.domain.records import EndedRun
from perseus.service.job import views
from perseus.service.job.machine import JobMachine
from perseus.service.job.run import Run
from perseus.service.shell import live_runs
from perseus.v1 import job_pb2, rank_pb2
from tests.service.grpc_fakes import Client, FakeAgent, connected, joined, make_settings, refusal, until


async def train(client: Client, job_id: str) -> FakeAgent:
    """Register a job and run some iterations of it; return its agent, which stays connected."""
    agent = await joined(client, f"agent-{job_id}", job_id=job_id)
    await agent.iterate(6)
    return agent


async def leave(client: Client, agent: FakeAgent) -> None:
    """Let an agent say goodbye, and wait until its ranks are gone."""
    await agent.send(goodbye={})
    await client.all_lost(agent.job_id)
    await agent.end()


def machines(job_id: str) -> list[JobMachine]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, JobMachine) and each.spec.job_id == job_id]


async def have_gone() -> bool:
    return not machines("ended")


async def shown(client: Client, job_id: str) -> list[object]:
    """Return everything that clients see of a job's latest run."""
    return [
        await client.job(job_id),
        await client.ranks(job_id),
        await client.ask("GetReport", job_id=job_id),
        await client.events(job_id),
        await client.ask("GetTimeline", job_id=job_id),
    ]


@pytest.fixture
def viewed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs whose whole run was viewed, which takes long."""
    jobs: list[str] = []
    view = views.ended

    def counted(run: Run) -> EndedRun:
        jobs.append(run.spec.job_id)
        return view(run)

    monkeypatch.setattr(views, "ended", counted)
    return jobs


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("a state machine is made")


async def test_an_ended_run_looks_as_before_and_no_machine_is_made_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, viewed: list[str]
) -> None:
    settings = make_settings(tmp_path)
    async with connected(settings) as client:
        agent = await train(client, "ended")
        timeline = await client.ask("GetTimeline", job_id="ended")
        report = await client.ask("GetReport", job_id="ended")
        await client.finish("ended")
        assert len(machines("ended")) == 1, "ranks are served"
        await leave(client, agent)
        await until(have_gone)
        assert viewed == ["ended"], "once"
        found = await shown(client, "ended")
        assert [rank.state for rank in await client.ranks("ended")] == [rank_pb2.RANK_STATE_LOST] * 4
        assert (found[2], found[4]) == (report, timeline)
        assert await client.ranks("ended", pipeline=1, stage=0) == (await client.ranks("ended"))[2:3]
    monkeypatch.setattr(Run, "__init__", refuse)
    async with connected(settings) as client:
        assert await shown(client, "ended") == found
        code, reason, _ = await refusal(client.ask("GetTimeline", job_id="ended", pipeline=1))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TIMELINE_NOT_READY")


async def test_the_frontier_and_the_baselines_timeline_outlive_a_restart(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)

    async def baseline_and_frontier(client: Client) -> tuple[object, Any]:
        baseline = await client.ask("GetTimeline", job_id="job", from_baseline=True)
        return baseline, (await client.ask("GetFrontier", job_id="job")).frontier

    async with connected(settings) as client:
        agent = await joined(client)
        await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
        await client.finish()
        await leave(client, agent)
        before = await baseline_and_frontier(client)
        assert before[1].points
    async with connected(settings) as client:
        assert await baseline_and_frontier(client) == before
        plan = client.ask("GetPlan", job_id="job", iteration_time_s=before[1].t_slow_s)
        assert (await refusal(plan))[1] == "JOB_NOT_SOLVED"


async def test_runs_are_listed_without_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(make_settings(tmp_path)) as client:
        for number in range(4):
            agent = await joined(client, f"agent-{number}")
            await agent.iterate(4)
            await client.finish()
            if number % 2:
                await leave(client, agent)  # the others' ranks are still served when the next run begins
            else:
                await agent.end()
        await client.register()
        with monkeypatch.context() as patched:
            patched.setattr(Run, "__init__", refuse)
            page: dict[str, Any] = {"job_id": "job", "page_size": 3}
            first = await client.ask("ListRuns", **page)
            second = await client.ask("ListRuns", **page, page_token=first.next_page_token)
            assert (len(first.runs), second.next_page_token) == (3, "")
            runs = [*first.runs, *second.runs]
            assert [run.run_number for run in runs] == [5, 4, 3, 2, 1]
            waiting, finished = job_pb2.JOB_STATE_WAITING, job_pb2.JOB_STATE_FINISHED
            assert [run.state for run in runs] == [waiting, *[finished] * 4]
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
        assert (await client.ask("GetTimeline", job_id="second")).entries
        gone = client.ask("GetTimeline", job_id="first", pipeline=1)
        assert (await refusal(gone))[1] == "TIMELINE_NOT_READY"
