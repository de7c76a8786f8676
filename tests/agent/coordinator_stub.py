"""A coordinator in the test's own process: records agents' messages, and answers the mandatory ones."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from perseus.job_id import slot_of
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import agent_service_pb2_grpc, computation_pb2, job_service_pb2, job_service_pb2_grpc
from tests.ports import free_port


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 30) -> None:
    """Poll for a condition that other threads or processes fulfil."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s} s"
        await asyncio.sleep(0.01)


def status_of(code: int, message: str, *details: Message) -> grpc.Status:
    """Return a status with details."""
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        status.details.add().Pack(detail)
    converted: grpc.Status = rpc_status.to_status(status)
    return converted


def served_elsewhere(info: error_details_pb2.ErrorInfo) -> grpc.Status:
    """Return the status of what another coordinator serves."""
    return status_of(grpc.StatusCode.UNAVAILABLE.value[0], "served elsewhere", info)


@dataclass
class Inbox:
    """State that outlives a coordinator's restart: its jobs and telemetry, and the agents' messages."""

    jobs: dict[str, job_service_pb2.RegisterJobRequest] = field(default_factory=dict)
    heard: list[wire.ConnectRequest] = field(default_factory=list)
    acknowledged_sequence: int = 0
    acknowledges: bool = True
    refusal: str = ""
    refusal_reason: str = "JOB_EXISTS"
    refusal_code: int = 6
    retry_delay_s: int | None = None
    register_count: int = 0
    is_silent: bool = False
    lease_s: float = 3.0
    power_interval_s: float = 0.0
    slot: int = 0
    slot_count: int = 0
    # Where other slots are served.
    addresses: dict[int, str] = field(default_factory=dict)

    def elsewhere(self, slot: int | None) -> error_details_pb2.ErrorInfo | None:
        """Return where a slot is served, if not here."""
        if slot is None or slot == self.slot:
            return None
        metadata = {"address": self.addresses.get(slot, ""), "slot": str(slot)}
        return error_details_pb2.ErrorInfo(reason="SERVED_ELSEWHERE", domain="perseus", metadata=metadata)

    def elsewhere_of(self, job_id: str) -> error_details_pb2.ErrorInfo | None:
        return self.elsewhere(slot_of(job_id, self.slot_count) if self.slot_count else None)

    def all(self, name: str) -> list[wire.ConnectRequest]:
        return [request for request in self.heard if request.WhichOneof("message") == name]


