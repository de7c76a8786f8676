"""Messages to a coordinator that comes and goes, on real streams."""

from collections.abc import AsyncIterator, Mapping

import pytest
from structlog.testing import capture_logs

from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import Saving
from perseus.agent.rank.messages import (
    AgentIdentity,
    RankLeftReason,
    RankRefused,
    Telemetry,
    ToSession,
    Welcome,
    rank_left,
)
from perseus.agent.stream.coordinator import Coordinator
from perseus.tls.channels import Channels
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import rank_pb2
from tests.agent.coordinator_stub import CoordinatorStub, Inbox, coordinating, until
from tests.agent.stream.test_connection import running

RANK = Rank("job", 0, 0, 0)
TELEMETRY = Telemetry(RANK, (), (), None, None)
REPORT = wire.GpuError(
    job_id="job", gpu_uuid="GPU-0", reason=rank_pb2.GPU_ERROR_REASON_LOST, message="fell off the bus"
)
IN_FORCE = wire.PlanInForce(job_id="job", iteration=3)


class Agent:
    """A `Listener` that sends a message on every stream and records its calls."""

    def __init__(self, target: str) -> None:
        self.seen: list[Welcome | ToSession | str] = []
        self.coordinator = Coordinator(
            Channels(target), AgentIdentity("instance", "0", "host"), self, lambda: 0.01
        )

    def welcomed(self, welcome: Welcome) -> None:
        pass

    def connected(self, welcome: Welcome) -> None:
        self.seen.append(welcome)
        self.coordinator.send(IN_FORCE)

    def heard(self) -> None:
        self.seen.append("heard")

    def received(self, message: ToSession) -> None:
        self.seen.append(message)

    def saved(self, savings: Mapping[str, Saving]) -> None:
        pass

    def disconnected(self) -> None:
        self.seen.append("disconnected")


@pytest.fixture
async def server() -> AsyncIterator[CoordinatorStub]:
    async with coordinating() as server:
        yield server


def output(server: CoordinatorStub) -> list[str | None]:
    names = [request.WhichOneof("message") for request in server.inbox.heard]
    return [name for name in names if name != "heartbeat"]


async def test_messages_without_a_stream_are_kept_or_dropped(server: CoordinatorStub) -> None:
    agent = Agent(f"127.0.0.1:{server.port}")
    agent.coordinator.send(TELEMETRY)
    agent.coordinator.send(IN_FORCE)
    agent.coordinator.send(REPORT)
    agent.coordinator.send(rank_left(RANK, RankLeftReason.FINISHED))
    agent.coordinator.send_next([REPORT])
    async with running(agent.coordinator):
        await server.until(lambda inbox: inbox.acknowledged_sequence == 1, "telemetry")
        assert output(server) == ["hello", "rank_left", "gpu_error", "plan_in_force", "telemetry"]
        agent.coordinator.send(rank_left(RANK, RankLeftReason.FINISHED))
        agent.coordinator.send(TELEMETRY)
        await server.until(lambda inbox: inbox.acknowledged_sequence == 2, "telemetry")
        assert output(server)[5:] == ["rank_left", "telemetry"]
    assert agent.coordinator.telemetry_sequence == 2


async def test_unacknowledged_telemetry_is_resent_on_the_next_stream(server: CoordinatorStub) -> None:
    agent = Agent(f"127.0.0.1:{server.port}")
    async with running(agent.coordinator):
        await until(lambda: agent.coordinator.is_connected, "connected")
        agent.coordinator.send(TELEMETRY)
        await server.until(lambda inbox: inbox.acknowledged_sequence == 1, "acknowledged")
        agent.coordinator.send_next([REPORT])  # not on the next: a stream is open
        server.inbox.acknowledges = False
        agent.coordinator.send(TELEMETRY)
        await server.until(lambda inbox: len(inbox.all("telemetry")) == 2, "heard")
        await server.stop()
        await until(lambda: "disconnected" in agent.seen, "disconnected")
        agent.coordinator.send(TELEMETRY)
        async with coordinating(Inbox(acknowledged_sequence=1), server.port) as restarted:
            await restarted.until(lambda inbox: inbox.acknowledged_sequence == 3, "telemetry")
            assert output(restarted) == ["hello", "plan_in_force", "telemetry", "telemetry"]
            assert [each.telemetry.sequence for each in restarted.inbox.all("telemetry")] == [2, 3]


async def test_messages_go_to_their_ranks_and_others_are_logged(server: CoordinatorStub) -> None:
    agent = Agent(f"127.0.0.1:{server.port}")
    refused = wire.RankRefused(job_id="job", rank=rank_pb2.RankCoordinates(), reason="R", message="why")
    with capture_logs() as logs:
        async with running(agent.coordinator):
            await until(lambda: agent.coordinator.is_connected, "connected")
            server.send(wire.ConnectResponse(drain=wire.Drain(reason="an update")))
            server.send(wire.ConnectResponse(telemetry_ack=wire.TelemetryAck(sequence=9)))
            server.send(wire.ConnectResponse(welcome=wire.Welcome(epoch="e", lease_s=1.0)))
            server.send(wire.ConnectResponse(rank_refused=refused))
            await until(lambda: RankRefused(RANK, "R", "why") in agent.seen, "the refusal")
    welcome, *heard = agent.seen[: agent.seen.index(RankRefused(RANK, "R", "why"))]
    assert welcome == Welcome("e", 3.0, 0)
    assert set(heard) == {"heard"}
    assert len(heard) >= 4
    (reported,) = server.inbox.all("message_refused")
    assert (reported.message_refused.field, reported.message_refused.found) == ("telemetry_ack.sequence", "9")
    reasons = [str(line["reason"]) for line in logs if "reason" in line]
    assert "an update" in reasons
    assert "telemetry: expected an acknowledgement up to 0, found 9" in reasons
    assert "expected one welcome on a stream, found another" in reasons


async def test_refused_telemetry_is_dropped_counted_and_logged_once(
    server: CoordinatorStub,
) -> None:
    agent = Agent(f"127.0.0.1:{server.port}")
    with capture_logs() as logs:
        async with running(agent.coordinator):
            await until(lambda: agent.coordinator.is_connected, "connected")
            server.inbox.acknowledges = False
            for _ in range(3):
                agent.coordinator.send(TELEMETRY)
            await server.until(lambda inbox: len(inbox.all("telemetry")) == 3, "telemetry")
            for sequence in (1, 2):
                refused = wire.TelemetryRefused(
                    sequence=sequence, reason="INVALID_FIELD", field=f"a[{sequence}]", expected="x", found="y"
                )
                server.send(wire.ConnectResponse(telemetry_refused=refused))
            server.send(wire.ConnectResponse(message_refused=wire.MessageRefused(reason="R", field="f")))
            server.send(wire.ConnectResponse(telemetry_ack=wire.TelemetryAck(sequence=3)))
            heard = agent.seen.count("heard")
            await until(lambda: agent.seen.count("heard") >= heard + 4, "all messages")
            agent.coordinator.send(TELEMETRY)
            await server.until(lambda inbox: len(inbox.all("telemetry")) == 4, "telemetry")
    assert server.inbox.all("telemetry")[-1].telemetry.dropped_batch_count == 2
    assert "disconnected" not in agent.seen[:-1]
    (line,) = [line for line in logs if line["event"] == "telemetry refused and dropped"]
    assert (line["reason"], line["field"], line["dropped_batch_count"]) == ("INVALID_FIELD", "a[1]", 1)
    assert [line["field"] for line in logs if line["event"] == "the coordinator refuses a message"] == ["f"]
