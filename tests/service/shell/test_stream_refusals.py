"""Invalid messages on agents' streams: which are refused, for which reason, and what continues regardless."""

import math
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from perseus.service.domain.specification import Coordinates
from perseus.v1 import agent_service_pb2, rank_pb2
from tests.service.grpc_fakes import ALL_PLACES, Client, FakeAgent, connected, make_settings, refusal

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with connected(make_settings(tmp_path)) as client:
        await client.register()
        yield client


async def ended(agent: FakeAgent) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    return await refusal(agent.reader)


async def test_a_stream_begins_with_its_only_hello(client: Client) -> None:
    agent = FakeAgent(client, "agent", ALL_PLACES)
    await agent.send(heartbeat=agent_service_pb2.Heartbeat())
    assert await ended(agent) == (INVALID, "HELLO_EXPECTED", {"found": "heartbeat"})
    agent = FakeAgent(client, "agent", ALL_PLACES)
    await agent.hello()
    await agent.send(hello=agent_service_pb2.Hello(instance_id="agent"))
    assert await ended(agent) == (INVALID, "HELLO_REPEATED", {"instance_id": "agent"})
    agent = FakeAgent(client, "agent", ALL_PLACES)
    await agent.send(hello=agent_service_pb2.Hello(instance_id=""))
    assert (await ended(agent))[:2] == (INVALID, "INVALID_FIELD")


async def test_invalid_ranks_are_refused_and_the_stream_continues(client: Client) -> None:
    agent = FakeAgent(client, "agent", [Coordinates(0, 0, 0)])
    await agent.hello()
    joined = agent.joined(agent.ranks[Coordinates(0, 0, 0)])
    outside = agent_service_pb2.RankJoined()
    outside.CopyFrom(joined)
    outside.rank.stage = 2
    unknown = agent_service_pb2.RankJoined()
    unknown.CopyFrom(joined)
    unknown.job_id = "no"
    for message in (outside, unknown, joined):
        await agent.send(rank_joined=message)
    await agent.until(lambda: bool(agent.accepted))
    assert [refused.reason for refused in agent.refused] == ["RANK_OUT_OF_RANGE", "JOB_NOT_FOUND"]
    assert not any(refused.HasField("lease_left_s") for refused in agent.refused)
    assert agent.refused[0].metadata["stage"] == "2"
    assert agent.refused[0].metadata["stage_count"] == "2"
    assert agent.refused[0].rank.stage == 2


async def test_another_agent_cannot_claim_a_served_rank(client: Client) -> None:
    agent = FakeAgent(client, "agent", ALL_PLACES[:1])
    await agent.join()
    other = FakeAgent(client, "other", ALL_PLACES[:1])
    await other.join()
    (refused,) = other.refused
    assert refused.reason == "RANK_ALREADY_SERVED"
    assert refused.metadata["instance_id"] == "agent"
    assert 0 < refused.lease_left_s <= agent.welcome.lease_s
    assert (await client.ranks())[0].state == rank_pb2.RANK_STATE_CONNECTED


async def test_a_newer_stream_of_the_same_agent_replaces_the_older(client: Client) -> None:
    agent = FakeAgent(client, "agent", ALL_PLACES)
    await agent.join()
    newer = FakeAgent(client, "agent", ALL_PLACES)
    await newer.join()
    assert (await ended(agent))[:2] == (grpc.StatusCode.ABORTED, "STREAM_REPLACED")
    assert not newer.refused
    assert {rank.state for rank in await client.ranks()} == {rank_pb2.RANK_STATE_CONNECTED}


def damage(batch: agent_service_pb2.TelemetryBatch, what: str) -> None:
    match what:
        case "iterations.duration_s[0]":
            batch.iterations.duration_s[0] = 1e155
        case "iterations.energy_j[0]":
            batch.iterations.energy_j[0] = 1.7e308
        case "iterations.energy_j":
            batch.iterations.energy_j.append(1.0)
        case "iterations.iteration[0]":
            batch.iterations.iteration[0] = 2**63 - 1
        case "iterations.is_regular":
            batch.computations.microbatch[0] = 1
        case "computations.iteration[0]":
            batch.computations.iteration[0] = 77
        case "computations.kind[2]":
            batch.computations.kind[2] = 99  # type: ignore[call-overload]
        case "computations.begin_s[1]":
            batch.computations.begin_s[1] = math.inf
        case "computations.clock_mhz[0]":
            batch.computations.clock_mhz[0] = 1234
        case "computations.chunk":
            del batch.computations.chunk[:]
        case "energy.blocking_power_w":
            batch.energy.blocking_power_w = 0.0
        case "energy.samples[0].kind":
            batch.energy.samples[0].ClearField("kind")
        case "energy.samples[0].time_s":
            batch.energy.samples[0].time_s = 1e200
        case "energy.samples[1]":
            batch.energy.samples[1].chunk = 3
        case "rank":
            batch.ClearField("rank")
        case "dropped_batch_count":
            batch.dropped_batch_count = -1


