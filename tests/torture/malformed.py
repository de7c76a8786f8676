"""Send malformed messages to a coordinator, which must ignore them.

They go to a real coordinator with TLS and tokens, from a client with an operator's token, so that the access
check refuses none of them. Meanwhile an agent with its own token continues its job, a thread checks health
all the time, and another reads the coordinator's memory.
"""

import asyncio
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from perseus.demo.processes import Coordinator
from perseus.demo.security import Security
from perseus.tls.channels import Channels
from perseus.tls.tokens import TokenSource
from perseus.v1 import token_service_pb2
from perseus.v1.agent_service_pb2 import ConnectRequest
from perseus.v1.token_service_pb2_grpc import TokenServiceStub
from tests.service.grpc_fakes import ALL_PLACES, Client, FakeAgent
from tests.torture import malformed_messages as messages
from tests.torture.report import publish

SHARES = {"bounds": 0.5, "random": 0.3, "order": 0.2}
"""Of all messages."""

_HEALTH_PERIOD_S = 0.05
_SETTLED_SHARE = 0.4
"""Share of the messages after which the coordinator's size is measured for a while."""
_GROWTH_BYTES = 48 * 2**20
"""Tolerated growth: the allocator's, and the jobs' latest iterations and events."""

_ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Makes glibc return freed memory at once, so that resident memory is memory in use."""

_CONNECT = "/perseus.v1.AgentService/Connect"
_SENDERS = 6
_PER_STREAM = 40
_CALL_LIMIT_S = 60.0
_END_LIMIT_S = 5.0
"""For a stream to end by itself: the rate limit may delay it for minutes."""
_REST_S = 5.0
"""Time to free the memory of the last messages."""
_WATCH_S = 0.05
_SOLVE_LIMIT_S = 2.0
"""Solver requests may be as large as permitted, and would take minutes."""
_OWN_ERROR = "Internal error from Core"
"""The client's own error for a stream that ends during a write."""
_FAULTS = ("Traceback", "unexpected error", "quarantined", "the coordinator is late")
_SHOWN_LINES = 25


@dataclass(slots=True)
class Outcome:
    """The outcome.

    Attributes:
        sent: messages, by kind.
        ends: how calls and streams ended, by status or reason.
        settled_bytes, end_bytes: the coordinator's memory.
        iteration_count: iterations of the agent with a job meanwhile.
        problems: violated expectations.
    """

    sent: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    settled_bytes: int = 0
    end_bytes: int = 0
    iteration_count: int = 0
    took_s: float = 0.0
    problems: list[str] = field(default_factory=list)


def torture_malformed(folder: Path, count: int, seed: int) -> Outcome:
    """Send messages to a separate coordinator, and collect its violations."""
    security = Security(folder / "security")
    flags = ("--lease-s=60", "--guard-tolerance-percent=1000", f"--request-limit-s={_SOLVE_LIMIT_S:g}")
    outcome, begun_s = Outcome(), time.monotonic()
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it would log every broken connection
    environment = {**security.of_coordinator(), **_ALLOCATOR}
    with Coordinator(folder, folder / "jobs.db", *flags, environment=environment) as coordinator:
        coordinator.start()
        with _asking_for_health(security, coordinator, outcome):
            asyncio.run(_Attack(coordinator, security, outcome, count, seed).run())
        if (status := coordinator.poll()) is not None:
            outcome.problems.append(f"it ended, with status {status}")
        elif (status := coordinator.terminate()) != 0:
            outcome.problems.append(f"SIGTERM: exit status {status}")
        outcome.problems += _faults(coordinator.log)
    outcome.took_s = time.monotonic() - begun_s
    return outcome


@contextmanager
def _asking_for_health(security: Security, coordinator: Coordinator, outcome: Outcome) -> Iterator[None]:
    """Check health all the time, in a thread, like a probe."""
    is_over = threading.Event()

    def ask() -> None:
        with security.channels(coordinator.address).open_blocking() as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not is_over.wait(_HEALTH_PERIOD_S):
                try:
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=_CALL_LIMIT_S)
                    if answer.status != health_pb2.HealthCheckResponse.SERVING:
                        outcome.problems.append("health: not serving")
                except grpc.RpcError as error:
                    outcome.problems.append(f"health: {error}")

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        is_over.set()
        asking.join()


def _faults(log: Path) -> list[str]:
    """Return log lines on internal errors of the coordinator, each kind once."""
    lines = log.read_text().splitlines()
    found = [
        "\n".join(lines[number : number + _SHOWN_LINES])
        for number, line in enumerate(lines)
        if any(fault in line for fault in _FAULTS)
    ]
    return [f"its log, {count} times: {text[:4000]}" for text, count in Counter(found).most_common(5)]