class CoordinatorStub(agent_service_pb2_grpc.AgentServiceServicer, job_service_pb2_grpc.JobServiceServicer):
    """Serves on loopback until `stop`; `say` speaks to the agent that is connected."""

    def __init__(self, inbox: Inbox, order: Sequence[computation_pb2.Computation] = ()) -> None:
        self.inbox = inbox
        self.port = 0
        self._order = order
        self._outbox: asyncio.Queue[wire.ConnectResponse] = asyncio.Queue()
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        agent_service_pb2_grpc.add_AgentServiceServicer_to_server(self, self._server)
        job_service_pb2_grpc.add_JobServiceServicer_to_server(self, self._server)

    async def start(self, port: int) -> None:
        """Serve on that port, or on a free one that a later stub may reuse."""
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port or free_port()}")
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    def send(self, response: wire.ConnectResponse) -> None:
        self._outbox.put_nowait(response)

    async def until(self, condition: Callable[[Inbox], bool], what: str, timeout_s: float = 30) -> None:
        try:
            await until(lambda: condition(self.inbox), what, timeout_s)
        except AssertionError as error:
            heard = [request.WhichOneof("message") for request in self.inbox.heard]
            raise AssertionError(f"{error}; heard {heard}") from None

    async def RegisterJob(  # noqa: N802 - gRPC's name
        self,
        request: job_service_pb2.RegisterJobRequest,
        context: grpc.aio.ServicerContext[
            job_service_pb2.RegisterJobRequest, job_service_pb2.RegisterJobResponse
        ],
    ) -> job_service_pb2.RegisterJobResponse:
        self.inbox.register_count += 1
        if self.inbox.is_silent:
            await asyncio.Event().wait()
        if (elsewhere := self.inbox.elsewhere_of(request.spec.job_id)) is not None:
            await context.abort_with_status(served_elsewhere(elsewhere))
        if self.inbox.refusal:
            details: list[Message] = [
                error_details_pb2.ErrorInfo(reason=self.inbox.refusal_reason, domain="perseus")
            ]
            if self.inbox.retry_delay_s is not None:
                delay = duration_pb2.Duration(seconds=self.inbox.retry_delay_s)
                details.append(error_details_pb2.RetryInfo(retry_delay=delay))
            await context.abort_with_status(status_of(self.inbox.refusal_code, self.inbox.refusal, *details))
        self.inbox.jobs[request.spec.job_id] = request
        return job_service_pb2.RegisterJobResponse()

    async def Connect(  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[wire.ConnectRequest],
        context: grpc.aio.ServicerContext[wire.ConnectRequest, wire.ConnectResponse],
    ) -> AsyncIterator[wire.ConnectResponse]:
        listening = asyncio.create_task(self._listen(request_iterator))
        getting: asyncio.Task[wire.ConnectResponse] | None = None
        try:
            while not (listening.done() and self._outbox.empty()):
                getting = asyncio.create_task(self._outbox.get())
                await asyncio.wait([getting, listening], return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    yield getting.result()
                else:
                    getting.cancel()
            if (elsewhere := listening.result()) is not None:
                await context.abort_with_status(served_elsewhere(elsewhere))
        finally:
            listening.cancel()
            if getting is not None:
                getting.cancel()

    async def _listen(
        self, requests: AsyncIterator[wire.ConnectRequest]
    ) -> error_details_pb2.ErrorInfo | None:
        """Listen to the end of a stream; return where the slot that it is for is served, if not here."""
        async for request in requests:
            self.inbox.heard.append(request)
            match request.WhichOneof("message"):
                case "hello":
                    hello = request.hello
                    if elsewhere := self.inbox.elsewhere(hello.slot if hello.HasField("slot") else None):
                        return elsewhere
                    welcome = wire.Welcome(
                        epoch="e",
                        lease_s=self.inbox.lease_s,
                        acknowledged_sequence=self.inbox.acknowledged_sequence,
                        power_interval_s=self.inbox.power_interval_s,
                        slot=self.inbox.slot,
                        slot_count=self.inbox.slot_count,
                    )
                    self.send(wire.ConnectResponse(welcome=welcome))
                case "rank_joined":
                    self._answer(request.rank_joined)
                case "telemetry" if self.inbox.acknowledges:
                    self.inbox.acknowledged_sequence = request.telemetry.sequence
                    ack = wire.TelemetryAck(sequence=request.telemetry.sequence)
                    self.send(wire.ConnectResponse(telemetry_ack=ack))
                case "heartbeat":
                    self.send(wire.ConnectResponse(heartbeat=wire.Heartbeat()))
        return None

    def _answer(self, joined: wire.RankJoined) -> None:
        if joined.job_id in self.inbox.jobs:
            order = computation_pb2.StageOrder(computations=self._order)
            accepted = wire.RankAccepted(job_id=joined.job_id, rank=joined.rank, order=order)
            self.send(wire.ConnectResponse(rank_accepted=accepted))
        else:
            refused = wire.RankRefused(job_id=joined.job_id, rank=joined.rank, reason="JOB_NOT_FOUND")
            self.send(wire.ConnectResponse(rank_refused=refused))


@asynccontextmanager
async def coordinating(inbox: Inbox | None = None, port: int = 0) -> AsyncIterator[CoordinatorStub]:
    """Serve within the block."""
    coordinator = CoordinatorStub(inbox or Inbox())  # type: ignore[abstract] # it serves RegisterJob only
    await coordinator.start(port)
    try:
        yield coordinator
    finally:
        await coordinator.stop()