@pytest.mark.parametrize(
    "field",
    [
        "iterations.duration_s[0]",
        "iterations.energy_j[0]",
        "iterations.energy_j",
        "iterations.iteration[0]",
        "iterations.is_regular",
        "computations.iteration[0]",
        "computations.kind[2]",
        "computations.begin_s[1]",
        "computations.clock_mhz[0]",
        "computations.chunk",
        "energy.blocking_power_w",
        "energy.samples[0].kind",
        "energy.samples[0].time_s",
        "energy.samples[1]",
        "rank",
        "dropped_batch_count",
    ],
)
async def test_invalid_telemetry_is_refused_by_itself(client: Client, field: str) -> None:
    agent = FakeAgent(client, "agent", ALL_PLACES)
    await agent.join()
    await agent.iterate()
    rank = agent.ranks[ALL_PLACES[0]]
    rank.begin()
    batch = agent.telemetry(rank)
    damage(batch, field)
    await agent.send(telemetry=batch)
    await agent.until(lambda: agent.acknowledged == batch.sequence)
    (refused,) = agent.telemetry_refused
    assert (refused.sequence, refused.reason, refused.field) == (batch.sequence, "INVALID_FIELD", field)
    assert refused.expected
    assert refused.found
    assert (await client.ranks())[0].iteration == 0
    again = FakeAgent(client, "agent", ALL_PLACES)
    await again.join()
    assert again.welcome.acknowledged_sequence == batch.sequence


async def test_an_invalid_iteration_and_a_rank_outside_its_job_affect_nothing_else_of_a_node(
    client: Client,
) -> None:
    agent = FakeAgent(client, "agent", ALL_PLACES)
    await agent.join()
    await agent.iterate()
    rank = agent.ranks[ALL_PLACES[0]]
    rank.begin()
    batch = agent.telemetry(rank)
    batch.iterations.duration_s[0] = 0.0
    await agent.send(telemetry=batch)
    await agent.until(lambda: agent.acknowledged == batch.sequence)
    assert [refused.field for refused in agent.telemetry_refused] == ["iterations.duration_s[0]"]
    for places in (rank_pb2.RankCoordinates(stage=9), rank_pb2.RankCoordinates(pipeline=-1)):
        left = agent_service_pb2.RankLeft(
            job_id="job", rank=places, reason=rank_pb2.RANK_LEFT_REASON_FINISHED
        )
        await agent.send(rank_left=left)
    await agent.until(lambda: len(agent.messages_refused) == 2)
    assert {refused.reason for refused in agent.messages_refused} == {"RANK_OUT_OF_RANGE"}
    for other in list(agent.ranks.values())[1:]:
        other.begin()
        await agent.send(telemetry=agent.telemetry(other))
    await agent.iterate()
    assert {found.state for found in await client.ranks()} == {rank_pb2.RANK_STATE_CONNECTED}
    assert agent.acknowledged == agent.sequence


async def test_a_batch_without_a_sequence_is_refused_and_nothing_is_acknowledged(client: Client) -> None:
    agent = FakeAgent(client, "agent", ALL_PLACES)
    await agent.join()
    await agent.iterate()
    batch = agent.telemetry(agent.ranks[ALL_PLACES[0]])
    batch.sequence = 0
    await agent.send(telemetry=batch)
    await agent.until(lambda: bool(agent.telemetry_refused))
    assert agent.telemetry_refused[0].field == "sequence"
    await agent.iterate()
    assert agent.acknowledged == agent.sequence


async def test_telemetry_of_a_rank_that_the_agent_does_not_serve_is_refused(client: Client) -> None:
    agent = FakeAgent(client, "agent", ALL_PLACES[:2])
    await agent.join()
    other_user = FakeAgent(client, "other", ALL_PLACES[:1])
    await other_user.hello()
    for each, changes in (
        (other_user, {}),
        (agent, {"job_id": "no"}),
        (agent, {"job_id": "No such\njob"}),
        (agent, {"rank": rank_pb2.RankCoordinates(pipeline=1)}),
        (agent, {"rank": rank_pb2.RankCoordinates(stage=2)}),
    ):
        each.ranks[ALL_PLACES[0]].begin()
        batch = each.telemetry(each.ranks[ALL_PLACES[0]])
        batch.MergeFrom(agent_service_pb2.TelemetryBatch(**changes))
        await each.send(telemetry=batch)
        await each.until(lambda each=each, batch=batch: each.acknowledged == batch.sequence)  # type: ignore[misc]
    reasons = [refused.reason for refused in (*other_user.telemetry_refused, *agent.telemetry_refused)]
    assert reasons == [
        "RANK_NOT_SERVED",
        "JOB_NOT_FOUND",
        "INVALID_JOB_ID",
        "RANK_NOT_SERVED",
        "RANK_OUT_OF_RANGE",
    ]