class _Attack:
    """All messages, and the observers."""

    def __init__(
        self, coordinator: Coordinator, security: Security, outcome: Outcome, count: int, seed: int
    ) -> None:
        self._coordinator = coordinator
        self._security = security
        self._outcome = outcome
        self._count = count
        self._chance = random.Random(seed)
        self._quota = {kind: round(count * share) for kind, share in SHARES.items()}
        self._methods = messages.unary_methods()
        self._is_over = asyncio.Event()

    async def run(self) -> None:
        address = self._coordinator.address
        async with self._security.channels(address).open() as channel:
            secret = await _agent_token(channel)
            async with Channels(
                address, self._security.client_files, TokenSource(token=secret)
            ).open() as own:
                await Client(own).register(job_id="witness")
                agent = FakeAgent(Client(own), "witness", ALL_PLACES, job_id="witness")
                await agent.join()
                witness = asyncio.create_task(self._witness(agent))
                watching = asyncio.create_task(self._watch_memory())
                keeping = asyncio.create_task(self._keep_job(Client(channel)))
                bounds = self._bounds()
                await asyncio.gather(
                    *(self._send_bounds(channel, bounds) for _ in range(_SENDERS)),
                    *(self._send_random(channel) for _ in range(2)),
                    *(self._send_streams(channel, kind) for kind in ("random", "order") for _ in range(2)),
                )
                self._is_over.set()
                await asyncio.gather(witness, watching, keeping)

    # ------------------------------------------------------------------ watching

    async def _witness(self, agent: FakeAgent) -> None:
        """Run a well-behaved agent, which must not be disturbed."""
        while not self._is_over.is_set():
            await agent.iterate()
            self._outcome.iteration_count += 1
            await asyncio.sleep(0.1)
        refused = [*agent.refused, *agent.telemetry_refused, *agent.messages_refused]
        self._outcome.problems += [f"the other agent was refused: {each}" for each in refused]
        await agent.end()

    async def _keep_job(self, client: Client) -> None:
        """Register the job of all the messages whenever one of them has ended it."""
        while not self._is_over.is_set():
            with suppress(grpc.aio.AioRpcError):  # another job has that name for now
                await client.register(job_id=messages.JOB)
            await asyncio.sleep(0.2)

    async def _watch_memory(self) -> None:
        outcome = self._outcome
        settled: list[int] = []
        while not self._is_over.is_set():
            if _SETTLED_SHARE <= outcome.sent.total() / self._count <= _SETTLED_SHARE + 0.3 or not settled:
                settled.append(_memory_bytes(self._coordinator.pid))
            await asyncio.sleep(0.1)
        outcome.settled_bytes = min(settled[1:], default=settled[0])  # large messages leave free memory
        over_s = time.monotonic()
        while True:  # memory of pending answers will be freed
            outcome.end_bytes = _memory_bytes(self._coordinator.pid)
            has_room = outcome.end_bytes <= outcome.settled_bytes + _GROWTH_BYTES
            if has_room or time.monotonic() > over_s + _REST_S:
                break
            await asyncio.sleep(0.1)
        if not has_room:
            outcome.problems.append(f"memory: {outcome.settled_bytes} bytes, {outcome.end_bytes} in the end")

    # ------------------------------------------------------------------ sending

    def _may_send(self, kind: str) -> bool:
        """Whether to send one more of a kind; it then counts as sent."""
        if self._outcome.sent[kind] >= self._quota[kind]:
            return False
        self._outcome.sent[kind] += 1
        return True

    async def _send_bounds(self, channel: grpc.aio.Channel, todo: Iterator[tuple[str, bytes]]) -> None:
        """Send every field of every request, then of every message of the stream, repeatedly."""
        talking = _Talk(channel, self._note_end)
        for rpc, data in todo:
            if not self._may_send("bounds"):
                break
            if rpc == _CONNECT:
                await talking.send(data)
            else:
                await self._call(channel, rpc, data)
        await talking.end()

    def _bounds(self) -> Iterator[tuple[str, bytes]]:
        for rpc, kind in self._methods.items():
            for message in messages.filled(partial(messages.valid, kind)):
                yield rpc, message.SerializeToString()
        for message in messages.filled(partial(_sent, 0)):
            yield _CONNECT, message.SerializeToString()
        while True:
            for rpc, kind in self._methods.items():
                for message in messages.at_bounds(partial(messages.valid, kind)):
                    yield rpc, message.SerializeToString()
            for index, _ in enumerate(messages.conversation()):
                for message in messages.at_bounds(partial(_sent, index)):
                    yield _CONNECT, message.SerializeToString()

    async def _send_random(self, channel: grpc.aio.Channel) -> None:
        rpcs = list(self._methods)
        while self._may_send("random"):
            rpc = self._chance.choice(rpcs)
            await self._call(channel, rpc, self._random(self._methods[rpc]))

    def _random(self, kind: Any) -> bytes:
        chance = self._chance
        made = messages.valid(kind) if chance.random() < 0.5 else messages.random_message(kind, chance)
        data: bytes = made.SerializeToString()
        return messages.mangled(data, chance) if chance.random() < 0.6 else data

    async def _send_streams(self, channel: grpc.aio.Channel, kind: str) -> None:
        """Send streams of random messages, or of valid ones in any order."""
        chance = self._chance
        talking = _Talk(channel, self._note_end)
        while self._may_send(kind):
            if chance.random() < 1 / _PER_STREAM:
                await talking.end()
            if kind == "order":
                data = chance.choice(messages.conversation()).SerializeToString()
            elif chance.random() < 0.5:
                data = messages.mangled(chance.choice(messages.conversation()).SerializeToString(), chance)
            else:
                data = self._random_request()
            await talking.send(data, has_hello=chance.random() < (0.8 if kind == "order" else 1.0))
        await talking.end()

    def _random_request(self) -> bytes:
        chance = self._chance
        request = chance.choice(messages.conversation())
        name = request.WhichOneof("message")
        part = getattr(request, str(name))
        part.CopyFrom(messages.random_message(type(part), chance))
        data: bytes = request.SerializeToString()
        return data

    async def _call(self, channel: Any, rpc: str, data: bytes) -> None:
        try:
            if messages.is_streaming(rpc):
                call = channel.unary_stream(rpc)(data, timeout=_WATCH_S)
                with suppress(asyncio.CancelledError):
                    async for _ in call:
                        pass
            else:
                await channel.unary_unary(rpc)(data, timeout=_CALL_LIMIT_S)
            self._outcome.ends["OK"] += 1
        except grpc.aio.AioRpcError as error:
            self._note_end(rpc, error)

    def _note_end(self, rpc: str, error: grpc.aio.AioRpcError) -> None:
        """Count how a call ended; an internal error of the coordinator and a missing answer are problems."""
        if error.details() == _OWN_ERROR:
            return
        end = _reason(error) or error.code().name
        self._outcome.ends[end] += 1
        is_silent = end == "DEADLINE_EXCEEDED" and not messages.is_streaming(rpc)
        if end in ("INTERNAL", "UNKNOWN", "UNAVAILABLE") or is_silent:
            problem = f"{rpc}: {error.code().name}: {error.details()}"
            if problem not in self._outcome.problems:
                self._outcome.problems.append(problem)


