"""Reconnection: the backoff, and a coordinator that misbehaves on a real stream."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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
from perseus.agent.stream.coordinator import Coordinator
from perseus.agent.stream.translate import PROTOCOL_VERSION
from perseus.service.domain.messages import time_to_proto
from perseus.tls.channels import Channels
from perseus.tls.tokens import TokenSource
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import agent_service_pb2_grpc, computation_pb2, rank_pb2
from tests.agent.coordinator_stub import until
from tests.ports import free_port

Requests = AsyncIterator[wire.ConnectRequest]
Responses = AsyncIterator[wire.ConnectResponse | Status]
Script = Callable[[Requests], Responses]
AGENT = AgentIdentity("instance", "0", "host")


def welcome(lease_s: float, **more: Any) -> wire.ConnectResponse:
    return wire.ConnectResponse(welcome=wire.Welcome(epoch="e", lease_s=lease_s, **more))


def acknowledged(sequence: int, commit_marker: str = "") -> wire.ConnectResponse:
    ack = wire.TelemetryAck(sequence=sequence, commit_marker=commit_marker)
    return wire.ConnectResponse(telemetry_ack=ack)


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
    """A server whose streams follow the scripts in order, and then repeat the last; a status ends one."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)

    async def Connect(  # noqa: N802 - gRPC's name
        self,
        request_iterator: Requests,
        context: grpc.aio.ServicerContext[wire.ConnectRequest, wire.ConnectResponse],
    ) -> AsyncIterator[wire.ConnectResponse]:
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        async for response in script(request_iterator):
            if isinstance(response, Status):
                await context.abort_with_status(rpc_status.to_status(response))
            else:
                yield response


