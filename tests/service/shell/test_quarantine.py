"""A fault of the coordinator in one job quarantines that job, and nothing else is disturbed.

Over real gRPC, for each part that may fail.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from perseus.cli.main import app
from perseus.service.api.agent_service import OutboxPort
from perseus.service.domain.commands import Command, Store
from perseus.service.domain.errors import CoordinatorError
from perseus.service.domain.inputs import TelemetryArrived
from perseus.service.domain.model import FaultyPart
from perseus.service.job import views
from perseus.service.job.lifecycle import Lifecycle
from perseus.service.job.machine import JobMachine
from perseus.service.job.run import Run
from perseus.service.settings import CoordinatorSettings
from perseus.service.solving.worker_pool import WorkerPool
from perseus.solver import Frontier, Pipeline
from perseus.v1 import event_pb2, job_pb2
from tests.service.grpc_fakes import (
    Client,
    FakeAgent,
    connected,
    connected_to,
    joined,
    make_settings,
    refusal,
    running_here,
    until,
)


class BrokenError(Exception):
    """A bug in the coordinator that affects one job."""


def break_at(
    owner: Any, name: str, job_id_of: Callable[..., str], *, is_half_way: bool = True
) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what lets a function fail for the job, half-way or before it does anything."""
    function = getattr(owner, name)

    @wraps(function)
    def failing(*arguments: Any, **options: Any) -> Any:
        is_broken = job_id_of(*arguments) == "job"
        answer = None if is_broken and not is_half_way else function(*arguments, **options)
        if is_broken:
            raise BrokenError("made for the test")
        return answer

    return lambda monkeypatch: monkeypatch.setattr(owner, name, failing)


break_machine = break_at(JobMachine, "_take_telemetry", lambda machine, *_: machine.spec.job_id)
break_joining = break_at(JobMachine, "handle", lambda machine, *_: machine.spec.job_id)
break_deadline = break_at(Run, "next_deadline_s", lambda run: run.spec.job_id)
break_view = break_at(views, "job", lambda run: run.spec.job_id)
break_action = break_at(OutboxPort, "accept_rank", lambda port, job_id, *_: job_id, is_half_way=False)
break_offer = break_at(OutboxPort, "offer", lambda port, job_id, *_: job_id, is_half_way=False)
break_gpu = break_at(views, "lease_on_gpu_s", lambda run, *_: run.spec.job_id)


def break_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the messages fail, too, that send a job's ranks to stock after its first fault."""
    break_action(monkeypatch)
    break_at(OutboxPort, "refuse_rank", lambda port, job_id, *_: job_id)(monkeypatch)


def break_record(monkeypatch: pytest.MonkeyPatch) -> None:
    handle_telemetry = JobMachine.handle_telemetry

    def failing(
        self: JobMachine, events: Iterable[TelemetryArrived], now_s: float, wall_time_s: float
    ) -> Iterator[list[Command] | CoordinatorError]:
        for answer in handle_telemetry(self, events, now_s, wall_time_s):
            assert not isinstance(answer, CoordinatorError)
            is_broken = self.spec.job_id == "job"
            yield [*answer, Store(replace(self.record, lag_s=math.nan))] if is_broken else answer

    monkeypatch.setattr(JobMachine, "handle_telemetry", failing)


def break_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = WorkerPool.solve

    async def failing(self: WorkerPool, problem: Pipeline, point_count: int, **options: Any) -> Frontier:
        if options["job_id"] == "job":
            raise BrokenError("no answer")
        return await solve(self, problem, point_count, **options)

    monkeypatch.setattr(WorkerPool, "solve", failing)


async def trigger(client: Client, agent: FakeAgent) -> None:
    """Do everything that may fail for the job; the failing calls are refused."""
    for _ in range(40):
        job, *_ = (await client.ask("ListJobs")).jobs
        if job.state == job_pb2.JOB_STATE_STOCK:
            return
        for rank in agent.ranks.values():
            rank.begin()
            await agent.send(telemetry=agent.telemetry(rank))
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("part", "breaking"),
    [
        (FaultyPart.MACHINE, break_machine),
        (FaultyPart.MACHINE, break_joining),
        (FaultyPart.MACHINE, break_deadline),
        (FaultyPart.VIEW, break_view),
        (FaultyPart.ACTION, break_action),
        (FaultyPart.ACTION, break_offer),
        (FaultyPart.ACTION, break_refusal),
        (FaultyPart.STORING, break_record),
        (FaultyPart.SOLVING, break_solver),
    ],
    ids=["telemetry", "join", "deadline", "view", "acceptance", "offer", "refusal", "record", "solver"],
)
async def test_a_fault_quarantines_its_job_until_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: FaultyPart, breaking: Any
) -> None:
    error = "UnstorableEntryError" if part is FaultyPart.STORING else "BrokenError"
    async with (
        running_here(make_settings(tmp_path)) as (address, background),
        connected_to(address) as client,
    ):
        await client.register()
        await client.register(job_id="other")
        quiet = FakeAgent(client, "quiet", job_id="other")
        quiet.gpu_suffix = "-other"
        await quiet.join()
        both = FakeAgent(client, "both")
        await both.hello()
        with monkeypatch.context() as patched, capture_logs() as logs:
            breaking(patched)
            await both.announce()
            if part is FaultyPart.SOLVING:
                await both.until(lambda: len(both.accepted) == 4)
                while (await client.job()).state != job_pb2.JOB_STATE_STOCK:
                    await both.iterate()
            else:
                await trigger(client, both)
            await both.until(lambda: {each.reason for each in both.refused} == {"JOB_QUARANTINED"})
            job = await client.job()
            assert job.state == job_pb2.JOB_STATE_STOCK
            assert part.value in job.state_reason
            assert error in job.state_reason
            lines = [line for line in logs if line["event"] == "job quarantined"]
            assert {(line["job_id"], line["part"]) for line in lines} == {("job", part.value)}
            assert type(lines[0]["exc_info"]).__name__ == error
            assert [each.job_id for each in (await client.ask("ListJobs")).jobs] == ["job", "other"]
            assert not both.reader.done(), "the agent's stream continues"
            await quiet.iterate(4)
            straggler = client.ask("ReportStraggler", job_id="job", pipeline=0, slowdown_factor=2)
            assert (await refusal(straggler))[1] == "JOB_QUARANTINED"
        assert not background.done()
        assert (quiet.refusals, len(quiet.accepted)) == ([], 4), "the other job's agent notices nothing"
        assert {rank.iteration for rank in await client.ranks("other")} == {3}

        # Once the cause is gone, it resumes from what is stored; the agents join again on their own.
        await asyncio.gather(*(client.ask("ResumeJob", job_id="job") for _ in range(3)))
        for rank in both.ranks.values():
            rank.start_trainer(rank.iteration)
        both.sequence = max(both.sequence, both.acknowledged)
        await both.join_ranks()
        assert len(both.accepted) == 4
        while (await client.job()).state == job_pb2.JOB_STATE_BASELINE:
            await both.iterate()
        assert (await client.job()).state in (job_pb2.JOB_STATE_PROFILING, job_pb2.JOB_STATE_SOLVING)
        await client.finish()
        (quarantined,) = [
            event.quarantined for event in await client.events() if event.HasField("quarantined")
        ]
        assert quarantined.part == event_pb2.FaultyPart.Value(f"FAULTY_PART_{part.name}")
        assert error in quarantined.error