class _Talk:
    """Streams to Connect, one after another: each lasts until the coordinator ends it."""

    def __init__(self, channel: Any, note_end: Callable[[str, grpc.aio.AioRpcError], None]) -> None:
        self._channel = channel
        self._note_end = note_end
        self._call: Any = None
        self._reading: asyncio.Task[None] | None = None

    async def send(self, data: bytes, *, has_hello: bool = True) -> None:
        """Send a message, on a new stream if there is none."""
        if self._reading is not None and self._reading.done():
            await self.end()
        if self._call is None:
            self._call = self._channel.stream_stream(_CONNECT)()
            self._reading = asyncio.create_task(self._read(self._call))
            if has_hello:
                await self._write(messages.conversation()[0].SerializeToString())
        await self._write(data)

    async def end(self) -> None:
        """End the stream, and read its status."""
        if self._call is None:
            return
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await self._call.done_writing()
        assert self._reading is not None
        await asyncio.wait([self._reading], timeout=_END_LIMIT_S)
        self._call.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._call = self._reading = None

    async def _write(self, data: bytes) -> None:
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # ended: the reader gets the reason
            await self._call.write(data)

    async def _read(self, call: Any) -> None:
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            self._note_end(_CONNECT, error)


def _sent(index: int) -> ConnectRequest:
    return messages.conversation()[index]


async def _agent_token(channel: grpc.aio.Channel) -> str:
    request = token_service_pb2.CreateTokenRequest(
        name="witness", scope=token_service_pb2.SCOPE_AGENT, job_patterns=["witness"]
    )
    return str((await TokenServiceStub(channel).CreateToken(request)).secret)


def _reason(error: grpc.aio.AioRpcError) -> str:
    """Return the stable reason of a status; empty for gRPC's own."""
    info = ErrorInfo()
    status = rpc_status.from_call(error)
    is_ours = status is not None and any(detail.Unpack(info) for detail in status.details)
    return info.reason if is_ours else ""


def _memory_bytes(process_id: int) -> int:
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def publish_malformed(page: Path | None, outcome: Outcome, seed: int) -> None:
    """Print the figures, and put them into a page."""
    kinds = {
        "bounds": "every field of every request and stream message, at its bounds and beyond",
        "random": "random protocol buffers, and random bytes",
        "order": "agents' messages in random order, with and without Hello",
    }
    settled_mb, end_mb = outcome.settled_bytes / 2**20, outcome.end_bytes / 2**20
    ends = ", ".join(f"{end} {count}" for end, count in outcome.ends.most_common(12))
    note = f"""Results of calls and streams: {ends}.

Memory: {settled_mb:.0f} MB after {_SETTLED_SHARE:.0%} of the messages, {end_mb:.0f} MB after all. The agent
trained {outcome.iteration_count} iterations. Problems: {"; ".join(outcome.problems) or "none"}.
{outcome.took_s / 60:.1f} minutes, seed {seed}."""
    rows = [(what, outcome.sent[kind]) for kind, what in kinds.items()]
    publish(page, "## Malformed messages", ("messages", "sent"), rows, note)
