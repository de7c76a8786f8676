"""Messages on agents' streams that are invalid or of another version: which are refused, for which reason,
and what continues regardless.

Numbers beyond their bounds are in `tests/service/api/test_bounds_of_requests.py`, texts in `test_texts.py`,
absent parts in `test_required_fields.py`.
"""

from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from perseus.service.api import agent_service
from perseus.v1 import agent_service_pb2, rank_pb2
from perseus.v1.agent_service_pb2 import ConnectRequest, MessageRefused
from tests.service.grpc_fakes import ALL_PLACES, Client, FakeAgent, joined, refusal, sent

INVALID = grpc.StatusCode.INVALID_ARGUMENT
FIRST = ALL_PLACES[:1]


async def test_a_stream_begins_with_its_only_hello(client: Client) -> None:
    agent = FakeAgent(client)
    await agent.send(heartbeat={})
    assert await refusal(agent.reader) == (INVALID, "HELLO_EXPECTED", {"found": "heartbeat"})
    agent = FakeAgent(client)
    await agent.hello()
    await agent.send(hello={"instance_id": "agent"})
    assert await refusal(agent.reader) == (INVALID, "HELLO_REPEATED", {"instance_id": "agent"})
    agent = FakeAgent(client)
    await agent.send(hello={"instance_id": ""})
    assert (await refusal(agent.reader))[:2] == (INVALID, "INVALID_FIELD")


async def test_invalid_ranks_are_refused_and_the_stream_continues(client: Client) -> None:
    await client.register()
    agent = FakeAgent(client, places=FIRST)
    await agent.hello()
    outside, unknown, fine = [agent.joined(agent.ranks[FIRST[0]]) for _ in range(3)]
    outside.rank.stage = 2
    unknown.job_id = "no"
    for message in (outside, unknown, fine):
        await agent.send(rank_joined=message)
    await agent.until(lambda: bool(agent.accepted))
    assert [refused.reason for refused in agent.refused] == ["RANK_OUT_OF_RANGE", "JOB_NOT_FOUND"]
    assert not any(refused.HasField("lease_left_s") for refused in agent.refused)
    assert agent.refused[0].metadata["stage"] == "2"
    assert agent.refused[0].metadata["stage_count"] == "2"
    assert agent.refused[0].rank.stage == 2


async def test_a_newer_stream_of_the_same_agent_replaces_the_older(client: Client) -> None:
    agent = await joined(client)
    newer = FakeAgent(client)
    await newer.join()
    assert (await refusal(agent.reader))[:2] == (grpc.StatusCode.ABORTED, "STREAM_REPLACED")
    assert not newer.refused
    assert await client.rank_states() == {rank_pb2.RANK_STATE_CONNECTED}


VALUES = {
    "iterations.is_regular": ("microbatch", 1),
    "computations.iteration[0]": ("iteration", 77),
    "computations.kind[0]": ("kind", 99),
    "computations.clock_mhz[0]": ("clock_mhz", 1234),
}
"""A column of computations, and what makes its first row wrong."""


def damage(batch: agent_service_pb2.TelemetryBatch, field: str) -> None:
    match field:
        case "iterations.energy_j":
            batch.iterations.energy_j.append(1.0)
        case "computations.chunk":
            del batch.computations.chunk[:]
        case "energy.samples[1]":
            batch.energy.samples[1].chunk = 3
        case _:
            column, value = VALUES[field]
            getattr(batch.computations, column)[0] = value


