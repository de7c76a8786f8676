"""`perseus.v1.AgentService`: one stream per agent, a thin adapter over the coordinator.

The reader takes one message after another; telemetry is read on only when the batch before is stored, so
that an agent can't fill the coordinator's memory. One writer task sends what the outbox holds.
"""

# ruff: noqa: N802 (the contract names the methods)

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import structlog

from perseus.service.api.outbox import Outbox
from perseus.service.api.statuses import MAPPED, error_info, to_status
from perseus.service.api.translate_agents import (
    answer_from_proto,
    gpu_error_from_proto,
    in_force_from_proto,
    joined_from_proto,
    left_from_proto,
    offer_to_proto,
    telemetry_from_proto,
    text_from_proto,
)
from perseus.service.api.translate_jobs import coordinates_to_proto
from perseus.service.api.translate_problems import order_to_proto
from perseus.service.domain.errors import (
    CoordinatorError,
    EmptyMessageError,
    HelloExpectedError,
    HelloRepeatedError,
)
from perseus.service.domain.model import Offer
from perseus.service.domain.specification import Coordinates
from perseus.service.shell.coordinator import Coordinator
from perseus.solver import Computation
from perseus.v1 import agent_service_pb2, agent_service_pb2_grpc, rank_pb2
from perseus.v1.agent_service_pb2 import ConnectRequest, ConnectResponse

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[ConnectRequest, ConnectResponse]


class OutboxPort:
    """The coordinator's way to one agent: translates, and puts into the outbox."""

    def __init__(self, outbox: Outbox, lease_s: float) -> None:
        self.epoch = ""
        self._outbox = outbox
        self._lease_s = lease_s

    def accept_rank(self, job_id: str, rank: Coordinates, order: Sequence[Computation]) -> None:
        """See `shell.coordinator.AgentPort`."""
        accepted = agent_service_pb2.RankAccepted(
            job_id=job_id, rank=coordinates_to_proto(rank), order=order_to_proto(order)
        )
        self._outbox.answer(ConnectResponse(rank_accepted=accepted))

    def offer(self, job_id: str, rank: Coordinates, offer: Offer) -> None:
        """See `shell.coordinator.AgentPort`."""
        message = offer_to_proto(job_id, rank, offer, self.epoch, self._lease_s)
        self._outbox.replace((job_id, rank), ConnectResponse(plan_offer=message))

    def acknowledge(self, sequence: int) -> None:
        """See `shell.coordinator.AgentPort`."""
        acknowledgement = agent_service_pb2.TelemetryAck(sequence=sequence)
        self._outbox.replace("acknowledgement", ConnectResponse(telemetry_ack=acknowledgement))

    def drain(self) -> None:
        """See `shell.coordinator.AgentPort`."""
        message = agent_service_pb2.Drain(reason="the coordinator is about to stop")
        self._outbox.answer(ConnectResponse(drain=message))
        self._outbox.close()

    def end(self, error: CoordinatorError) -> None:
        """See `shell.coordinator.AgentPort`."""
        self._outbox.end(error)


