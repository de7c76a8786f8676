"""Runs of jobs over gRPC: the outcome of registrations, who may join, and the remains of ended runs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import Entry
from perseus.v1 import agent_service_pb2, event_pb2, job_pb2, job_service_pb2, rank_pb2
from tests.service.grpc_fakes import (
    ALL_PLACES,
    TIMEOUT_S,
    Client,
    FakeAgent,
    connected,
    make_settings,
    refusal,
    spec_message,
    until,
)

OTHER = {"max_slowdown_percent": 5.0}
"""Makes another specification."""

Restart = Callable[[], Awaitable[Client]]


class Service:
    """A coordinator that can be restarted on its stored state."""

    def __init__(self, directory: Path) -> None:
        self._settings = make_settings(directory)
        self._stack = AsyncExitStack()
        self.client: Client

    async def start(self) -> Client:
        await self._stack.aclose()
        self.client = await self._stack.enter_async_context(connected(self._settings))
        return self.client

    async def stop(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    service = Service(tmp_path)
    await service.start()
    yield service
    await service.stop()


async def planned(client: Client, spec_fingerprint: str = "") -> FakeAgent:
    """Return an agent with all ranks of the job, which runs under plans."""
    agent = FakeAgent(client, "agent", ALL_PLACES, spec_fingerprint=spec_fingerprint)
    await agent.join()
    await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
    await agent.iterate(4)
    return agent


async def leave(agent: FakeAgent) -> None:
    """End all trainers, as in a crash; the agent stays."""
    for rank in agent.ranks.values():
        left = agent_service_pb2.RankLeft(
            job_id=agent.job_id,
            rank=agent.place(rank.place),
            reason=rank_pb2.RANK_LEFT_REASON_TRAINER_GONE,
        )
        await agent.send(rank_left=left)


async def all_lost(client: Client) -> None:
    async def are_lost() -> bool:
        return {rank.state for rank in await client.ranks()} == {rank_pb2.RANK_STATE_LOST}

    await until(are_lost)


async def reasons(client: Client, run_number: int) -> list[str]:
    """Return the reasons of the state changes of a run that has ended."""
    events = await client.events(run_number=run_number)
    changes = [event for event in events if event.type == event_pb2.JOB_EVENT_TYPE_STATE_CHANGED]
    return [change.message.partition(": ")[2] for change in changes]


# ---------------------------------------------------------------------- the same specification


async def test_a_crash_leads_back_to_the_same_run_with_its_plan_profile_and_versions(
    service: Service,
) -> None:
    client = service.client
    await client.register("first", "work")
    agent = await planned(client, "work")
    before = await client.job()
    highest = max(offer.version for offer in agent.offers)
    await leave(agent)
    await all_lost(client)
    agent.offers.clear()
    for rank in agent.ranks.values():
        rank.start_trainer()
        rank.after_sequence = agent.sequence
    assert (await client.register("second", "work")).run_number == 1
    for rank in agent.ranks.values():
        await agent.send(rank_joined=agent.joined(rank))
    await until(lambda: is_in(client, job_pb2.JOB_STATE_PLANNED))
    after = await client.job()
    assert (after.run_number, after.epoch) == (1, before.epoch)
    assert after.t_min_s == before.t_min_s
    assert after.profiled_clock_count == before.profiled_clock_count
    await agent.iterate(6)
    assert {offer.WhichOneof("clocks") for offer in agent.offers} <= {"stock", "stage_plan"}, "no profiling"
    assert min(offer.version for offer in agent.offers) >= highest
    await agent.end()


async def is_in(client: Client, state: int) -> bool:
    return (await client.job()).state == state


async def test_a_registration_is_answered_only_when_it_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, writing = asyncio.Event(), asyncio.Event()
    write = SqlStore.write

    async def held_write(self: SqlStore, entries: list[Entry]) -> None:
        writing.set()
        await gate.wait()
        await write(self, entries)

    monkeypatch.setattr(SqlStore, "write", held_write)
    async with connected(make_settings(tmp_path)) as client:
        first = asyncio.create_task(client.register("first"))
        await asyncio.wait_for(writing.wait(), TIMEOUT_S)
        others = [asyncio.create_task(client.register(request)) for request in ("first", "second")]
        # Answers to later calls on the same connection show that these had their chance.
        for _ in range(3):
            await client.job()
        assert not any(task.done() for task in (first, *others))
        gate.set()
        assert {(await task).run_number for task in (first, *others)} == {1}


# ---------------------------------------------------------------------- another specification


async def test_another_specification_is_refused_while_ranks_are_live_and_its_ranks_stay_at_stock(
    service: Service,
) -> None:
    client = service.client
    await client.register("first", "work")
    agent = await planned(client, "work")
    # Two ranks of the old training are free: ranks of the other one would get its plans there.
    for place in ALL_PLACES[:2]:
        left = agent_service_pb2.RankLeft(
            job_id="job", rank=agent.place(place), reason=rank_pb2.RANK_LEFT_REASON_TRAINER_GONE
        )
        await agent.send(rank_left=left)
    other = FakeAgent(client, "other", ALL_PLACES, spec_fingerprint="other work")
    await other.join()
    code, reason, metadata = await refusal(client.register("second", "other work", **OTHER))
    assert (code, reason) == (grpc.StatusCode.ALREADY_EXISTS, "JOB_ALREADY_EXISTS")
    assert metadata == {"job_id": "job", "field": "policy"}
    for rank in other.ranks.values():  # as agents do, every second
        await other.send(rank_joined=other.joined(rank))
    await other.until(lambda: len(other.refused) == 2 * len(ALL_PLACES))
    assert {refused.reason for refused in other.refused} == {"SPEC_MISMATCH"}
    assert not other.offers
    assert not other.accepted
    job = await client.job()
    assert (job.run_number, job.spec.policy.max_slowdown_percent) == (1, 0.0)
    assert {rank.state for rank in (await client.ranks())[:2]} == {rank_pb2.RANK_STATE_LOST}
    # The old training is served as before.
    await agent.send(rank_joined=agent.joined(agent.ranks[ALL_PLACES[0]]))
    await agent.until(lambda: len(agent.accepted) == len(ALL_PLACES) + 1)
    await other.end()
    await agent.end()


async def test_a_disconnected_rank_is_live_until_its_lease_has_run_out(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path, lease_s=1.0)) as client:
        await client.register("first", "work")
        agent = FakeAgent(client, "agent", ALL_PLACES, spec_fingerprint="work")
        await agent.join()
        await agent.end()
        code, _, _ = await refusal(client.register("second", "other work", **OTHER))
        assert code is grpc.StatusCode.ALREADY_EXISTS

        async def is_taken() -> bool:
            try:
                return (await client.register("second", "other work", **OTHER)).run_number == 2
            except grpc.aio.AioRpcError:
                return False

        await until(is_taken)


async def test_another_specification_with_no_live_rank_begins_a_new_run_and_the_old_one_stays_readable(
    service: Service,
) -> None:
    client = service.client
    await client.register("first", "work")
    agent = await planned(client, "work")
    report = (await client.jobs.GetReport(job_service_pb2.GetReportRequest(job_id="job"))).periods
    highest = max(offer.version for offer in agent.offers)
    await leave(agent)
    await all_lost(client)

    second = await client.register("second", "other work", **OTHER)
    assert (second.run_number, second.state) == (2, job_pb2.JOB_STATE_WAITING)
    assert second.spec.policy.max_slowdown_percent == 5
    assert second.rank_counts.expected_count == len(ALL_PLACES)

    for is_restarted in (False, True):
        if is_restarted:
            await agent.end()
            client = await service.start()
        first = await client.job(run_number=1)
        assert (first.run_number, first.state) == (1, job_pb2.JOB_STATE_FINISHED)
        assert first.spec.policy.max_slowdown_percent == 0
        assert first.profiled_clock_count > 1
        request = job_service_pb2.GetReportRequest(job_id="job", run_number=1)
        assert (await client.jobs.GetReport(request, timeout=TIMEOUT_S)).periods == report
        ended = "abandoned: another specification was registered: its policy differs"
        assert (await reasons(client, 1))[-1] == ended
        assert first.state_reason == ended
        events = await client.events(run_number=1)
        request_events = job_service_pb2.ListJobEventsRequest(job_id="job", run_number=1, page_size=1000)
        listed = (await client.jobs.ListJobEvents(request_events, timeout=TIMEOUT_S)).events
        assert list(listed) == events
        assert (await client.job()).run_number == 2
        assert (await client.jobs.GetReport(job_service_pb2.GetReportRequest(job_id="job"))).periods == []
        # A late retry of the first training's request changes nothing.
        assert (await client.register("first", "work")).run_number == 1
        assert (await client.job()) == (await client.job(run_number=2))

    # Ranks of the old training may not join; those of the new one are offered newer versions only.
    old = FakeAgent(client, "old", ALL_PLACES, spec_fingerprint="work")
    await old.join()
    assert {refused.reason for refused in old.refused} == {"SPEC_MISMATCH"}
    await old.end()
    new = FakeAgent(client, "new", ALL_PLACES, spec_fingerprint="other work")
    await new.join()
    await new.iterate_until(client, job_pb2.JOB_STATE_PROFILING)
    await new.iterate(4)
    assert new.offers
    assert min(offer.version for offer in new.offers) > highest
    await new.end()


async def test_a_served_rank_that_now_computes_something_else_is_lost(service: Service) -> None:
    client = service.client
    await client.register("first", "work")
    agent = FakeAgent(client, "agent", ALL_PLACES, spec_fingerprint="work")
    await agent.join()
    agent.spec_fingerprint = "other work"
    for rank in agent.ranks.values():
        await agent.send(rank_joined=agent.joined(rank))
    await agent.until(lambda: len(agent.refused) == len(ALL_PLACES))
    await all_lost(client)
    assert (await client.register("second", "other work", **OTHER)).run_number == 2
    await agent.end()


# ---------------------------------------------------------------------- after the end


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_after_the_end_a_new_request_begins_a_new_run_and_an_old_one_does_not(
    service: Service, is_restarted: bool
) -> None:
    client = service.client
    assert (await client.register("first", "work")).run_number == 1
    assert (await client.register("joined", "work")).run_number == 1
    await client.finish()
    if is_restarted:
        client = await service.start()
    for request_id in ("first", "joined"):
        job = await client.register(request_id, "work")
        assert (job.run_number, job.state) == (1, job_pb2.JOB_STATE_FINISHED)
    assert (await client.register("second", "work")).run_number == 2
    if is_restarted:
        client = await service.start()
    assert (await client.register("first", "work")).run_number == 1
    assert (await client.register("second", "work")).run_number == 2
    agent = FakeAgent(client, "agent", ALL_PLACES, spec_fingerprint="work")
    await agent.join()
    assert len(agent.accepted) == len(ALL_PLACES)
    assert (await client.job()).state == job_pb2.JOB_STATE_BASELINE
    await agent.end()


async def test_runs_are_listed_in_pages_the_latest_first(service: Service) -> None:
    client = service.client
    for number in range(1, 6):
        assert (await client.register()).run_number == number
        await client.finish()

    async def page(token: str) -> job_service_pb2.ListRunsResponse:
        request = job_service_pb2.ListRunsRequest(job_id="job", page_size=2, page_token=token)
        return await client.jobs.ListRuns(request, timeout=TIMEOUT_S)

    found: list[int] = []
    token = ""
    while not found or token:
        answer = await page(token)
        assert len(answer.runs) <= 2
        found += [run.run_number for run in answer.runs]
        token = answer.next_page_token
    assert found == [5, 4, 3, 2, 1]
    for bad in ("?", "eA=="):
        code, reason, metadata = await refusal(page(bad))
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert metadata["field"] == "page_token"


async def test_an_unknown_run_is_not_found(service: Service) -> None:
    client, pb = service.client, job_service_pb2
    await client.register()
    calls: list[Awaitable[object]] = [
        client.job(run_number=2),
        client.job(run_number=-1),
        client.jobs.GetReport(pb.GetReportRequest(job_id="job", run_number=2), timeout=TIMEOUT_S),
        client.events(run_number=2),
        client.jobs.ListJobEvents(pb.ListJobEventsRequest(job_id="job", run_number=2), timeout=TIMEOUT_S),
    ]
    for call in calls:
        code, reason, metadata = await refusal(call)
        assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "RUN_NOT_FOUND")
        assert metadata["run_number"] in ("2", "-1")
    code, reason, _ = await refusal(client.jobs.ListRuns(pb.ListRunsRequest(job_id="no"), timeout=TIMEOUT_S))
    assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "JOB_NOT_FOUND")


# ---------------------------------------------------------------------- requests


@pytest.mark.parametrize("request_id", ["", "x" * 65, "tab\t", "naïve"])
async def test_invalid_request_identifiers_are_refused(service: Service, request_id: str) -> None:
    client = service.client
    await client.register()
    baseline = job_service_pb2.MeasureBaselineRequest(job_id="job", request_id=request_id)
    for call in (
        client.register(request_id, job_id="new"),
        client.jobs.MeasureBaseline(baseline, timeout=TIMEOUT_S),
    ):
        code, reason, metadata = await refusal(call)
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert metadata["field"] == "request_id"
    code, _, _ = await refusal(client.job("new"))
    assert code is grpc.StatusCode.NOT_FOUND


async def test_a_retried_baseline_request_is_measured_once_even_after_a_restart(service: Service) -> None:
    client = service.client
    await client.register()
    agent = await planned(client)
    request = job_service_pb2.MeasureBaselineRequest(job_id="job", request_id="again")

    async def ask() -> int:
        return (await client.jobs.MeasureBaseline(request, timeout=TIMEOUT_S)).job.state

    assert await ask() == job_pb2.JOB_STATE_BASELINE
    await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
    assert await ask() == job_pb2.JOB_STATE_PLANNED
    await agent.end()
    client = await service.start()
    assert await ask() == job_pb2.JOB_STATE_PLANNED


# ---------------------------------------------------------------------- delete, resume


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_finished_job_is_deleted_completely(service: Service, is_restarted: bool) -> None:
    client, jobs = service.client, service.client.jobs
    await client.register("first", "work")
    agent = await planned(client, "work")
    highest = max(offer.version for offer in agent.offers)
    request = job_service_pb2.DeleteJobRequest(job_id="job")
    code, reason, metadata = await refusal(jobs.DeleteJob(request, timeout=TIMEOUT_S))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "JOB_NOT_FINISHED")
    assert metadata == {"job_id": "job", "state": "planned"}
    await client.finish()
    await client.register("second", "work")
    code, _, _ = await refusal(jobs.DeleteJob(request, timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.FAILED_PRECONDITION, "a new run has begun"
    await client.finish()
    await jobs.DeleteJob(request, timeout=TIMEOUT_S)
    code, _, _ = await refusal(jobs.DeleteJob(request, timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.NOT_FOUND
    request.allow_missing = True
    await jobs.DeleteJob(request, timeout=TIMEOUT_S)
    await agent.end()

    if is_restarted:
        client = await service.start()
    for number in (0, 1, 2):
        code, _, _ = await refusal(client.job(run_number=number))
        assert code is grpc.StatusCode.NOT_FOUND
    # A job of the same name is another job, but agents may remember versions of the one before.
    assert (await client.register("first", "work")).run_number == 1
    assert (await client.register("second", "work")).run_number == 1
    agent = FakeAgent(client, "new", ALL_PLACES, spec_fingerprint="work")
    await agent.join()
    await agent.iterate_until(client, job_pb2.JOB_STATE_PROFILING)
    await agent.iterate(4)
    assert min(offer.version for offer in agent.offers) > highest
    await client.finish()
    assert (await client.events())[0].sequence == 1
    assert not any("measured agrees" in event.message for event in await client.events())
    await agent.end()


async def test_a_job_at_stock_resumes_at_the_baseline(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path, baseline_iterations=1, profile_iterations=1)) as client:
        await client.register()
        agent = FakeAgent(client, "agent", ALL_PLACES)
        await agent.join()
        request = job_service_pb2.ResumeJobRequest(job_id="job")
        job = (await client.jobs.ResumeJob(request, timeout=TIMEOUT_S)).job
        assert job.state == job_pb2.JOB_STATE_BASELINE, "it was there already"
        for rank in agent.ranks.values():
            rank.reports_energy = False  # nothing is ever measured
        await agent.iterate_until(client, job_pb2.JOB_STATE_STOCK)
        for rank in agent.ranks.values():
            rank.reports_energy = True
        job = (await client.jobs.ResumeJob(request, timeout=TIMEOUT_S)).job
        assert job.state == job_pb2.JOB_STATE_BASELINE
        await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
        await client.finish()
        types = [event.type for event in await client.events()]
        assert types.count(event_pb2.JOB_EVENT_TYPE_RESUMED) == 1
        await agent.end()


# ---------------------------------------------------------------------- profiles


async def adopted(client: Client, job_id: str) -> list[event_pb2.ProfileAdopted]:
    """Return the event details of adopted profiles of a job that has ended."""
    events = await client.events(job_id)
    kind = event_pb2.JOB_EVENT_TYPE_PROFILE_ADOPTED
    return [event.profile_adopted for event in events if event.type == kind]


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_new_run_adopts_the_profile_of_the_one_before(service: Service, is_restarted: bool) -> None:
    client = service.client
    await client.register("first", "work")
    agent = await planned(client, "work")
    clock_count = (await client.job()).profiled_clock_count
    await client.finish()
    await agent.end()
    if is_restarted:
        client = await service.start()
    assert (await client.register("second", "work", **OTHER)).run_number == 2
    agent = FakeAgent(client, "next", ALL_PLACES, spec_fingerprint="work")
    await agent.join()
    await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
    await client.finish()
    (details,) = await adopted(client, "job")
    assert details == event_pb2.ProfileAdopted(
        stages=[0, 1], clock_count=clock_count, source_job_id="job", source_run_number=1
    )
    await agent.end()


async def known_profiles_read() -> None:
    """Wait for them: on a busy machine a whole profiling may be faster than their reading."""
    while any("_found_profile" in repr(task) for task in asyncio.all_tasks()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_new_run_of_the_same_work_is_planned_without_profiling(
    service: Service,
) -> None:
    client, work = service.client, ["12 layers", "11 layers"]
    await client.register("first", "work", stage_work=work)
    agent = await planned(client, "work")
    await client.finish()
    await agent.end()
    assert (await client.register("second", "more", stage_work=work, **OTHER)).run_number == 2
    agent = FakeAgent(client, "next", ALL_PLACES, spec_fingerprint="more")
    await agent.join()
    await known_profiles_read()
    await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
    await client.finish()
    types = {event.type for event in await client.events()}
    assert event_pb2.JOB_EVENT_TYPE_PROFILE_ADOPTED in types
    assert event_pb2.JOB_EVENT_TYPE_CLOCK_PROFILED not in types
    await agent.end()


async def test_a_stage_is_recognised_by_its_work_in_another_job(service: Service) -> None:
    client = service.client
    await client.register("first", job_id="before", stage_work=["12 layers", "11 layers"])
    agent = FakeAgent(client, "agent", ALL_PLACES, job_id="before")
    await agent.join()
    await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
    await client.finish("before")
    await agent.end()
    # The second stage computes something else; a job without fingerprints of its work matches neither.
    for job_id, stage_work, stages in (
        ("changed", ["12 layers", "10 layers"], [[0]]),
        ("unknown", [], []),
    ):
        await client.register(job_id=job_id, stage_work=stage_work)
        agent = FakeAgent(client, job_id, ALL_PLACES, job_id=job_id)
        await agent.join()
        await known_profiles_read()
        await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
        await client.finish(job_id)
        details = await adopted(client, job_id)
        assert [list(found.stages) for found in details] == stages
        assert all(found.source_job_id == "before" for found in details)
        await agent.end()


async def test_stage_work_is_one_short_text_for_each_stage(service: Service) -> None:
    for stage_work, field in (
        (["12 layers"], "stage_work"),
        (["12 layers", "x" * 129], "stage_work[1].fingerprint"),
        (["a\nb", ""], "spec.stage_work[0].fingerprint"),
    ):
        spec = spec_message("new", stage_work=stage_work)
        request = job_service_pb2.RegisterJobRequest(spec=spec, request_id="r")
        code, reason, metadata = await refusal(service.client.jobs.RegisterJob(request, timeout=TIMEOUT_S))
        assert (code, reason, metadata["field"]) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_FIELD",
            field,
        )
