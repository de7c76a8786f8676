"""Runs of jobs over gRPC: a whole life, what registrations lead to, who may join, and what remains."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import grpc
import pytest

from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import Entry
from perseus.v1 import event_pb2, job_pb2, rank_pb2
from tests.service.grpc_fakes import (
    ALL_PLACES,
    TIMEOUT_S,
    Client,
    FakeAgent,
    connected,
    job_once,
    joined,
    make_settings,
    planned,
    refusal,
)

OTHER: dict[str, Any] = {"max_slowdown_percent": 5.0}
"""Makes another specification."""
FIRST: dict[str, Any] = {"request_id": "first", "spec_fingerprint": "work"}
SECOND: dict[str, Any] = {"request_id": "second", "spec_fingerprint": "other work", **OTHER}


Start = Callable[[], Awaitable[Client]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """What starts a coordinator, and starts it again on its stored state."""
    settings = make_settings(tmp_path)
    async with AsyncExitStack() as stack:

        async def start() -> Client:
            await stack.aclose()
            return await stack.enter_async_context(connected(settings))

        yield start


async def test_a_job_is_profiled_planned_replanned_and_finished(client: Client) -> None:
    agent = await planned(client)
    assert [len(accepted.order.computations) for accepted in agent.accepted] == [6] * 4

    job = await client.job()
    assert job.profiled_clock_count == 6
    assert job.planned_iteration_time_s == [job.t_min_s, job.t_min_s]
    assert job.t_min_s <= job.no_slowdown_time.iteration_time_s
    assert job.no_slowdown_time.basis != job_pb2.NO_SLOWDOWN_BASIS_UNSPECIFIED
    assert {rank.in_force_version for rank in await client.ranks()} == {agent.offers[-1].version}
    assert all(
        [planned.kind for planned in offer.stage_plan.computations]
        == [computation.kind for computation in accepted.order.computations]
        for offer, accepted in zip(agent.offers[-4:], agent.accepted, strict=True)
    )

    job = (await client.ask("ReportStraggler", job_id="job", pipeline=0, slowdown_factor=1.2)).job
    await agent.iterate(4)
    assert job.stragglers[0].iteration_time_s == 1.2 * job.t_min_s
    assert job.planned_iteration_time_s[0] == job.t_min_s
    assert job.t_min_s < job.planned_iteration_time_s[1] <= 1.2 * job.t_min_s
    versions = [rank.in_force_version for rank in await client.ranks()]
    # Where a better plan was made meanwhile, a stage that it leaves unchanged keeps its version.
    assert versions[0] == versions[1] < min(versions[2:])

    job = (await client.ask("ClearStraggler", job_id="job", pipeline=0)).job
    await agent.iterate(4)
    assert job.planned_iteration_time_s == [job.t_min_s, job.t_min_s]

    plan = (await client.ask("GetPlan", job_id="job", iteration_time_s=1.1 * job.t_min_s)).plan
    assert job.t_min_s <= plan.iteration_time_s <= 1.1 * job.t_min_s
    frontier = (await client.ask("GetFrontier", job_id="job")).frontier
    assert frontier.points[0].energy_j < frontier.baseline.energy_j
    again = (await client.ask("Solve", problem=frontier.problem, point_count=5)).frontier
    assert (again.t_min_s, len(again.points)) == (frontier.t_min_s, 5)

    timeline = await client.ask("GetTimeline", job_id="job", pipeline=1)
    assert timeline.iteration == agent.ranks[ALL_PLACES[0]].iteration
    assert len(timeline.entries) == 12
    assert all(entry.duration_s > 0 for entry in timeline.entries)

    await agent.leave(reason=rank_pb2.RANK_LEFT_REASON_FINISHED)
    await agent.send(goodbye={"reason": "done"})
    await asyncio.wait_for(agent.reader, TIMEOUT_S)
    assert (await client.job()).state == job_pb2.JOB_STATE_FINISHED

    measured = await client.ask("GetReport", job_id="job")
    assert measured.no_slowdown_time == job.no_slowdown_time
    assert measured.profiling_cost == job.profiling_cost
    assert job.profiling_budget.extra_time_s == 360.0
    assert job.profiling_cost.iteration_count > 0
    periods = measured.periods
    assert periods[0].state == job_pb2.JOB_STATE_BASELINE
    assert periods[-1].state == job_pb2.JOB_STATE_PLANNED
    under_plans = [period for period in periods if period.state == job_pb2.JOB_STATE_PLANNED]
    # The number of their periods depends on when better plans were found.
    stretches = [has_straggler for has_straggler, _ in groupby(p.has_straggler for p in under_plans)]
    assert stretches == [False, True, False]


# ---------------------------------------------------------------------- the same specification


async def test_a_crash_leads_back_to_the_same_run_with_its_plan_profile_and_versions(client: Client) -> None:
    agent = await planned(client, **FIRST)
    before = await client.job()
    highest = max(offer.version for offer in agent.offers)
    await agent.leave()
    await client.all_lost()
    agent.offers.clear()
    for rank in agent.ranks.values():
        rank.start_trainer()
        rank.after_sequence = agent.sequence
    assert (await client.register("second", "work")).run_number == 1
    await agent.announce()
    after = await job_once(client, lambda job: job.state == job_pb2.JOB_STATE_PLANNED)
    assert (after.run_number, after.epoch) == (1, before.epoch)
    assert after.t_min_s == before.t_min_s
    assert after.profiled_clock_count == before.profiled_clock_count
    await agent.iterate(6)
    assert {offer.WhichOneof("clocks") for offer in agent.offers} <= {"stock", "stage_plan"}, "no profiling"
    assert min(offer.version for offer in agent.offers) >= highest


async def test_a_registration_is_answered_only_when_it_is_durable(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, writing = asyncio.Event(), asyncio.Event()
    write = SqlStore.write

    async def held_write(self: SqlStore, entries: list[Entry]) -> None:
        writing.set()
        await gate.wait()
        await write(self, entries)

    monkeypatch.setattr(SqlStore, "write", held_write)
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
    client: Client,
) -> None:
    agent = await planned(client, **FIRST)
    # Two ranks of the old training are free: ranks of the other one would get its plans there.
    await agent.leave(ALL_PLACES[:2])
    other = FakeAgent(client, "other", spec_fingerprint="other work")
    await other.join()
    code, reason, metadata = await refusal(client.register(**SECOND))
    assert (code, reason) == (grpc.StatusCode.ALREADY_EXISTS, "JOB_ALREADY_EXISTS")
    assert metadata == {"job_id": "job", "field": "policy"}
    await other.announce()  # as agents do, every second
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
    # Its ranks are live until their leases have run out.
    await agent.end()
    assert (await refusal(client.register(**SECOND)))[1] == "JOB_ALREADY_EXISTS"


async def test_another_specification_with_no_live_rank_begins_a_new_run_and_the_old_one_stays_readable(
    start: Start,
) -> None:
    client = await start()
    agent = await planned(client, **FIRST)
    report = (await client.ask("GetReport", job_id="job")).periods
    highest = max(offer.version for offer in agent.offers)
    await agent.leave()
    await client.all_lost()

    second = await client.register(**SECOND)
    assert (second.run_number, second.state) == (2, job_pb2.JOB_STATE_WAITING)
    assert second.spec.policy.max_slowdown_percent == 5
    assert second.rank_counts.expected_count == len(ALL_PLACES)

    for is_restarted in (False, True):
        if is_restarted:
            client = await start()
        first = await client.job(run_number=1)
        assert (first.run_number, first.state) == (1, job_pb2.JOB_STATE_FINISHED)
        assert first.spec.policy.max_slowdown_percent == 0
        assert first.profiled_clock_count > 1
        assert (await client.ask("GetReport", job_id="job", run_number=1)).periods == report
        events = await client.events(run_number=1)
        ended = "abandoned: another specification was registered: its policy differs"
        changes = [event for event in events if event.type == event_pb2.JOB_EVENT_TYPE_STATE_CHANGED]
        assert changes[-1].message.partition(": ")[2] == ended
        assert first.state_reason == ended
        listed = await client.ask("ListJobEvents", job_id="job", run_number=1, page_size=1000)
        assert list(listed.events) == events
        assert (await client.job()).run_number == 2
        assert (await client.ask("GetReport", job_id="job")).periods == []
        # A late retry of the first training's request changes nothing.
        assert (await client.register(**FIRST)).run_number == 1
        assert (await client.job()) == (await client.job(run_number=2))

    # Ranks of the old training may not join; those of the new one are offered newer versions only.
    old = FakeAgent(client, "old", spec_fingerprint="work")
    await old.join()
    assert {refused.reason for refused in old.refused} == {"SPEC_MISMATCH"}
    await old.end()
    new = FakeAgent(client, "new", spec_fingerprint="other work")
    await new.join()
    await new.iterate_until(client, job_pb2.JOB_STATE_PROFILING)
    await new.iterate(4)
    assert new.offers
    assert min(offer.version for offer in new.offers) > highest


async def test_a_served_rank_that_now_computes_something_else_is_lost(client: Client) -> None:
    agent = await joined(client, **FIRST)
    agent.spec_fingerprint = "other work"
    await agent.announce()
    await agent.until(lambda: len(agent.refused) == len(ALL_PLACES))
    await client.all_lost()
    assert (await client.register(**SECOND)).run_number == 2


# ---------------------------------------------------------------------- after the end


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_after_the_end_a_new_request_begins_a_new_run_and_an_old_one_does_not(
    start: Start, is_restarted: bool
) -> None:
    client = await start()
    assert (await client.register("first", "work")).run_number == 1
    assert (await client.register("joined", "work")).run_number == 1
    await client.finish()
    if is_restarted:
        client = await start()
    for request_id in ("first", "joined"):
        job = await client.register(request_id, "work")
        assert (job.run_number, job.state) == (1, job_pb2.JOB_STATE_FINISHED)
    assert (await client.register("second", "work")).run_number == 2
    if is_restarted:
        client = await start()
    assert (await client.register("first", "work")).run_number == 1
    assert (await client.register("second", "work")).run_number == 2
    agent = FakeAgent(client, spec_fingerprint="work")
    await agent.join()
    assert len(agent.accepted) == len(ALL_PLACES)
    assert (await client.job()).state == job_pb2.JOB_STATE_BASELINE


async def test_a_retried_baseline_request_is_measured_once(client: Client) -> None:
    agent = await planned(client)
    for state in (job_pb2.JOB_STATE_BASELINE, job_pb2.JOB_STATE_PLANNED):
        answer = await client.ask("MeasureBaseline", job_id="job", request_id="again")
        assert answer.job.state == state
        await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)


# ---------------------------------------------------------------------- delete, resume


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_finished_job_is_deleted_completely(start: Start, is_restarted: bool) -> None:
    client = await start()
    agent = await planned(client, **FIRST)
    highest = max(offer.version for offer in agent.offers)
    code, reason, metadata = await refusal(client.ask("DeleteJob", job_id="job"))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "JOB_NOT_FINISHED")
    assert metadata == {"job_id": "job", "state": "planned"}
    await client.finish()
    await client.register("second", "work")
    code, _, _ = await refusal(client.ask("DeleteJob", job_id="job"))
    assert code is grpc.StatusCode.FAILED_PRECONDITION, "a new run has begun"
    await client.finish()
    await client.ask("DeleteJob", job_id="job")
    assert (await refusal(client.ask("DeleteJob", job_id="job")))[0] is grpc.StatusCode.NOT_FOUND
    await client.ask("DeleteJob", job_id="job", allow_missing=True)
    await agent.end()

    if is_restarted:
        client = await start()
    for number in (0, 1, 2):
        assert (await refusal(client.job(run_number=number)))[0] is grpc.StatusCode.NOT_FOUND
    # A job of the same name is another job, but agents may remember versions of the one before.
    assert (await client.register("first", "work")).run_number == 1
    assert (await client.register("second", "work")).run_number == 1
    agent = FakeAgent(client, "new", spec_fingerprint="work")
    await agent.join()
    await agent.iterate_until(client, job_pb2.JOB_STATE_PROFILING)
    await agent.iterate(4)
    assert min(offer.version for offer in agent.offers) > highest
    await client.finish()
    assert (await client.events())[0].sequence == 1
    assert not any("measured agrees" in event.message for event in await client.events())


# ---------------------------------------------------------------------- profiles


async def known_profiles_read() -> None:
    """Wait for them: on a busy machine a whole profiling may be faster than their reading."""
    while any("_found_profile" in repr(task) for task in asyncio.all_tasks()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_stage_is_recognised_by_its_work_in_another_run_or_job(start: Start) -> None:
    work = ["12 layers", "11 layers"]
    client = await start()
    agent = await planned(client, job_id="before", stage_work=work)
    clock_count = (await client.job("before")).profiled_clock_count
    await client.finish("before")
    await agent.end()
    client = await start()
    # The second stage computes something else; a job without fingerprints of its work matches neither.
    for job_id, stage_work, stages in (
        ("before", work, [[0, 1]]),
        ("changed", ["12 layers", "10 layers"], [[0]]),
        ("unknown", [], []),
    ):
        agent = await joined(client, job_id, job_id=job_id, stage_work=stage_work, **OTHER)
        await known_profiles_read()
        await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
        await client.finish(job_id)
        events = await client.events(job_id)
        details = [event.profile_adopted for event in events if event.HasField("profile_adopted")]
        assert [list(each.stages) for each in details] == stages
        if stage_work == work:
            assert details[0] == event_pb2.ProfileAdopted(
                stages=[0, 1], clock_count=clock_count, source_job_id="before", source_run_number=1
            )
        is_profiled = event_pb2.JOB_EVENT_TYPE_CLOCK_PROFILED in {event.type for event in events}
        assert is_profiled == (stage_work != work), "the same work is planned without profiling"
        await agent.end()