async def test_invalid_telemetry_is_refused_by_itself(client: Client) -> None:
    agent = await joined(client)
    await agent.iterate()
    rank = agent.ranks[ALL_PLACES[0]]
    for field in (*VALUES, "iterations.energy_j", "computations.chunk", "energy.samples[1]"):
        rank.begin()
        batch = agent.telemetry(rank)
        damage(batch, field)
        agent.clear_refusals()
        await agent.send(telemetry=batch)
        await agent.until(lambda batch=batch: agent.acknowledged == batch.sequence)  # type: ignore[misc]
        (refused,) = agent.telemetry_refused
        assert (refused.sequence, refused.reason, refused.field) == (batch.sequence, "INVALID_FIELD", field)
        assert refused.expected
        assert refused.found
    for sequence in (0, -1, 2**63 - 1):
        batch = agent.telemetry(rank)
        agent.sequence -= 1
        batch.sequence = sequence
        await agent.send(telemetry=batch)
        await agent.beat()
        refused = agent.telemetry_refused[-1]
        assert (refused.field, agent.acknowledged) == ("sequence", agent.sequence)
    assert (await client.ranks())[0].iteration == 0
    again = FakeAgent(client)
    await again.join()
    assert again.welcome.acknowledged_sequence == agent.sequence


async def test_telemetry_of_a_rank_that_the_agent_does_not_serve_is_refused(client: Client) -> None:
    agent = await joined(client, places=ALL_PLACES[:2])
    other = FakeAgent(client, "other", FIRST)
    await other.hello()
    cases: list[tuple[FakeAgent, dict[str, Any], str]] = [
        (other, {}, "RANK_NOT_SERVED"),
        (agent, {"job_id": "no"}, "JOB_NOT_FOUND"),
        (agent, {"job_id": "No such\njob"}, "INVALID_JOB_ID"),
        (agent, {"rank": {"pipeline": 1}}, "RANK_NOT_SERVED"),
        (agent, {"rank": {"stage": 2}}, "RANK_OUT_OF_RANGE"),
    ]
    for each, changes, reason in cases:
        each.ranks[ALL_PLACES[0]].begin()
        batch = each.telemetry(each.ranks[ALL_PLACES[0]])
        batch.MergeFrom(agent_service_pb2.TelemetryBatch(**changes))
        await each.send(telemetry=batch)
        await each.until(lambda each=each, batch=batch: each.acknowledged == batch.sequence)  # type: ignore[misc]
        assert each.telemetry_refused[-1].reason == reason
    assert (len(other.telemetry_refused), len(agent.telemetry_refused)) == (1, 4)


# ---------------------------------------------------------------------- other versions, and faults

# Field 99 of the oneof, with its own message in it.
NEWER = ConnectRequest.FromString(b"\x9a\x06\x02\x08\x01")


async def test_a_newer_agent_is_served_and_its_unknown_messages_are_refused(client: Client) -> None:
    await client.register()
    with capture_logs() as logs:
        await FakeAgent(client, "old").hello(protocol_version=0)  # it speaks the first, as it names none
        agent = FakeAgent(client)
        await agent.hello(protocol_version=7)
        await agent.join_ranks()
        for _ in range(3):
            await agent.send(NEWER)
        await agent.send()
        await agent.leave(ALL_PLACES[:1], reason=42)  # a value of a newer contract
        await agent.until(lambda: len(agent.messages_refused) == 5)
        await agent.iterate(2)
    assert agent.welcome.protocol_version == agent_service.PROTOCOL_VERSION
    *unknown, empty, value = agent.messages_refused
    assert {(each.reason, each.field, each.found) for each in unknown} == {
        ("UNKNOWN_MESSAGE", "99", "field 99")
    }
    assert unknown[0].expected == "a message of protocol version 1"
    assert not unknown[0].HasField("rank")
    assert empty.reason == "EMPTY_MESSAGE"
    assert (value.reason, value.field, value.found) == ("INVALID_FIELD", "rank_left.reason", "42")
    assert (value.job_id, value.rank) == ("job", agent.place(ALL_PLACES[0]))
    warnings = [line for line in logs if line["log_level"] == "warning"]
    (version,) = [line for line in warnings if "protocol_version" in line]
    assert (version["protocol_version"], version["own_protocol_version"]) == (7, 1)
    output = [line["error"] for line in warnings if line["event"] == "message of an agent refused"]
    assert len(output) == 3, "each kind once"
    assert "99: expected a message of protocol version 1, found field 99" in output


