"""An agent's streams to the coordinators of several slots of jobs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from perseus.agent.claims.decision import Allowed
from perseus.agent.claims.grants import User
from perseus.agent.claims.registry import Claim
from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import Hello, Registration, Reply, Saving
from perseus.agent.rank.events import Connected, Disconnected, Event, Heard
from perseus.agent.rank.messages import (
    PlanOffer,
    RankLeftReason,
    RankMaxClock,
    Telemetry,
    coordinates,
    rank_left,
)
from perseus.agent.sidecar.gpus import AgentCounters
from perseus.agent.sidecar.roster import Roster, Trainer
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.sidecar.shell import serving
from perseus.agent.sidecar.uplink import Uplink
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from perseus.job_id import slot_of
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import computation_pb2, rank_pb2
from tests.agent.coordinator_stub import CoordinatorStub, Inbox, coordinating, until
from tests.agent.sidecar import training
from tests.agent.sidecar.training import ORDER, UUID, Start

RANKS = [
    Rank(next(name for name in map("job-{}".format, range(9)) if slot_of(name, 2) == slot), 0, 0, 0)
    for slot in range(2)
]


class Served:
    """A served rank that records its events."""

    has_ended = False

    def __init__(self) -> None:
        self.seen: list[Event] = []

    def handle(self, event: Event) -> None:
        self.seen.append(event)

    def has_seen(self, kind: type[Event]) -> bool:
        return any(isinstance(event, kind) for event in self.seen)


class Connection:
    """A trainer's connection that records the replies."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    def reply(self, reply: Reply) -> None:
        self.replies.append(reply)


class Agent:
    """An uplink with trainers that only exist."""

    def __init__(self, *addresses: str) -> None:
        settings = AgentSettings.model_validate({"coordinator": ",".join(addresses), "token": "t"})
        self.roster = Roster()
        self.uplink = Uplink(settings, self.roster, AgentCounters())

    def join(self, rank: Rank) -> Served:
        claim = Claim(rank, f"GPU-{rank}", User(1000, "ada"), Allowed(is_granted=True, is_running=True))
        connection = cast(Any, Connection())
        self.roster.enter(Trainer(claim, connection, Hello(rank, claim.gpu_uuid, True), None))
        served = Served()
        self.roster.served[rank] = cast(Any, served)
        self.uplink.begin(rank)
        return served

    def leave(self, rank: Rank) -> None:
        self.send(rank_left(rank, RankLeftReason.FINISHED))
        self.roster.served.pop(rank)
        self.roster.leave(self.roster.trainers[rank])
        self.uplink.end(rank)

    def send(self, message: wire.RankLeft | Telemetry) -> None:
        job_id = message.rank.job_id if isinstance(message, Telemetry) else message.job_id
        self.uplink.send(job_id, message)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.uplink.run())
        try:
            yield
        finally:
            self.uplink.close("the test ends")
            await asyncio.wait_for(task, 5)


Coordinators = list[CoordinatorStub]


@pytest.fixture
async def coordinators(start: Start) -> Coordinators:
    """Two of a fleet, by slot."""
    inboxes = [Inbox(slot=slot, slot_count=2) for slot in range(2)]
    found = [await start(inbox) for inbox in inboxes]
    for inbox in inboxes:
        inbox.addresses |= {slot: address(each) for slot, each in enumerate(found)}
    return found


def address(coordinator: CoordinatorStub) -> str:
    return f"127.0.0.1:{coordinator.port}"


def telemetry(rank: Rank) -> Telemetry:
    return Telemetry(rank, (), (), None, None)


def heard(coordinator: CoordinatorStub) -> list[tuple[str, str, int]]:
    """Return the messages about jobs, with their jobs and sequences."""
    return [
        (name, message.job_id, getattr(message, "sequence", 0))
        for request in coordinator.inbox.heard
        if hasattr(message := getattr(request, name := str(request.WhichOneof("message"))), "job_id")
    ]


