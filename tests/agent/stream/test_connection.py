"""Reconnection: the backoff, and a coordinator that misbehaves on a real stream."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from time import time
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status
from structlog.testing import capture_logs

from perseus.agent.rank.messages import AgentIdentity, Incoming, TelemetryAck, Welcome
from perseus.agent.stream.connection import Connection
from perseus.agent.stream.translate import PROTOCOL_VERSION
from perseus.service.api.elsewhere import Elsewhere
from perseus.service.domain.members import Fleet, Member, Slot
from perseus.service.domain.messages import time_to_proto
from perseus.tls.channels import Channels
from perseus.tls.tokens import TokenSource
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import agent_service_pb2_grpc, computation_pb2, rank_pb2
from tests.agent.coordinator_stub import until
from tests.ports import free_port

Script = Callable[[AsyncIterator[wire.ConnectRequest]], AsyncIterator[wire.ConnectResponse]]
AGENT = AgentIdentity("instance", "0", "host")


def welcome(lease_s: float) -> wire.ConnectResponse:
    return wire.ConnectResponse(welcome=wire.Welcome(epoch="e", lease_s=lease_s))


class Witness:
    """A `Handler` that records its calls."""

    def __init__(self) -> None:
        self.seen: list[Incoming | str] = []

    def connected(self, welcome: Welcome) -> None:
        self.seen.append(welcome)

    def received(self, message: Incoming) -> None:
        self.seen.append(message)

    def disconnected(self) -> None:
        self.seen.append("disconnected")


class ScriptedCoordinator(agent_service_pb2_grpc.AgentServiceServicer):
    """A server whose streams follow the scripts in order, and then repeat the last."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)

    async def Connect(  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[wire.ConnectRequest],
        context: grpc.aio.ServicerContext[wire.ConnectRequest, wire.ConnectResponse],
    ) -> AsyncIterator[wire.ConnectResponse]:
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        async for response in script(request_iterator):
            yield response