@asynccontextmanager
async def serving(*scripts: Script) -> AsyncIterator[str]:
    """Yield the address of a coordinator with these scripts."""
    server = grpc.aio.server()
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(ScriptedCoordinator(*scripts), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def running(connection: Connection | Coordinator) -> AsyncIterator[None]:
    task = asyncio.create_task(connection.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def converse(
    witness: Witness,
    condition: Callable[[], bool],
    *scripts: Script,
    token: TokenSource | None = None,
    random: float = 0.01,
) -> None:
    async with (
        serving(*scripts) as address,
        running(Connection(Channels(address, token=token), AGENT, witness, lambda: random)),
    ):
        await until(condition, "the conversation")


async def silent(requests: Requests) -> Responses:
    yield welcome(lease_s=0.2)
    await asyncio.sleep(30)


async def test_silence_for_a_lease_ends_the_stream() -> None:
    witness = Witness()
    await converse(witness, lambda: len(witness.seen) >= 3, silent)
    assert witness.seen[:3] == [Welcome("e", 0.2, 0), "disconnected", Welcome("e", 0.2, 0)]


async def test_answered_heartbeats_keep_the_stream_and_tell_how_far_the_clock_is_ahead_of_theirs() -> None:
    skew_s, reports_s = 1e6, list[float | None]()

    async def answering(requests: Requests) -> Responses:
        async for request in requests:
            if request.WhichOneof("message") == "hello":
                yield welcome(lease_s=1.0)
                continue
            beat = request.heartbeat
            reports_s.append(beat.clock_ahead_s if beat.HasField("clock_ahead_s") else None)
            yield wire.ConnectResponse(heartbeat=wire.Heartbeat())  # unprompted: without the time
            yield wire.ConnectResponse(heartbeat=wire.Heartbeat(current_time=time_to_proto(time() - skew_s)))

    witness = Witness()
    await converse(witness, lambda: len(reports_s) >= 4, answering)
    assert reports_s[0] is None
    assert reports_s[1:4] == [pytest.approx(skew_s, rel=0.01)] * 3
    assert witness.seen.count("disconnected") == 1, "when the test ended it"


async def test_streams_that_end_fail_or_begin_wrongly_are_followed_by_another() -> None:
    async def ends(requests: Requests) -> Responses:
        return
        yield

    async def fails(requests: Requests) -> Responses:
        raise RuntimeError
        yield

    async def impolite(requests: Requests) -> Responses:
        yield wire.ConnectResponse(heartbeat=wire.Heartbeat())

    async def malformed(requests: Requests) -> Responses:
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

    async def newer(requests: Requests) -> Responses:
        hello.CopyFrom((await anext(requests)).hello)
        yield NEWER
        yield welcome(30, protocol_version=9)
        for _ in range(3):
            yield NEWER
        for response in refused:
            yield response
        yield acknowledged(1)
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


async def hellos(
    count: int, respond: Callable[[int], list[wire.ConnectResponse]], witness: Witness | None = None
) -> list[wire.Hello]:
    """Return the first hellos to a coordinator that responds so on the n-th stream, and ends it."""
    heard: list[wire.Hello] = []

    async def script(requests: Requests) -> Responses:
        heard.append((await anext(requests)).hello)
        for response in respond(min(len(heard), count) - 1):
            yield response

    await converse(witness or Witness(), lambda: len(heard) >= count, script)
    return heard[:count]


async def test_the_latest_commit_marker_is_sent_on_the_next_stream() -> None:
    further = [
        [acknowledged(0, "a")],
        # The offer is refused, but its marker counts.
        [wire.ConnectResponse(plan_offer=wire.PlanOffer(commit_marker="o", version=-1)), acknowledged(0)],
        [],
        [acknowledged(0, "x" * 257)],
        [],
    ]
    found = await hellos(5, lambda number: [welcome(9, commit_marker=f"w{number}"), *further[number]])
    assert [hello.commit_marker for hello in found] == ["", "a", "o", "w2", "w3"]


async def test_the_instance_key_is_sent_on_every_further_stream() -> None:
    keys = ["key", "", "x" * 257, "newer", ""]
    found = await hellos(5, lambda number: [welcome(9, instance_key=keys[number])])
    assert [hello.instance_key for hello in found] == ["", "key", "key", "key", "newer"]


async def test_a_stream_stays_with_the_slot_of_its_first_welcome() -> None:
    slots, witness = [(0, 0), (0, 1), (2, 3), (1, 3), (2, 3), (2, 3)], Witness()
    found = await hellos(
        6, lambda number: [welcome(9, slot=slots[number][0], slot_count=slots[number][1])], witness
    )
    expected = [None, None, None, 2, 2, 2]  # a fleet with one slot needs none
    assert [each.slot if each.HasField("slot") else None for each in found] == expected
    welcomes = [each.slot for each in witness.seen if isinstance(each, Welcome)]
    assert welcomes[:4] == [0, 0, 2, 2], "the one for another slot is not accepted"


def refusal(message: str, **delay: int) -> Status:
    status = Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message=message)
    status.details.add().Pack(RetryInfo(retry_delay=Duration(**delay)))
    return status


@pytest.fixture
def pauses_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that connections make, which take no time, unless for a heartbeat."""
    pauses_s: list[float] = []
    sleep = asyncio.sleep

    async def hurried(delay_s: float) -> None:
        pauses_s.append(delay_s)
        await sleep(delay_s if 1 < delay_s < 4000 and delay_s not in (5.5, 300.0) else 0)

    monkeypatch.setattr("perseus.agent.stream.connection.asyncio.sleep", hurried)
    return pauses_s


async def test_no_attempt_is_made_before_the_retry_delay(pauses_s: list[float]) -> None:
    """After a refusal with a retry delay, the next attempt waits for that delay."""
    full = refusal("too many streams", seconds=5, nanos=500_000_000)
    statuses = [full, full, refusal("come never again", seconds=10**9)]

    async def refuses(requests: Requests) -> Responses:
        await anext(requests)  # a call that ends during a write ends as INTERNAL
        if statuses:
            yield statuses.pop(0)
        yield welcome(30.0)
        await asyncio.Event().wait()

    witness = Witness()
    with capture_logs() as logs:
        await converse(witness, lambda: bool(witness.seen), refuses, random=0.0)
    assert [each for each in pauses_s if each in (5.5, 300.0)] == [5.5, 5.5, 300.0]
    assert {line["log_level"] for line in logs} <= {"warning", "info"}, "the refusal had a retry delay"


class Reporting(Witness):
    """A `Handler` that reports of eight ranks as soon as a stream opens, as at an iteration's end."""

    connection: Connection

    def connected(self, welcome: Welcome) -> None:
        super().connected(welcome)
        for number in range(8):
            self.connection.send(wire.TrainerUnmarked(job_id=f"{number}"))


@pytest.mark.parametrize("max_bundle_bytes", [0, 100, 2**20])
async def test_what_ranks_report_together_is_sent_together_if_the_coordinator_takes_it(
    max_bundle_bytes: int, pauses_s: list[float]
) -> None:
    heard: list[wire.ConnectRequest] = []

    async def script(requests: Requests) -> Responses:
        assert (await anext(requests)).hello.max_bundle_bytes == 2**20
        yield welcome(9000, max_bundle_bytes=max_bundle_bytes)
        async for request in requests:
            heard.append(request)  # noqa: PERF401 - it is read meanwhile

    witness = Reporting()

    def reported() -> list[str]:
        each = [
            one for request in heard for one in ([*request.bundle.messages] or [request])
        ]  # an unbundled one has no messages
        return [one.trainer_unmarked.job_id for one in each if one.HasField("trainer_unmarked")]

    async with serving(script) as address:
        witness.connection = Connection(Channels(address), AGENT, witness, lambda: 0.0)
        async with running(witness.connection):
            await until(lambda: len(reported()) >= 8, "the reports")
            witness.connection.close("done")
            witness.connection.send(wire.TrainerUnmarked(job_id="too late"))
            await until(lambda: any(request.HasField("goodbye") for request in heard), "the goodbye")
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
    acks = [acknowledged(number) for number in range(3)]

    def bundle(*messages: wire.ConnectResponse) -> wire.ConnectResponse:
        return wire.ConnectResponse(bundle=wire.ConnectResponseBundle(messages=messages))

    async def script(requests: Requests) -> Responses:
        yield welcome(9000)
        yield bundle(acks[0], NEWER, bundle(acks[0]), acks[1])
        yield bundle(*acks * 100)
        yield acks[2]
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

    async def refuses(requests: Requests) -> Responses:
        nonlocal attempts
        attempts += 1
        await anext(requests)  # a call that ends during a write ends as INTERNAL
        if attempts == 5:
            yield welcome(30.0)
        text = "token 'a' is revoked" if attempts <= 8 else "token 'a' has expired"
        yield Status(code=grpc.StatusCode.UNAUTHENTICATED.value[0], message=text)

    token = TokenSource(token="secret", variable="PERSEUS_AGENT_TOKEN")
    with capture_logs() as logs:
        await converse(Witness(), lambda: attempts >= 12, refuses, token=token)
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
    with capture_logs() as logs:
        async with running(Connection(Channels(",".join(dead)), AGENT, Witness(), lambda: 0.01)):
            await until(lambda: bool(logs), "both were tried")
    assert (logs[0]["event"], logs[0]["coordinator"]) == ("no coordinator", dead[1])
    assert dead[1] in logs[0]["reason"]


class ClumsyWitness(Witness):
    """A handler with bugs, at the first welcome and at a message."""

    def connected(self, welcome: Welcome) -> None:
        super().connected(welcome)
        if len(self.seen) == 1:
            raise KeyError

    def received(self, message: Incoming) -> None:
        super().received(message)
        if message == TelemetryAck(1):
            raise KeyError


async def test_a_bug_in_a_stream_ends_only_that_stream_and_one_in_a_message_none() -> None:
    async def acknowledges(requests: Requests) -> Responses:
        yield welcome(lease_s=30)
        yield acknowledged(1)
        yield acknowledged(2)
        await asyncio.sleep(30)

    witness, opened = ClumsyWitness(), Welcome("e", 30.0, 0)
    await converse(witness, lambda: TelemetryAck(2) in witness.seen, acknowledges)
    assert witness.seen[:5] == [opened, "disconnected", opened, TelemetryAck(1), TelemetryAck(2)]


@pytest.mark.parametrize(
    "error",
    [
        # An unrequested cancellation would otherwise end the agent's connection silently and for good.
        pytest.param(asyncio.CancelledError(), id="a call that gRPC cancels"),
        pytest.param(OSError(24, "too many open files"), id="a channel that can't open"),
    ],
)
async def test_what_fails_once_is_retried(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    original, errors = Channels.open, [error]

    def fail_at_first(*arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return original(*arguments)

    monkeypatch.setattr(Channels, "open", fail_at_first)
    witness = Witness()
    await converse(witness, lambda: len(witness.seen) > 0, silent)
    assert (witness.seen[0], errors) == (Welcome("e", 0.2, 0), [])


def refused_rank(lease_epoch: int) -> wire.ConnectResponse:
    return wire.ConnectResponse(
        rank_refused=wire.RankRefused(job_id="job", rank=RANK, reason="R", lease_epoch=lease_epoch)
    )


async def test_a_coordinator_from_which_another_has_taken_over_is_not_heeded() -> None:
    """On the next stream, too, which may be to another coordinator."""
    reported: list[wire.MessageRefused] = []
    epochs = iter([[3, 4], [3, 4, 0]])

    async def script(requests: Requests) -> Responses:
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