@pytest.mark.parametrize("first", [0, 1])
async def test_each_slot_has_a_stream_and_a_sequence_of_its_own(
    coordinators: Coordinators, first: int
) -> None:
    agent = Agent(address(coordinators[first]))
    ranks = [agent.join(rank) for rank in RANKS]
    async with agent.running():
        await until(lambda: all(rank.has_seen(Heard) for rank in ranks), "both ranks connected")
        for rank in (*RANKS, *RANKS):
            agent.send(telemetry(rank))
        for coordinator in coordinators:
            await coordinator.until(lambda inbox: len(inbox.all("telemetry")) == 2, "telemetry")
    for rank, coordinator in zip(RANKS, coordinators, strict=True):
        assert heard(coordinator) == [("telemetry", rank.job_id, 1), ("telemetry", rank.job_id, 2)]
        assert coordinator.inbox.all("goodbye")
    own, asked = (each.hello for each in coordinators[first].inbox.all("hello"))
    (other,) = (each.hello for each in coordinators[1 - first].inbox.all("hello"))
    assert not own.HasField("slot"), "the first stream is for the slot of whoever welcomes it"
    assert asked == other, "who serves the other slot is asked of the first coordinator"
    assert other.slot == 1 - first
    assert other.instance_id != own.instance_id


async def test_leases_are_of_the_ranks_of_a_slot(coordinators: Coordinators) -> None:
    agent = Agent(*map(address, coordinators))
    ranks = [agent.join(rank) for rank in RANKS]
    async with agent.running():
        await until(lambda: all(rank.has_seen(Connected) for rank in ranks), "both ranks connected")
        await coordinators[1].stop()
        await until(lambda: ranks[1].has_seen(Disconnected), "the other slot's coordinator gone")
        ranks[0].seen.clear()
        ranks[1].seen.clear()
        await until(lambda: ranks[0].has_seen(Heard), "the first slot's coordinator heard")
        assert not ranks[0].has_seen(Disconnected)
        assert not ranks[1].has_seen(Heard)
        assert agent.uplink.describe().startswith("connected for 1 of 2 slots of jobs")


async def test_what_was_kept_before_the_first_welcome_goes_to_its_slot(coordinators: Coordinators) -> None:
    agent = Agent(address(coordinators[0]))
    for rank in RANKS:
        agent.join(rank)
        agent.send(telemetry(rank))
        agent.leave(rank)
    assert agent.uplink.first.coordinator.kept_jobs == {rank.job_id for rank in RANKS}
    agent.join(RANKS[1])
    async with agent.running():
        for rank, coordinator in zip(RANKS, coordinators, strict=True):
            await coordinator.until(lambda inbox: len(inbox.all("telemetry")) == 1, "telemetry")
            # A session from before its slot was known counts on from here.
            number = 1 if rank is RANKS[0] else 2
            assert heard(coordinator) == [
                ("rank_left", rank.job_id, 0), ("telemetry", rank.job_id, number)
            ]  # fmt: skip
        agent.send(telemetry(RANKS[1]))
        await coordinators[1].until(lambda inbox: len(inbox.all("telemetry")) == 2, "telemetry")
        assert heard(coordinators[1])[-1] == ("telemetry", RANKS[1].job_id, 3)
        assert agent.uplink.batch_count == 3


async def test_what_is_stored_already_is_not_sent_again_when_jobs_are_spread_over_slots(start: Start) -> None:
    inbox = Inbox(acknowledges=False)
    single = await start(inbox)
    agent = Agent(address(single))
    for rank in RANKS:
        agent.join(rank)
    async with agent.running():
        for rank in RANKS:
            agent.send(telemetry(rank))
        await single.until(lambda inbox: len(inbox.all("telemetry")) == 2, "telemetry")
        agent.send(telemetry(RANKS[1]))
        await single.until(lambda inbox: len(inbox.all("telemetry")) == 3, "telemetry")
        # It has stored two batches, and is replaced before it could say so.
        other = await start(Inbox(slot=1, slot_count=2))
        await single.stop()
        spread = Inbox(slot_count=2, acknowledged_sequence=2, addresses={1: address(other)})
        await start(spread, single.port)
        await other.until(lambda inbox: bool(inbox.all("telemetry")), "telemetry")
    assert heard(other) == [("telemetry", RANKS[1].job_id, 3)]
    assert not spread.all("telemetry")