async def converse(witness: Witness, condition: Callable[[], bool], *scripts: Script) -> None:
    server = grpc.aio.server()
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(ScriptedCoordinator(*scripts), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    running = asyncio.create_task(
        Connection(Channels(f"127.0.0.1:{port}"), AGENT, witness, lambda: 0.01).run()
    )
    try:
        await until(condition, "the conversation")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(None)


async def silent(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
    yield welcome(lease_s=0.2)
    await asyncio.sleep(30)


async def test_silence_for_a_lease_ends_the_stream() -> None:
    witness = Witness()
    await converse(witness, lambda: len(witness.seen) >= 3, silent)
    assert witness.seen[:3] == [Welcome("e", 0.2, 0), "disconnected", Welcome("e", 0.2, 0)]


async def test_answered_heartbeats_keep_the_stream() -> None:
    heartbeats = 0

    async def answering(
        requests: AsyncIterator[wire.ConnectRequest],
    ) -> AsyncIterator[wire.ConnectResponse]:
        nonlocal heartbeats
        async for request in requests:
            if request.WhichOneof("message") == "hello":
                yield welcome(lease_s=1.0)
            else:
                heartbeats += 1
                yield wire.ConnectResponse(heartbeat=wire.Heartbeat())

    witness = Witness()
    await converse(witness, lambda: heartbeats >= 4, answering)
    assert witness.seen.count("disconnected") == 1, "when the test ended it"


async def test_heartbeats_tell_how_far_the_clock_is_ahead_of_the_coordinators() -> None:
    skew_s, reports_s = 1e6, list[float | None]()

    async def answering(
        requests: AsyncIterator[wire.ConnectRequest],
    ) -> AsyncIterator[wire.ConnectResponse]:
        async for request in requests:
            if request.WhichOneof("message") == "hello":
                yield welcome(lease_s=1.0)
                continue
            beat = request.heartbeat
            reports_s.append(beat.clock_ahead_s if beat.HasField("clock_ahead_s") else None)
            yield wire.ConnectResponse(heartbeat=wire.Heartbeat())  # unprompted: without the time
            yield wire.ConnectResponse(heartbeat=wire.Heartbeat(current_time=time_to_proto(time() - skew_s)))

    await converse(Witness(), lambda: len(reports_s) >= 3, answering)
    assert reports_s[0] is None
    assert reports_s[1:3] == [pytest.approx(skew_s, rel=0.01)] * 2


async def test_streams_that_end_fail_or_begin_wrongly_are_followed_by_another() -> None:
    async def ends(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
        return
        yield

    async def fails(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
        raise RuntimeError
        yield

    async def impolite(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
        yield wire.ConnectResponse(heartbeat=wire.Heartbeat())

    async def malformed(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
        yield welcome(lease_s=-1)

    witness = Witness()
    await converse(witness, lambda: len(witness.seen) > 0, ends, fails, impolite, malformed, silent)
    assert witness.seen[0] == Welcome("e", 0.2, 0)


# Field 99 of the oneof, containing a message.
NEWER = wire.ConnectResponse.FromString(b"\x9a\x06\x02\x08\x01")
RANK = rank_pb2.RankCoordinates(stage=1)


async def test_unknown_messages_of_a_newer_coordinator_are_refused() -> None:
    """Each malformed or unknown message is refused individually, even before the welcome."""
    reported: list[wire.MessageRefused] = []
    hello = wire.Hello()
    odd_kind = computation_pb2.Computation()
    odd_kind.kind = 42  # type: ignore[assignment] # a value of a newer contract
    order = computation_pb2.StageOrder(computations=[odd_kind])
    refused = [
        wire.ConnectResponse(),
        wire.ConnectResponse(telemetry_ack=wire.TelemetryAck(sequence=-1)),
        wire.ConnectResponse(rank_accepted=wire.RankAccepted(job_id="job", rank=RANK, order=order)),
        wire.ConnectResponse(plan_offer=wire.PlanOffer(job_id="job", rank=RANK, version=1, lease_s=3)),
        wire.ConnectResponse(plan_offer=wire.PlanOffer(job_id="job", version=1, lease_s=3)),
        wire.ConnectResponse(rank_refused=wire.RankRefused(job_id="job", reason="R")),
    ]

    async def newer(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
        hello.CopyFrom((await anext(requests)).hello)
        yield NEWER
        yield wire.ConnectResponse(welcome=wire.Welcome(epoch="e", lease_s=30, protocol_version=9))
        for _ in range(3):
            yield NEWER
        for response in refused:
            yield response
        yield wire.ConnectResponse(telemetry_ack=wire.TelemetryAck(sequence=1))
        async for request in requests:
            reported.extend([request.message_refused] if request.HasField("message_refused") else [])

    witness = Witness()
    with capture_logs() as logs:
        await converse(witness, lambda: len(witness.seen) >= 2 and len(reported) >= 10, newer)
    assert witness.seen[:2] == [Welcome("e", 30.0, 0, 9), TelemetryAck(1)]
    assert witness.seen.count("disconnected") == 1, "when the test ended it"
    assert hello.protocol_version == PROTOCOL_VERSION
    assert [(each.reason, each.field) for each in reported] == [
        *[("UNKNOWN_MESSAGE", "99")] * 4,
        ("EMPTY_MESSAGE", "message"),
        ("INVALID_FIELD", "telemetry_ack.sequence"),
        ("INVALID_FIELD", "rank_accepted.order.computations[0].kind"),
        ("INVALID_FIELD", "plan_offer.clocks"),
        ("INVALID_FIELD", "plan_offer.rank"),
        ("INVALID_FIELD", "rank_refused.rank"),
    ]
    assert reported[0].found == "field 99"
    assert reported[6].found == "42"
    assert [(each.job_id, each.rank) for each in reported if each.HasField("rank")] == [("job", RANK)] * 2
    warnings = [line for line in logs if line["log_level"] == "warning"]
    (version,) = [line for line in warnings if "protocol_version" in line]
    assert (version["protocol_version"], version["own_protocol_version"]) == (9, PROTOCOL_VERSION)
    output = [line["reason"] for line in warnings if line["event"] == "message of the coordinator refused"]
    assert len(output) == 7, "each kind once"
    assert "99: expected a message of protocol version 1, found field 99" in output


@pytest.mark.parametrize("lease_s", [1e308, 5e-324, math.nan])
async def test_a_welcome_with_an_invalid_lease_is_refused(lease_s: float) -> None:
    async def odd(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
        yield welcome(lease_s=lease_s)

    witness = Witness()
    await converse(witness, lambda: bool(witness.seen), odd, silent)
    assert witness.seen[0] == Welcome("e", 0.2, 0)


async def test_the_latest_commit_marker_is_sent_on_the_next_stream() -> None:
    output: list[str] = []

    async def script(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
        output.append((await anext(requests)).hello.commit_marker)
        yield wire.ConnectResponse(
            welcome=wire.Welcome(epoch="e", lease_s=9, commit_marker=f"w{len(output)}")
        )
        if len(output) == 1:
            yield wire.ConnectResponse(telemetry_ack=wire.TelemetryAck(sequence=0, commit_marker="a"))
        elif len(output) == 2:
            offer = wire.PlanOffer(
                commit_marker="o", version=-1
            )  # the offer is refused, but its marker counts
            yield wire.ConnectResponse(plan_offer=offer)
            yield wire.ConnectResponse(heartbeat=wire.Heartbeat())
        elif len(output) == 4:
            yield wire.ConnectResponse(telemetry_ack=wire.TelemetryAck(sequence=0, commit_marker="x" * 257))

    await converse(Witness(), lambda: len(output) >= 5, script)
    assert output[:5] == ["", "a", "o", "w3", "w4"]


async def test_the_instance_key_is_sent_on_every_further_stream() -> None:
    output: list[str] = []
    reported = ["key", "", "x" * 257, "newer", ""]

    async def script(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
        output.append((await anext(requests)).hello.instance_key)
        key = reported[min(len(output), len(reported)) - 1]
        yield wire.ConnectResponse(welcome=wire.Welcome(epoch="e", lease_s=9, instance_key=key))

    await converse(Witness(), lambda: len(output) >= 5, script)
    assert output[:5] == ["", "key", "key", "key", "newer"]


async def test_a_stream_stays_with_the_slot_of_its_first_welcome() -> None:
    output: list[int | None] = []
    slots = [(0, 0), (0, 1), (2, 3), (1, 3), (2, 3)]

    async def script(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
        hello = (await anext(requests)).hello
        output.append(hello.slot if hello.HasField("slot") else None)
        slot, slot_count = slots[min(len(output), len(slots)) - 1]
        yield wire.ConnectResponse(
            welcome=wire.Welcome(epoch="e", lease_s=9, slot=slot, slot_count=slot_count)
        )

    witness = Witness()
    await converse(witness, lambda: len(output) >= 6, script)
    assert output[:6] == [None, None, None, 2, 2, 2], "a fleet with one slot needs no slot"
    welcomes = [each.slot for each in witness.seen if isinstance(each, Welcome)]
    assert welcomes[:4] == [0, 0, 2, 2], "the one for another slot is not accepted"


async def test_no_attempt_is_made_before_the_retry_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a refusal with a retry delay, the next attempt waits for that delay."""
    pauses_s: list[float] = []
    sleep = asyncio.sleep

    async def noting(delay_s: float) -> None:
        pauses_s.append(delay_s)
        await sleep(delay_s if delay_s not in (5.5, 300.0) else 0)

    full = Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="too many streams")
    full.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=5, nanos=500_000_000)))
    ever = Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="come never again")
    ever.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=10**9)))
    statuses = [full, full, ever]

    class Full(agent_service_pb2_grpc.AgentServiceServicer):
        async def Connect(  # noqa: N802 - gRPC's name
            self,
            request_iterator: AsyncIterator[wire.ConnectRequest],
            context: grpc.aio.ServicerContext[wire.ConnectRequest, wire.ConnectResponse],
        ) -> AsyncIterator[wire.ConnectResponse]:
            await anext(request_iterator)  # a call that ends during a write ends as INTERNAL
            if statuses:
                await context.abort_with_status(rpc_status.to_status(statuses.pop(0)))
            yield welcome(30.0)
            await asyncio.Event().wait()

    server = grpc.aio.server()
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(Full(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    witness = Witness()
    connection = Connection(Channels(f"127.0.0.1:{port}"), AGENT, witness, lambda: 0.0)
    with capture_logs() as logs, monkeypatch.context() as patch:
        patch.setattr("perseus.agent.stream.connection.asyncio.sleep", noting)
        running = asyncio.create_task(connection.run())
        while not witness.seen:
            await sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(None)
    assert [each for each in pauses_s if each in (5.5, 300.0)] == [5.5, 5.5, 300.0]
    assert {line["log_level"] for line in logs} <= {"warning", "info"}, (
        "no error: the refusal had a retry delay"
    )


class Reporting(Witness):
    """A `Handler` that reports of eight ranks as soon as a stream opens, as at an iteration's end."""

    connection: Connection

    def connected(self, welcome: Welcome) -> None:
        super().connected(welcome)
        for number in range(8):
            self.connection.send(wire.TrainerUnmarked(job_id=f"{number}"))


@pytest.mark.parametrize("max_bundle_bytes", [0, 100, 2**20])
async def test_what_ranks_report_together_is_sent_together_if_the_coordinator_takes_it(
    max_bundle_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses_s: list[float] = []
    heard: list[wire.ConnectRequest] = []
    sleep = asyncio.sleep

    async def hurried(delay_s: float) -> None:
        pauses_s.append(delay_s)
        await sleep(0 if delay_s < 1 else delay_s)  # the next heartbeat is far away

    async def script(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
        assert (await anext(requests)).hello.max_bundle_bytes == 2**20
        yield wire.ConnectResponse(
            welcome=wire.Welcome(epoch="e", lease_s=9000, max_bundle_bytes=max_bundle_bytes)
        )
        async for request in requests:
            heard.append(request)  # noqa: PERF401 - it is read meanwhile

    witness = Reporting()

    def reported() -> list[str]:
        each = [
            one for request in heard for one in ([*request.bundle.messages] or [request])
        ]  # an unbundled one has no messages
        return [one.trainer_unmarked.job_id for one in each if one.HasField("trainer_unmarked")]

    server = grpc.aio.server()
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(ScriptedCoordinator(script), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    witness.connection = Connection(Channels(f"127.0.0.1:{port}"), AGENT, witness, lambda: 0.0)
    with monkeypatch.context() as patch:
        patch.setattr("perseus.agent.stream.connection.asyncio.sleep", hurried)
        running = asyncio.create_task(witness.connection.run())
        while len(reported()) < 8:
            await sleep(0.01)
        witness.connection.close("done")
        witness.connection.send(wire.TrainerUnmarked(job_id="too late"))
        while not any(request.HasField("goodbye") for request in heard):
            await sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(None)
    assert reported() == [f"{number}" for number in range(8)]
    sizes = [len(request.bundle.messages) for request in heard]
    if max_bundle_bytes:
        assert 0.005 in pauses_s
        assert max(sizes) > 1
        assert all(request.ByteSize() <= max_bundle_bytes for request in heard)
        assert (len(heard) == 2) == (max_bundle_bytes > 100), "all of them, and the goodbye"
    else:
        assert 0.005 not in pauses_s
        assert max(sizes) == 0


async def test_a_bundle_of_the_coordinator_is_taken_apart() -> None:
    reported: list[wire.MessageRefused] = []
    acknowledged = [
        wire.ConnectResponse(telemetry_ack=wire.TelemetryAck(sequence=number)) for number in range(3)
    ]

    def bundle(*messages: wire.ConnectResponse) -> wire.ConnectResponse:
        return wire.ConnectResponse(bundle=wire.ConnectResponseBundle(messages=messages))

    async def script(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
        yield welcome(9000)
        yield bundle(acknowledged[0], NEWER, bundle(acknowledged[0]), acknowledged[1])
        yield bundle(*acknowledged * 100)
        yield acknowledged[2]
        async for request in requests:
            reported.extend([request.message_refused] if request.HasField("message_refused") else [])

    witness = Witness()
    await converse(witness, lambda: len(witness.seen) >= 4 and len(reported) >= 3, script)
    assert witness.seen[1:4] == [TelemetryAck(0), TelemetryAck(1), TelemetryAck(2)]
    assert [(each.reason, each.field) for each in reported] == [
        ("UNKNOWN_MESSAGE", "99"),
        ("INVALID_FIELD", "bundle"),
        ("INVALID_FIELD", "bundle.messages"),
    ]


async def test_a_repeated_refusal_is_logged_once_until_a_stream_opens() -> None:
    attempts = 0

    class Refusing(agent_service_pb2_grpc.AgentServiceServicer):
        async def Connect(  # noqa: N802 - gRPC's name
            self,
            request_iterator: AsyncIterator[wire.ConnectRequest],
            context: grpc.aio.ServicerContext[wire.ConnectRequest, wire.ConnectResponse],
        ) -> AsyncIterator[wire.ConnectResponse]:
            nonlocal attempts
            attempts += 1
            await anext(request_iterator)  # a call that ends during a write ends as INTERNAL
            if attempts == 5:
                yield welcome(30.0)
            text = "token 'a' is revoked" if attempts <= 8 else "token 'a' has expired"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)

    server = grpc.aio.server()
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(Refusing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    token = TokenSource(token="secret", variable="PERSEUS_AGENT_TOKEN")
    connection = Connection(Channels(f"127.0.0.1:{port}", token=token), AGENT, Witness(), lambda: 0.01)
    with capture_logs() as logs:
        running = asyncio.create_task(connection.run())
        await until(lambda: attempts >= 12, "some attempts")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(None)
    origin = "the token is from PERSEUS_AGENT_TOKEN"
    revoked, expired = (
        f"UNAUTHENTICATED: token 'a' {what}; {origin}" for what in ("is revoked", "has expired")
    )
    of_both = ("coordinator refuses the stream", "no coordinator")
    assert [(line["event"], line.get("reason")) for line in logs] == [
        *((event, revoked) for event in of_both),
        ("connected", None),
        *((event, revoked) for event in of_both),
        *((event, expired) for event in of_both),
    ]


async def test_the_log_names_the_coordinator_that_did_not_answer() -> None:
    dead = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    connection = Connection(Channels(",".join(dead)), AGENT, Witness(), lambda: 0.01)
    with capture_logs() as logs:
        running = asyncio.create_task(connection.run())
        await until(lambda: bool(logs), "both were tried")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (logs[0]["event"], logs[0]["coordinator"]) == ("no coordinator", dead[1])
    assert dead[1] in logs[0]["reason"]


class ClumsyWitness(Witness):
    """A handler with bugs."""

    def __init__(self, on_connected: bool) -> None:
        super().__init__()
        self._on_connected = on_connected
        self.mistake_count = 0

    def connected(self, welcome: Welcome) -> None:
        super().connected(welcome)
        if self._on_connected and self.seen.count(welcome) == 1:
            self._make_a_mistake()

    def received(self, message: Incoming) -> None:
        super().received(message)
        if message == TelemetryAck(1):
            self._make_a_mistake()

    def _make_a_mistake(self) -> None:
        self.mistake_count += 1
        raise KeyError


async def test_a_bug_in_one_message_does_not_end_the_stream() -> None:
    async def acknowledges(
        requests: AsyncIterator[wire.ConnectRequest],
    ) -> AsyncIterator[wire.ConnectResponse]:
        yield welcome(lease_s=30)
        yield wire.ConnectResponse(telemetry_ack=wire.TelemetryAck(sequence=1))
        yield wire.ConnectResponse(telemetry_ack=wire.TelemetryAck(sequence=2))
        await asyncio.sleep(30)

    witness = ClumsyWitness(on_connected=False)
    await converse(witness, lambda: TelemetryAck(2) in witness.seen, acknowledges)
    assert witness.mistake_count == 1
    assert "disconnected" not in witness.seen[:3]


async def test_a_bug_in_a_stream_ends_only_that_stream() -> None:
    witness = ClumsyWitness(on_connected=True)
    await converse(witness, lambda: len(witness.seen) >= 3, silent)
    assert witness.mistake_count == 1
    assert witness.seen[:3] == [Welcome("e", 0.2, 0), "disconnected", Welcome("e", 0.2, 0)]


async def test_a_call_that_grpc_cancels_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unrequested cancellation would otherwise end the agent's connection silently and for good."""
    stream, count = Connection._stream, 0

    async def cancelled_at_first(self: Connection, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 1:
            raise asyncio.CancelledError
        return await stream(self, *arguments)

    monkeypatch.setattr(Connection, "_stream", cancelled_at_first)
    witness = Witness()
    await converse(witness, lambda: len(witness.seen) > 0, silent)
    assert witness.seen[0] == Welcome("e", 0.2, 0)


async def test_a_channel_that_can_not_be_opened_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, count = Channels.open, 0

    def open_late(self: Channels, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 1:
            raise OSError(24, "too many open files")
        return opened(self, *arguments)

    monkeypatch.setattr(Channels, "open", open_late)
    witness = Witness()
    await converse(witness, lambda: len(witness.seen) > 0, silent)
    assert count >= 2


def refused_rank(lease_epoch: int) -> wire.ConnectResponse:
    return wire.ConnectResponse(
        rank_refused=wire.RankRefused(job_id="job", rank=RANK, reason="R", lease_epoch=lease_epoch)
    )


async def test_a_coordinator_from_which_another_has_taken_over_is_not_heeded() -> None:
    """On the next stream, too, which may be to another coordinator."""
    reported: list[wire.MessageRefused] = []
    epochs = iter([[3, 4], [3, 4, 0]])

    async def script(requests: AsyncIterator[wire.ConnectRequest]) -> AsyncIterator[wire.ConnectResponse]:
        await anext(requests)
        yield welcome(lease_s=9)
        for lease_epoch in next(epochs):
            yield refused_rank(lease_epoch)
        if reported or witness.seen.count("disconnected"):
            async for request in requests:
                reported.extend([request.message_refused] if request.HasField("message_refused") else [])

    witness = Witness()
    await converse(witness, lambda: len(witness.seen) >= 7 and bool(reported), script)
    heeded = [type(each).__name__ if not isinstance(each, str) else each for each in witness.seen]
    assert heeded[:7] == [
        *("Welcome", "RankRefused", "RankRefused", "disconnected"),
        *("Welcome", "RankRefused", "RankRefused"),
    ]
    assert [(each.reason, each.field, each.expected, each.found) for each in reported] == [
        ("LEASE_EPOCH_PASSED", "lease_epoch", "at least 4", "3")
    ]


async def test_the_one_that_serves_is_found_from_one_that_is_gone_and_one_that_stands_by() -> None:
    servers = [grpc.aio.server(), grpc.aio.server()]
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(ScriptedCoordinator(silent), servers[0])
    serving, standing_by = (server.add_insecure_port("127.0.0.1:0") for server in servers)
    fleet = Fleet(members=[Member("other", f"127.0.0.1:{serving}")], slots=[Slot(0, "other", 1)])
    servers[1].add_generic_rpc_handlers((Elsewhere(fleet),))
    for server in servers:
        await server.start()
    witness = Witness()
    channels = Channels(f"127.0.0.1:1,127.0.0.1:{standing_by}")
    running = asyncio.create_task(Connection(channels, AGENT, witness, lambda: 1.0).run())
    try:
        await until(lambda: bool(witness.seen), "the welcome")
        assert channels.address == f"127.0.0.1:{serving}"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for server in servers:
            await server.stop(None)
