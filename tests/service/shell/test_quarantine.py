"""A fault of the coordinator's own in one job puts that job aside, and nothing else is disturbed.

Once over real gRPC, by each part that may fail; and as a property: whatever fails at random of one job, the
agents and watchers of another see exactly what they see without it.
"""

import asyncio
import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from perseus.service.domain.commands import Command, SlowPlan, Store
from perseus.service.domain.errors import CoordinatorError
from perseus.service.domain.inputs import Input, OfferAnswered, PlanInForce, TelemetryArrived
from perseus.service.domain.model import FaultyPart, JobState, Offer
from perseus.service.domain.records import JobRecord
from perseus.service.domain.retention import Retention
from perseus.service.domain.specification import Coordinates, JobSpec, Registration
from perseus.service.job.machine import JobMachine
from perseus.service.job.profiling.profiler import ProfilingRules
from perseus.service.job.rules import Rules
from perseus.service.server import running
from perseus.service.shell.coordinator import Coordinator
from perseus.service.shell.jobs import LATEST
from perseus.service.solving.job_lane import JobLane
from perseus.service.solving.request_lane import RequestLane
from perseus.service.solving.work import solve_explaining
from perseus.service.storage.sql_store import SqlStore
from perseus.solver import Computation, Frontier, Pipeline
from perseus.v1 import event_pb2, job_pb2, job_service_pb2
from tests.service.grpc_fakes import (
    ALL_PLACES,
    TIMEOUT_S,
    Client,
    FakeAgent,
    connected,
    connected_to,
    make_settings,
    until,
)
from tests.service.service_fakes import FakeRank, make_spec

# --- over real gRPC -----------------------------------------------------------------------------------------


class BrokenError(Exception):
    """A mistake of ours, in one job."""


def break_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = JobMachine.handle

    def failing(self: JobMachine, event: Input, now_s: float, wall_time_s: float) -> list[Command]:
        commands = handle(self, event, now_s, wall_time_s)
        if self.spec.job_id == "job" and isinstance(event, TelemetryArrived):
            raise BrokenError("half-way")
        return commands

    monkeypatch.setattr(JobMachine, "handle", failing)