async def test_a_stream_ends_with_the_last_rank_of_its_slot_once_all_is_acknowledged(
    coordinators: Coordinators,
) -> None:
    agent = Agent(address(coordinators[0]))
    inbox = coordinators[1].inbox

    async def come_and_go(number: int) -> None:
        rank = agent.join(RANKS[1])
        agent.send(telemetry(RANKS[1]))
        await until(lambda: rank.has_seen(Connected), "connected")
        agent.leave(RANKS[1])
        await coordinators[1].until(lambda inbox: len(inbox.all("rank_left")) > number, "left")
        assert len(inbox.all("goodbye")) == number
        ack = wire.TelemetryAck(sequence=1)
        coordinators[1].send(wire.ConnectResponse(telemetry_ack=ack))
        await coordinators[1].until(lambda inbox: len(inbox.all("goodbye")) > number, "the end")

    async with agent.running():
        inbox.acknowledges = False
        await coordinators[0].until(lambda inbox: bool(inbox.all("heartbeat")), "connected")
        await come_and_go(0)
        await come_and_go(1)
        assert len({each.hello.instance_id for each in inbox.all("hello")}) == 2
        assert len(agent.uplink.coordinators) == 1
        assert agent.uplink.batch_count == 2
        assert not coordinators[0].inbox.all("goodbye")


async def test_a_fleet_with_another_number_of_slots_is_an_error(coordinators: Coordinators) -> None:
    agent = Agent(address(coordinators[0]))
    async with agent.running():
        with capture_logs() as logs:
            await until(lambda: agent.uplink.first.coordinator.is_connected, "connected")
            await coordinators[0].stop()
            async with coordinating(Inbox(slot_count=3), coordinators[0].port):
                await until(lambda: any("number of slots" in line["event"] for line in logs), "an error")


async def test_power_is_reported_to_the_coordinator_of_a_gpu_s_job_or_else_to_the_first(
    tmp_path: Path, gpu: EmulatedGpu, coordinators: Coordinators
) -> None:
    own = slot_of("job", 2)
    there, here = coordinators[own], coordinators[1 - own]
    here.inbox.power_interval_s = 0.1
    EmulatedGpu.create(tmp_path / "gpus" / "1", A100_SXM, "GPU-idle").close()

    def powers_w(inbox: Inbox) -> dict[str, float]:
        """Return the latest power by GPU."""
        readings = [each.power_reading for each in inbox.all("power_reading")]
        assert all(reading.duration_s > 0 for reading in readings)
        return {k: v for each in readings for k, v in zip(each.gpu_uuid, each.power_w, strict=True)}

    def reported(inbox: Inbox) -> set[str]:
        return set(powers_w(inbox))

    async with serving(training.settings(tmp_path, here.port)):
        await here.until(lambda inbox: reported(inbox) == {UUID, "GPU-idle"}, "readings of both")
        trainer = training.Trainer(tmp_path / "run" / "agent.sock", gpu)
        await there.until(lambda inbox: bool(inbox.all("telemetry")), "training")
        here.inbox.heard.clear()
        await here.until(lambda inbox: len(inbox.all("power_reading")) > 2, "readings")
        assert (reported(there.inbox), reported(here.inbox)) == (set(), {"GPU-idle"})
        there.send(wire.ConnectResponse(heartbeat=wire.Heartbeat(power_interval_s=0.1)))
        idle_w, board_w = powers_w(here.inbox)["GPU-idle"], A100_SXM.board_power_w
        assert idle_w > 0
        await there.until(
            lambda inbox: idle_w < powers_w(inbox).get(UUID, 0.0) < board_w, "a reading of the job's GPU"
        )
        assert reported(there.inbox) == {UUID}
        assert there.inbox.jobs.keys() == {"job"}, "registered there"
        assert not here.inbox.jobs
        await trainer.stop()
        await there.until(lambda inbox: bool(inbox.all("rank_left")), "left")


async def test_a_rank_whose_trainer_has_gone_opens_no_stream(coordinators: Coordinators) -> None:
    agent = Agent(address(coordinators[0]))
    first = agent.join(RANKS[0])
    async with agent.running():
        await until(lambda: first.has_seen(Connected), "the stream")
        agent.roster.served[RANKS[1]] = cast(Any, Served())
        agent.uplink.first.heard()
        assert len(agent.uplink.coordinators) == 1