class AgentService(agent_service_pb2_grpc.AgentServiceServicer):
    """Serves agents."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def Connect(  # type: ignore[override]
        self, request_iterator: AsyncIterator[ConnectRequest], context: Context
    ) -> None:
        """Serve one agent until its stream ends, or has to be ended."""
        stream = _Stream(self._coordinator, context)
        reader = asyncio.create_task(stream.read(request_iterator))
        writer = asyncio.create_task(stream.write())
        try:
            done, _ = await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except MAPPED as error:
            log.warning("agent stream ended", instance_id=stream.instance_id, error=str(error))
            await context.abort_with_status(to_status(error))
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
            stream.part()


class _Stream:
    """One agent's stream."""

    def __init__(self, coordinator: Coordinator, context: Context) -> None:
        self.instance_id = ""
        self._coordinator = coordinator
        self._context = context
        self._hostname = ""
        self._outbox = Outbox()
        self._port = OutboxPort(self._outbox, coordinator.rules.lease_s)
        self._is_goodbye = False

    async def write(self) -> None:
        """Send what the outbox holds, as it comes, until it is closed."""
        is_last = False
        while not is_last:
            messages, is_last = await self._outbox.take()
            for message in messages:
                await self._context.write(message)

    async def read(self, requests: AsyncIterator[ConnectRequest]) -> None:
        """Take what the agent says, until it ends the stream or says goodbye."""
        async for request in requests:
            if not self.instance_id:
                await self._greet(request)
            elif request.WhichOneof("message") == "goodbye":
                log.info("agent left", instance_id=self.instance_id, reason=request.goodbye.reason)
                self._is_goodbye = True
                return
            else:
                await self._take(request)

    def part(self) -> None:
        """The stream has ended."""
        if self.instance_id:
            self._coordinator.part(self.instance_id, self._port, self._is_goodbye)

    async def _greet(self, request: ConnectRequest) -> None:
        kind = request.WhichOneof("message")
        if kind != "hello":
            raise HelloExpectedError(found=kind or "an empty message")
        instance_id = text_from_proto(request.hello.instance_id, "hello.instance_id")
        self._hostname = request.hello.hostname
        self._port.epoch, sequence = await self._coordinator.greet(instance_id, self._port)
        self.instance_id = instance_id
        log.info("agent connected", instance_id=instance_id, hostname=self._hostname)
        welcome = agent_service_pb2.Welcome(
            epoch=self._port.epoch,
            lease_s=self._coordinator.rules.lease_s,
            acknowledged_sequence=sequence,
        )
        self._outbox.answer(ConnectResponse(welcome=welcome))

    async def _take(self, request: ConnectRequest) -> None:
        match request.WhichOneof("message"):
            case "hello":
                raise HelloRepeatedError(instance_id=self.instance_id)
            case "rank_joined":
                self._join(request.rank_joined)
            case "rank_left":
                left = left_from_proto(request.rank_left, self.instance_id)
                self._coordinator.tell(request.rank_left.job_id, left)
            case "gpu_error":
                self._note_gpu_error(request.gpu_error)
            case "telemetry":
                telemetry = telemetry_from_proto(request.telemetry, self.instance_id)
                await self._coordinator.take_telemetry(request.telemetry.job_id, telemetry)
            case "plan_answer":
                answer = answer_from_proto(request.plan_answer, self.instance_id)
                self._coordinator.tell(request.plan_answer.job_id, answer)
            case "plan_in_force":
                in_force = in_force_from_proto(request.plan_in_force, self.instance_id)
                self._coordinator.tell(request.plan_in_force.job_id, in_force)
            case "heartbeat":
                self._coordinator.hear(self.instance_id)
                answer_beat = ConnectResponse(heartbeat=agent_service_pb2.Heartbeat())
                self._outbox.replace("heartbeat", answer_beat)
            case _:
                raise EmptyMessageError()

    def _join(self, message: agent_service_pb2.RankJoined) -> None:
        """Let the coordinator take the rank; a refusal concerns that rank only, the stream goes on."""
        event = joined_from_proto(message, self.instance_id, self._hostname)
        try:
            self._coordinator.join(message.job_id, event)
        except CoordinatorError as error:
            self._refuse(message.job_id, message.rank, error)

    def _note_gpu_error(self, message: agent_service_pb2.GpuError) -> None:
        event = gpu_error_from_proto(message)
        try:
            self._coordinator.note_gpu_error(message.job_id, event)
        except CoordinatorError as error:
            self._refuse(message.job_id, message.rank, error)

    def _refuse(self, job_id: str, rank: rank_pb2.RankCoordinates, error: CoordinatorError) -> None:
        info = error_info(error)
        refused = agent_service_pb2.RankRefused(
            job_id=job_id, rank=rank, reason=info.reason, message=str(error), metadata=info.metadata
        )
        self._outbox.answer(ConnectResponse(rank_refused=refused))