def break_record(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = JobMachine.handle

    def failing(self: JobMachine, event: Input, now_s: float, wall_time_s: float) -> list[Command]:
        commands = handle(self, event, now_s, wall_time_s)
        if self.spec.job_id == "job" and isinstance(event, TelemetryArrived):
            assert self._stored_figures is not None
            record = JobRecord(*self._stored_figures)  # type: ignore[arg-type]
            return [*commands, Store(replace(record, lag_s=math.nan))]
        return commands

    monkeypatch.setattr(JobMachine, "handle", failing)


def break_view(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = JobMachine.summary

    def failing(self: JobMachine) -> Any:
        if self.spec.job_id == "job":
            raise BrokenError("not to be shown")
        return summary(self)

    monkeypatch.setattr(JobMachine, "summary", failing)


async def test_a_job_that_can_not_be_put_on_the_wire_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(make_settings(tmp_path)) as client:
        await client.register()
        await client.register(job_id="other")
        summary = JobMachine.summary

        def too_much(self: JobMachine) -> Any:
            view = summary(self)
            return replace(view, run_number=2**70) if self.spec.job_id == "job" else view

        monkeypatch.setattr(JobMachine, "summary", too_much)
        listed = await client.jobs.ListJobs(job_service_pb2.ListJobsRequest(), timeout=TIMEOUT_S)
        assert [each.job_id for each in listed.jobs] == ["job", "other"]
        assert FaultyPart.VIEW.value in listed.jobs[0].state_reason


def break_action(monkeypatch: pytest.MonkeyPatch) -> None:
    order = JobMachine.order

    def failing(self: JobMachine, stage: int) -> Sequence[Computation]:
        if self.spec.job_id == "job":
            raise BrokenError("nothing to send")
        return order(self, stage)

    monkeypatch.setattr(JobMachine, "order", failing)


def break_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = JobLane.solve

    async def failing(self: JobLane, job_id: str, problem: Pipeline, *args: Any) -> Frontier:
        if len(problem.schedule.orders[0]) == 2 * 3:
            raise BrokenError("no answer")
        return await solve(self, job_id, problem, *args)

    monkeypatch.setattr(JobLane, "solve", failing)


async def trigger(client: Client, agent: FakeAgent) -> None:
    """Let all that may fail of the job happen; what does is refused."""
    for _ in range(40):
        if (await client.job()).state == job_pb2.JOB_STATE_STOCK:
            return
        for rank in agent.ranks.values():
            rank.begin()
            await agent.say(telemetry=agent.telemetry(rank))
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("part", "breaking"),
    [
        (FaultyPart.MACHINE, break_machine),
        (FaultyPart.VIEW, break_view),
        (FaultyPart.ACTION, break_action),
        (FaultyPart.STORING, break_record),
        (FaultyPart.SOLVING, break_solver),
    ],
)
async def test_a_fault_puts_its_job_aside_until_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: FaultyPart, breaking: Any
) -> None:
    error = "UnstorableEntryError" if part is FaultyPart.STORING else "BrokenError"
    async with running(make_settings(tmp_path)) as (address, background), connected_to(address) as client:
        await client.register()
        await client.register(job_id="other", microbatches=4)
        both = FakeAgent(client, "both", ALL_PLACES)
        await both.hello()
        other = FakeAgent(client, "other", ALL_PLACES, job_id="other")
        with monkeypatch.context() as patched, capture_logs() as logs:
            breaking(patched)
            for rank in both.ranks.values():
                await both.say(rank_joined=both.joined(rank))
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
            listed = await client.jobs.ListJobs(job_service_pb2.ListJobsRequest(), timeout=TIMEOUT_S)
            assert [each.job_id for each in listed.jobs] == ["job", "other"]
            assert not both.reader.done(), "the agent's stream goes on"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.jobs.ReportStraggler(
                    job_service_pb2.ReportStragglerRequest(job_id="job", pipeline=0, slowdown_factor=2),
                    timeout=TIMEOUT_S,
                )
            status, info = rpc_status.from_call(caught.value), ErrorInfo()
            assert status is not None
            assert status.details[0].Unpack(info)
            assert info.reason == "JOB_QUARANTINED"
        assert not background.done()

        # Once its cause is gone, it goes on from what is stored; the agents ask again on their own.
        resume = job_service_pb2.ResumeJobRequest(job_id="job")
        await asyncio.gather(*(client.jobs.ResumeJob(resume, timeout=TIMEOUT_S) for _ in range(3)))
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
        await both.end()
        await other.end()