async def test_a_trainer_hears_of_a_lasting_refusal_and_its_end_and_a_jobs_first_one_of_its_saving(
    coordinators: Coordinators,
) -> None:
    agent = Agent(address(coordinators[0]))
    first, second = RANKS[0], Rank(RANKS[0].job_id, 1, 0, 0)
    served = agent.join(first)
    agent.join(second)
    heard_by_first, heard_by_second = (
        cast(Connection, agent.roster.trainers[each].connection).replies for each in (first, second)
    )
    about: dict[str, Any] = {"job_id": first.job_id, "rank": coordinates(first)}
    refused = wire.RankRefused(**about, reason="JOB_FINISHED", message="run 1 has ended")
    async with agent.running():
        await until(lambda: served.has_seen(Connected), "connected")
        for _ in range(5):
            coordinators[0].send(wire.ConnectResponse(rank_refused=refused))
        accepted = wire.RankAccepted(**about, order=computation_pb2.StageOrder(computations=ORDER))
        coordinators[0].send(wire.ConnectResponse(rank_accepted=accepted))
        await until(lambda: len(heard_by_first) == 2, "both notices")
        assert [each.ok for each in heard_by_first] == [False, True]
        other = wire.JobSaving(job_id="other", energy_percent=50.0)
        job = wire.JobSaving(job_id=first.job_id, energy_percent=13.24, slowdown_margin_percent=0.06)
        for savings in ([other, job], [other]):
            coordinators[0].send(wire.ConnectResponse(heartbeat=wire.Heartbeat(savings=savings)))
        await until(lambda: len(heard_by_first) == 4, "the saving, and that it is unknown")
    assert [each.saving for each in heard_by_first[2:]] == [Saving(13.2, 0.0, None, 0.1), None]
    assert not heard_by_second


async def test_messages_go_to_their_rank_and_an_offer_to_one_that_is_not_served_is_refused(
    coordinators: Coordinators,
) -> None:
    agent = Agent(address(coordinators[0]))
    rank = agent.join(RANKS[0])
    about: dict[str, Any] = {"job_id": RANKS[0].job_id, "rank": rank_pb2.RankCoordinates()}
    plan: dict[str, Any] = {"epoch": "e", "version": 1, "lease_s": 3.0, "stock": wire.StockClocks()}
    async with agent.running():
        await until(lambda: rank.has_seen(Connected), "connected")
        coordinators[0].send(wire.ConnectResponse(rank_max_clock=wire.RankMaxClock(**about)))
        coordinators[0].send(wire.ConnectResponse(plan_offer=wire.PlanOffer(**about, **plan)))
        await until(lambda: rank.has_seen(PlanOffer), "an offer")
        assert rank.has_seen(RankMaxClock)
        about["rank"] = rank_pb2.RankCoordinates(stage=7)
        coordinators[0].send(wire.ConnectResponse(plan_offer=wire.PlanOffer(**about, **plan)))
        await coordinators[0].until(lambda inbox: bool(inbox.all("plan_answer")), "an answer")
    (answer,) = (each.plan_answer for each in coordinators[0].inbox.all("plan_answer"))
    reason = rank_pb2.PLAN_REFUSAL_REASON_UNKNOWN_RANK
    assert (answer.rank, answer.accepted, answer.refusal_reason) == (about["rank"], False, reason)


async def test_a_jobs_registration_is_kept_until_its_last_rank_has_left(start: Start) -> None:
    coordinator = await start(Inbox())
    agent = Agent(address(coordinator))
    first, second = Rank("job", 0, 0, 0), Rank("job", 1, 0, 0)
    agent.join(first)
    rank = agent.join(second)
    async with agent.running():
        await until(lambda: rank.has_seen(Connected), "connected")
        await agent.uplink.registrar.register("job", Registration({"jobId": "job"}, "request", "work"))
        agent.leave(first)
        coordinator.inbox.jobs.clear()
        refused = wire.RankRefused(job_id="job", rank=coordinates(second), reason="JOB_NOT_FOUND")
        coordinator.send(wire.ConnectResponse(rank_refused=refused))
        await coordinator.until(lambda inbox: "job" in inbox.jobs, "registered again")