async def test_an_agents_refusals_are_logged_once_and_never_answered(client: Client) -> None:
    agent = await joined(client)
    refused = MessageRefused(reason="UNKNOWN_MESSAGE", field="12", expected="e" * 5000, found="\x00\n")
    with capture_logs() as logs:
        for _ in range(5):
            await agent.send(message_refused=refused)
        await agent.iterate()
    assert not agent.messages_refused
    (line,) = [line for line in logs if line["event"] == "agent refuses a message"]
    assert (line["reason"], line["field"], len(line["expected"])) == ("UNKNOWN_MESSAGE", "12", 256)


async def test_an_invalid_message_is_refused_with_its_rank_if_it_names_one(client: Client) -> None:
    agent = await joined(client)
    place = agent.place(ALL_PLACES[1])
    of_rank: dict[str, Any] = {"job_id": "job", "rank": place}
    kinds = {"plan_answer": "version", "rank_left": "reason", "gpu_error": "reason"}
    for kind, field in kinds.items():
        await agent.send(sent(**{kind: of_rank | {field: 0}}))
    for about in ({"job_id": "job"}, {"job_id": "Not a job's"}, of_rank | {"rank": {"stage": 9}}):
        await agent.send(rank_left=about | {"reason": rank_pb2.RANK_LEFT_REASON_FINISHED})
    await agent.until(lambda: len(agent.messages_refused) == 6)
    *invalid, nowhere, nameless, outside = agent.messages_refused
    assert [(each.reason, each.field, each.rank) for each in invalid] == [
        ("INVALID_FIELD", f"{kind}.{field}", place) for kind, field in kinds.items()
    ]
    assert not nowhere.HasField("rank")
    assert (nameless.reason, outside.reason) == ("INVALID_JOB_ID", "RANK_OUT_OF_RANGE")
    await agent.iterate()


async def test_an_invalid_announcement_refuses_its_rank(client: Client) -> None:
    await client.register()
    agent = FakeAgent(client)
    await agent.hello()
    message = agent.joined(agent.ranks[ALL_PLACES[0]])
    message.iteration = -2
    await agent.send(rank_joined=message)
    await agent.until(lambda: bool(agent.refused))
    assert (agent.refused[0].reason, agent.refused[0].rank) == ("INVALID_FIELD", message.rank)
    assert agent.refused[0].metadata["field"] == "rank_joined.iteration"
    message.ClearField("rank")
    await agent.send(rank_joined=message)
    await agent.until(lambda: bool(agent.messages_refused))
    assert agent.messages_refused[0].field == "rank_joined.rank"
    assert not agent.messages_refused[0].HasField("rank"), "not the first one"
    await agent.join_ranks()
    assert len(agent.accepted) == len(ALL_PLACES)


async def test_a_fault_of_the_coordinator_costs_one_message(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await joined(client)

    def fail(*_: object, **__: object) -> None:
        raise OverflowError("made up")

    rank = agent.ranks[ALL_PLACES[0]]
    with capture_logs() as logs, monkeypatch.context() as patch:
        patch.setattr(agent_service, "in_force_from_proto", fail)
        patch.setattr(agent_service, "telemetry_from_proto", fail)
        for _ in range(3):
            await agent.send(plan_in_force={"job_id": "job", "rank": agent.place(rank.place)})
        rank.begin()
        await agent.send(telemetry=agent.telemetry(rank))
        await agent.until(lambda: agent.acknowledged == agent.sequence)
    assert {refused.reason for refused in agent.messages_refused} == {"INTERNAL"}
    assert [refused.reason for refused in agent.telemetry_refused] == ["INTERNAL"]
    traces = [line for line in logs if line["event"] == "unexpected error"]
    assert [line["where"] for line in traces] == ["PlanInForce", "TelemetryBatch"], "each kind once"
    assert all(isinstance(line["exc_info"], OverflowError) for line in traces)
    await agent.iterate()