async def test_a_fault_in_the_job_that_was_last_on_its_gpu_keeps_no_rank_from_joining(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await joined(client)
    break_gpu(monkeypatch)
    other = await joined(client, "other", job_id="other")
    assert (other.refused, len(other.accepted)) == ([], 4)
    assert FaultyPart.MACHINE.value in (await client.job()).state_reason


async def test_a_stored_run_that_cannot_be_restored_keeps_no_other_job_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(tmp_path)
    async with connected(settings) as client:
        await client.register()
        await client.register(job_id="other")
    restore = JobMachine.restore.__func__  # type: ignore[attr-defined]

    def failing(cls: Any, stored: Any, *rest: Any) -> Any:
        if stored.spec.job_id == "job":
            raise BrokenError("unreadable")
        return restore(cls, stored, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(JobMachine, "restore", classmethod(failing))
        async with connected(settings) as client:
            assert (await client.job("other")).state == job_pb2.JOB_STATE_WAITING
            job = await client.job()
            assert job.state == job_pb2.JOB_STATE_STOCK
            assert "BrokenError: unreadable" in job.state_reason
            with pytest.raises(grpc.aio.AioRpcError, match="is quarantined"):
                await client.ask("ResumeJob", job_id="job")
    async with connected(settings) as client:
        await client.ask("ResumeJob", job_id="job")
        assert (await client.job()).state == job_pb2.JOB_STATE_WAITING
        await client.finish()
        await client.ask("DeleteJob", job_id="job")

        async def is_alone() -> bool:
            return [job.job_id for job in (await client.ask("ListJobs")).jobs] == ["other"]

        await until(is_alone)


@pytest.mark.parametrize(
    ("part", "breaking"), [(FaultyPart.MACHINE, break_machine), (FaultyPart.VIEW, break_view)]
)
async def test_a_quarantined_run_is_replayed_offline_to_the_same_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: FaultyPart, breaking: Any
) -> None:
    settings = make_settings(tmp_path)
    async with connected(settings) as client:
        agent = await joined(client)
        await agent.iterate()
        with monkeypatch.context() as patched:
            breaking(patched)
            await trigger(client, agent)
        await until(lambda: is_stored_as_quarantined(client))
    with monkeypatch.context() as patched:
        breaking(patched)
        done = await asyncio.to_thread(replayed, settings)
        assert done.exit_code == 0, done.output
        assert f"the coordinator failed while {part.value} (BrokenError: " in done.stdout.splitlines()[0]
        assert "REGISTERED" in done.stdout
        assert "STATE_CHANGED" in done.stdout, "its events are shown"
        assert "Traceback" in done.stdout
        assert done.stdout.splitlines()[-1] == "the same fault occurred again"
    done = await asyncio.to_thread(replayed, settings)
    assert (done.exit_code, done.stderr) == (1, "error: the replay ended without a fault\n")


async def test_a_run_that_cannot_be_restored_is_replayed_to_the_same_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(tmp_path)
    async with connected(settings) as client:
        await client.register()
    with monkeypatch.context() as patched:
        patched.setattr(Lifecycle, "resume_restored", lambda *_: 1 / 0)
        async with connected(settings) as client:
            await until(lambda: is_stored_as_quarantined(client))
        done = await asyncio.to_thread(replayed, settings)
    assert done.exit_code == 0, done.output
    assert "the same fault occurred again" in done.stdout


async def test_an_unrecorded_run_is_not_replayed(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    async with connected(settings) as client:
        await client.register()
    for more in ([], ["--run", "2"]):
        done = await asyncio.to_thread(replayed, settings, *more)
        assert done.exit_code == 1
        assert "no fault is recorded" in done.stderr


async def is_stored_as_quarantined(client: Client) -> bool:
    listed = await client.ask("ListJobEvents", job_id="job")
    return any(event.HasField("quarantined") for event in listed.events)


def replayed(settings: CoordinatorSettings, *more: str) -> Result:
    return CliRunner().invoke(app, ["store", "replay", "job", "--database", str(settings.database), *more])