async def test_what_is_stored_and_cannot_be_gone_on_with_keeps_no_other_job_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(tmp_path)
    async with running(settings) as (address, _), connected_to(address) as client:
        await client.register()
        await client.register(job_id="other")
    restore = JobMachine.restore.__func__  # type: ignore[attr-defined]

    def failing(cls: Any, stored: Any, *rest: Any) -> Any:
        if stored.spec.job_id == "job":
            raise BrokenError("unreadable")
        return restore(cls, stored, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(JobMachine, "restore", classmethod(failing))
        async with running(settings) as (address, _), connected_to(address) as client:
            assert (await client.job("other")).state == job_pb2.JOB_STATE_WAITING
            job = await client.job()
            assert job.state == job_pb2.JOB_STATE_STOCK
            assert "BrokenError: unreadable" in job.state_reason
            with pytest.raises(grpc.aio.AioRpcError, match="is quarantined"):
                await client.jobs.ResumeJob(job_service_pb2.ResumeJobRequest(job_id="job"), timeout=TIMEOUT_S)
    async with running(settings) as (address, _), connected_to(address) as client:
        await client.jobs.ResumeJob(job_service_pb2.ResumeJobRequest(job_id="job"), timeout=TIMEOUT_S)
        assert (await client.job()).state == job_pb2.JOB_STATE_WAITING
        await client.finish()
        await client.jobs.DeleteJob(job_service_pb2.DeleteJobRequest(job_id="job"), timeout=TIMEOUT_S)
        await until(lambda: _is_alone(client))


async def _is_alone(client: Client) -> bool:
    listed = await client.jobs.ListJobs(job_service_pb2.ListJobsRequest(), timeout=TIMEOUT_S)
    return [job.job_id for job in listed.jobs] == ["other"]


# --- whatever fails, and whenever ---------------------------------------------------------------------------

RULES = Rules(30.0, 2, ProfilingRules(iterations=1))
QUIET, FAULTY = "quiet", "faulty"
ITERATIONS = 24


class InlineSolver(JobLane):
    def __init__(self) -> None:
        pass

    async def solve(
        self,
        job_id: str,
        problem: Pipeline,
        slow: SlowPlan | None,
        on_retry: object,
        set_latency_s: float = 0.0,
    ) -> Frontier:
        return solve_explaining(problem, 5, slow, set_latency_s)


class UnusedRequestLane(RequestLane):
    def __init__(self) -> None:
        pass


class Dice:
    """What fails of the faulty job, one throw each time that anything may."""

    def __init__(self, seed: int, share: float) -> None:
        self.random = random.Random(seed)
        self.share = share
        self.faults = 0

    def throw(self, job_id: str) -> None:
        if job_id == FAULTY and self.random.random() < self.share:
            self.faults += 1
            raise BrokenError(f"fault {self.faults}")


class Port:
    """An agent's end, as the coordinator sees it: follows offers, and writes down all that it is told."""

    epoch = ""

    def __init__(self, dice: Dice) -> None:
        self.told: list[object] = []
        self.offers: list[tuple[Coordinates, Offer]] = []
        self._dice = dice

    def accept_rank(self, job_id: str, rank: Coordinates, order: Sequence[Computation]) -> None:
        self._dice.throw(job_id)
        self.told.append(("accepted", rank, len(order)))

    def refuse_rank(self, job_id: str, rank: Coordinates, error: CoordinatorError) -> None:
        self._dice.throw(job_id)
        self.told.append(("refused", rank, type(error)))

    def offer(self, job_id: str, rank: Coordinates, offer: Offer) -> None:
        self._dice.throw(job_id)
        self.told.append(("offer", rank, offer))
        self.offers.append((rank, offer))

    def acknowledge(self, sequence: int) -> None:
        self.told.append(("acknowledged", sequence))

    def drain(self) -> None:
        self.told.append("drain")

    def end(self, error: CoordinatorError) -> None:
        self.told.append(("end", type(error)))


class World:
    """One job, its ranks and their agent."""

    def __init__(self, coordinator: Coordinator, spec: JobSpec, dice: Dice) -> None:
        self.coordinator, self.spec, self.port = coordinator, spec, Port(dice)
        self.agents = coordinator.agents
        orders = spec.check().orders
        self.ranks = {
            place: FakeRank(place, spec.job_id, orders[place.stage])
            for place in spec.parallelism.all_coordinates()
        }
        self.sequence = 0
        self.events: list[object] = []

    async def begin(self) -> None:
        await self.coordinator.jobs.register(self.spec, Registration(self.spec.job_id))
        await self.agents.greet(self.spec.job_id, self.port)
        self.join()

    def join(self) -> None:
        for rank in self.ranks.values():
            with suppress(CoordinatorError):
                joined = rank.joined()
                gpu = replace(joined.gpu, uuid=f"{self.spec.job_id}-{rank.place}")
                self.agents.join(self.spec.job_id, replace(joined, gpu=gpu))

    async def iterate(self) -> None:
        offers, self.port.offers = self.port.offers, []
        for place, offer in offers:
            self.tell(self.ranks[place].answer(offer))
        batches = []
        for rank in self.ranks.values():
            if (in_force := rank.begin()) is not None:
                self.tell(in_force)
            self.sequence += 1
            rank.sequence = self.sequence - 1
            batches.append(rank.end(0.8))
        await asyncio.gather(*map(self.send, batches))

    def tell(self, event: OfferAnswered | PlanInForce) -> None:
        with suppress(CoordinatorError):
            self.agents.tell(self.spec.job_id, event)

    async def send(self, event: TelemetryArrived) -> None:
        try:
            self.agents.take_telemetry(self.spec.job_id, event)
        except CoordinatorError:
            self.agents.pass_telemetry(self.spec.job_id, event.batch.sequence)

    async def seen(self) -> list[object]:
        """All that agents and watchers have seen of the job; times on the wall clock aside."""
        view = await self.coordinator.jobs.job(self.spec.job_id, LATEST, has_details=True)
        found = await self.coordinator.live._store.events(self.spec.job_id, view.run_number, 0, 10_000)
        happenings = [event.happening for event in found]
        return [self.port.told, happenings, view.state, view.rank_counts, view.details]


async def live(path: Path, dice: Dice, *, with_faulty: bool) -> tuple[list[object], JobState]:
    """Let both jobs live for a while, and return what was seen of the quiet one."""
    store = await SqlStore.open(path)
    coordinator = Coordinator(store, InlineSolver(), UnusedRequestLane(), RULES, Retention())
    await coordinator.start()
    writing = asyncio.create_task(coordinator.run())
    try:
        quiet = World(coordinator, make_spec(QUIET, microbatches=2), dice)
        for rank in quiet.ranks.values():
            rank.instance_id = QUIET
        worlds = [quiet]
        if with_faulty:
            worlds.insert(0, World(coordinator, make_spec(FAULTY, pipelines=1, stages=3), dice))
        for world in worlds:
            await world.begin()
        for iteration in range(ITERATIONS):
            for world in worlds:
                await world.iterate()
            for _ in range(3):
                await coordinator.flush()
            if with_faulty and iteration % 6 == 5:
                listed = coordinator.jobs.jobs("", (), lambda view: view.job_id, has_details=True)
                assert list(listed) == [(FAULTY, FAULTY), (QUIET, QUIET)]
                with suppress(CoordinatorError):
                    await coordinator.jobs.resume(FAULTY)
                worlds[0].join()
        assert not writing.done()
        state = (await coordinator.jobs.job(QUIET, LATEST, has_details=False)).state
        assert sum(coordinator.live.fault_counts.values()) == (dice.faults if with_faulty else 0)
        return await quiet.seen(), state
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await coordinator.close()
        await store.close()


@pytest.fixture
def faults_at_random(monkeypatch: pytest.MonkeyPatch) -> list[Dice]:
    """Let machines fail as the dice in the list say: before an input, after it, and while they are shown."""
    current: list[Dice] = []
    handle, summary = JobMachine.handle, JobMachine.summary
    next_deadline_s, is_on_gpu = JobMachine.next_deadline_s, JobMachine.is_on_gpu

    def failing_handle(self: JobMachine, event: Input, now_s: float, wall_time_s: float) -> list[Command]:
        current[0].throw(self.spec.job_id)
        commands = handle(self, event, now_s, wall_time_s)
        current[0].throw(self.spec.job_id)
        return commands

    def failing_deadline(self: JobMachine) -> float | None:
        current[0].throw(self.spec.job_id)
        return next_deadline_s(self)

    def failing_gpu(self: JobMachine, place: Coordinates, gpu_uuid: str) -> bool:
        current[0].throw(self.spec.job_id)
        return is_on_gpu(self, place, gpu_uuid)

    def failing_summary(self: JobMachine) -> Any:
        current[0].throw(self.spec.job_id)
        return summary(self)

    monkeypatch.setattr(JobMachine, "handle", failing_handle)
    monkeypatch.setattr(JobMachine, "summary", failing_summary)
    monkeypatch.setattr(JobMachine, "next_deadline_s", failing_deadline)
    monkeypatch.setattr(JobMachine, "is_on_gpu", failing_gpu)
    return current


@pytest.fixture
def alone() -> list[object]:
    """What is seen of the quiet job where there is no other; filled by the first example."""
    return []


@settings(max_examples=8, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), share=st.sampled_from([0.002, 0.02, 0.2]))
def test_whatever_fails_of_one_job_another_goes_on_as_if_it_were_alone(
    tmp_path_factory: pytest.TempPathFactory,
    faults_at_random: list[Dice],
    alone: list[object],
    seed: int,
    share: float,
) -> None:
    faults_at_random[:] = [Dice(seed, share)]
    path = tmp_path_factory.mktemp("store")
    with capture_logs():  # tracebacks take longer to print than all else here
        if not alone:  # it is the same every time
            alone[:] = asyncio.run(live(path / "alone.db", faults_at_random[0], with_faulty=False))
        beside = asyncio.run(live(path / "beside.db", faults_at_random[0], with_faulty=True))
    assert alone[1] is JobState.PLANNED
    assert list(beside) == alone
