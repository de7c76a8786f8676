"""Agents of other versions, and faulty agents: only the message that is not understood is refused, with a
reason."""

import math

import pytest
from structlog.testing import capture_logs

from perseus.service.api import agent_service
from perseus.v1 import job_pb2, rank_pb2
from perseus.v1.agent_service_pb2 import ConnectRequest, MessageRefused
from tests.service.grpc_fakes import ALL_PLACES, Client, FakeAgent, joined, sent

# Field 99 of the oneof, with its own message in it.
NEWER = ConnectRequest.FromString(b"\x9a\x06\x02\x08\x01")


async def test_a_newer_agent_is_served_and_its_unknown_messages_are_refused(client: Client) -> None:
    await client.register()
    with capture_logs() as logs:
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


async def test_an_agent_without_a_version_speaks_the_first(client: Client) -> None:
    with capture_logs() as logs:
        await FakeAgent(client).hello(protocol_version=0)
    assert [line for line in logs if "protocol_version" in line] == []


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


async def test_only_the_invalid_messages_among_hundreds_are_refused(client: Client) -> None:
    agent = await joined(client)
    iterations = 100
    for number in range(iterations):
        if number != 40:
            await agent.iterate()
            continue
        for rank in agent.ranks.values():
            rank.begin()
            batch = agent.telemetry(rank)
            if rank.place == ALL_PLACES[1]:
                bad_sequence = batch.sequence
                batch.iterations.duration_s[0] = math.nan
            await agent.send(telemetry=batch)
        for outside in ({"stage": 9}, {"pipeline": -1}):
            finished = rank_pb2.RANK_LEFT_REASON_FINISHED
            await agent.send(rank_left={"job_id": "job", "rank": outside, "reason": finished})
        await agent.until(lambda: agent.acknowledged >= agent.sequence)
    assert agent.sequence == iterations * len(ALL_PLACES)
    assert agent.acknowledged == agent.sequence
    (refused,) = agent.telemetry_refused
    assert (refused.sequence, refused.reason) == (bad_sequence, "INVALID_FIELD")
    assert (refused.field, refused.found) == ("iterations.duration_s[0]", "nan")
    assert refused.expected == "1e-09 to 1e+06"
    assert [refused.reason for refused in agent.messages_refused] == ["RANK_OUT_OF_RANGE"] * 2
    assert not agent.reader.done()
    assert [rank.iteration for rank in await client.ranks()] == [iterations - 1] * 4
    assert (await client.job()).state == job_pb2.JOB_STATE_PLANNED
    assert await client.rank_states() == {rank_pb2.RANK_STATE_CONNECTED}


@pytest.mark.parametrize(
    ("kind", "values", "field"),
    [
        ("plan_answer", {"version": 0}, "plan_answer.version"),
        ("rank_left", {"reason": 0}, "rank_left.reason"),
        ("gpu_error", {"reason": 99}, "gpu_error.reason"),
        ("plan_in_force", {"version": 2**63 - 1}, "plan_in_force.version"),
    ],
)
async def test_an_invalid_message_is_refused_with_its_rank_if_it_names_one(
    client: Client, kind: str, values: dict[str, int], field: str
) -> None:
    agent = await joined(client)
    place = agent.place(ALL_PLACES[1])
    for about in ({"job_id": "job", "rank": place}, {"job_id": "job"}, {"job_id": "Not a job's"}):
        await agent.send(sent(**{kind: about | values}))
    await agent.until(lambda: len(agent.messages_refused) == 3)
    first, nowhere, nameless = agent.messages_refused
    assert (first.reason, first.field, first.rank) == ("INVALID_FIELD", field, place)
    assert not nowhere.HasField("rank")
    assert nameless.reason == "INVALID_JOB_ID"
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
