"""`perseus.v1.AgentService`: one stream per agent, a thin adapter over the coordinator.

The reader takes one message after another, no faster than the agent's rate limit, and only a bounded number
of them may wait to be stored: an agent can neither fill the coordinator's memory nor take its time from
others. Unread messages wait with the agent, by HTTP/2's flow control. One writer task sends what the outbox
holds.

A message that is invalid, unknown here or makes the coordinator fail is refused by itself, also in a bundle,
and the stream continues: other ranks share it. The contract lists the errors that end a stream, at the top of
its file.
"""

# ruff: noqa: N802 (the contract names the methods)

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import grpc
import structlog

from perseus.bundles import MAX_BYTES, MAX_MESSAGES, encoded_bundles
from perseus.service.api.authentication import caller
from perseus.service.api.memo import Memo
from perseus.service.api.outbox import Answer, Outbox
from perseus.service.api.refusal_log import RefusalLog
from perseus.service.api.statuses import (
    MAPPED,
    MappedError,
    count_refusal,
    error_info,
    refused_parts,
    to_status,
    unexpected,
)
from perseus.service.api.translate_agents import (
    EncodedOffer,
    RankMessage,
    answer_from_proto,
    check_hello,
    gpu_error_from_proto,
    gpu_uuid_from_proto,
    in_force_from_proto,
    joined_from_proto,
    left_from_proto,
    max_clock_to_proto,
    offer_to_proto,
    place_from_proto,
    reading_from_proto,
    telemetry_from_proto,
    unknown_fields,
    unmarked_from_proto,
)
from perseus.service.domain.bounds import MAX_COUNT, MAX_TOTAL_TIME_S, check_range
from perseus.service.domain.errors import (
    CoordinatorError,
    EmptyMessageError,
    HelloExpectedError,
    HelloRepeatedError,
    InternalError,
    InvalidFieldError,
    JobNotFoundError,
    JobOutOfScopeError,
    LimitReachedError,
    ServedError,
    UnknownMessageError,
    cut,
)
from perseus.service.domain.gpu_claims import Place
from perseus.service.domain.inputs import TelemetryArrived
from perseus.service.domain.limits import ROWS_LIKE_A_MESSAGE
from perseus.service.domain.measured import Saving
from perseus.service.domain.messages import coordinates_to_proto, order_to_proto, time_to_proto
from perseus.service.domain.model import MaxClock, Offer, PlannedClocks
from perseus.service.domain.specification import Coordinates, check_job_id
from perseus.service.shell.agents import Agents
from perseus.service.shell.quotas import Quotas, RateLimiter
from perseus.service.shell.thinning import Part
from perseus.solver import Computation
from perseus.v1 import agent_service_pb2, computation_pb2, rank_pb2
from perseus.v1.agent_service_pb2 import ConnectRequest, ConnectResponse

log = structlog.get_logger(__name__)

PROTOCOL_VERSION = 1
"""Version of the contract; `Hello` in the contract says when it rises."""

_UNSTORED_LIMIT = 64
"""Messages of one stream that may wait to be stored."""

_MIN_PAUSE_S = 0.01
"""A shorter pause is not worth a timer: it is added to the next."""

_KINDS_LIMIT = 64
"""How many kinds of refusals are logged for one stream, each once."""

_ORDERS: Memo[Sequence[Computation], computation_pb2.StageOrder] = Memo(order_to_proto, limit=256)
"""Orders of computations: all ranks of a stage have the same."""

M = TypeVar("M", bound=RankMessage)

Context = grpc.aio.ServicerContext[ConnectRequest, bytes]


class OutboxPort:
    """The coordinator's port of one agent: translates messages, and puts them into the outbox.

    Attributes:
        epoch: epoch of the coordinator's state, as in the agent's Welcome.
        plan_lease_s: how long plans outlive the coordinator's last message; other clocks have the usual
            lease.
    """

    def __init__(self, outbox: Outbox, lease_s: float) -> None:
        self.epoch = ""
        self.plan_lease_s = lease_s
        self._outbox = outbox
        self._lease_s = lease_s

    def accept_rank(
        self, job_id: str, rank: Coordinates, order: Sequence[Computation], max_clock: MaxClock | None
    ) -> None:
        """Queue RankAccepted."""
        accepted = agent_service_pb2.RankAccepted(
            job_id=job_id,
            rank=coordinates_to_proto(rank),
            order=_ORDERS.of(order),
            max_clock=max_clock_to_proto(max_clock),
        )
        self._outbox.enqueue(ConnectResponse(rank_accepted=accepted))

    def limit_rank(self, job_id: str, rank: Coordinates, max_clock: MaxClock | None) -> None:
        """Queue RankMaxClock."""
        limited = agent_service_pb2.RankMaxClock(
            job_id=job_id, rank=coordinates_to_proto(rank), max_clock=max_clock_to_proto(max_clock)
        )
        self._outbox.enqueue(ConnectResponse(rank_max_clock=limited))

    def refuse_rank(
        self, job_id: str, rank: Coordinates, error: CoordinatorError, max_clock: MaxClock | None
    ) -> None:
        """Drop the rank's offer if it still waits, and queue RankRefused."""
        self._outbox.drop((job_id, rank))
        refused = rank_refused(job_id, coordinates_to_proto(rank), error, max_clock)
        self._outbox.enqueue(ConnectResponse(rank_refused=refused))

    def offer(self, job_id: str, rank: Coordinates, offer: Offer) -> None:
        """Put PlanOffer in place of an offer that still waits for the rank."""
        lease_s = self.plan_lease_s if isinstance(offer.clocks, PlannedClocks) else self._lease_s
        message = offer_to_proto(job_id, rank, offer, self.epoch, lease_s)
        self._outbox.replace((job_id, rank), message)

    def heartbeat(
        self, power_interval_s: float, savings: Mapping[str, Saving], time_s: float | None = None
    ) -> None:
        """Put Heartbeat in place of one that still waits; an answer to the agent's has the time."""
        heartbeat = agent_service_pb2.Heartbeat(
            power_interval_s=power_interval_s,
            savings=[
                agent_service_pb2.JobSaving(
                    job_id=job_id,
                    energy_percent=saving.energy_percent,
                    slowdown_percent=saving.slowdown_percent,
                    energy_margin_percent=saving.energy_margin_percent,
                    slowdown_margin_percent=saving.slowdown_margin_percent,
                )
                for job_id, saving in savings.items()
                if saving.energy_percent is not None
            ],
            current_time=time_to_proto(time_s) if time_s is not None else None,
        )
        self._outbox.replace("heartbeat", ConnectResponse(heartbeat=heartbeat))

    def acknowledge(self, sequence: int) -> None:
        """Put the acknowledgement in place of one that still waits."""
        self._outbox.acknowledge(sequence)

    def drain(self) -> None:
        """Queue Drain, and end the stream after it."""
        message = agent_service_pb2.Drain(reason="the coordinator is about to stop")
        self._outbox.enqueue(ConnectResponse(drain=message))
        self._outbox.close()

    def end(self, error: CoordinatorError) -> None:
        """End the stream with an error."""
        self._outbox.end(error)


class AgentService:
    """Serves agents' streams. It encodes its messages itself, as the clocks of many offers are the same."""

    def __init__(self, agents: Agents, quotas: Quotas) -> None:
        self._agents = agents
        self._quotas = quotas
        self._refusal_log = RefusalLog()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Let a server serve it, like the generated functions for the other services."""
        handlers: dict[str, Any] = {
            "Connect": grpc.stream_stream_rpc_method_handler(self.Connect, ConnectRequest.FromString)
        }
        service = agent_service_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    async def Connect(self, request_iterator: AsyncIterator[ConnectRequest], context: Context) -> None:
        """Serve one agent until its stream ends, or must be ended."""
        try:
            with self._quotas.stream(caller().name) as rate_limiter:
                await self._serve(
                    _Stream(self._agents, self._quotas, rate_limiter, context), request_iterator, context
                )
        except LimitReachedError as error:
            self._refusal_log.record(context.peer(), "agent turned away", error.reason, error=str(error))
            await context.abort_with_status(to_status(error))

    async def _serve(
        self, stream: "_Stream", request_iterator: AsyncIterator[ConnectRequest], context: Context
    ) -> None:
        # Both the first message and the end of the stream would send the metadata, which gRPC refuses.
        with suppress(grpc.aio.InternalError):  # the agent is gone already
            await context.send_initial_metadata(())
        reader = asyncio.create_task(stream.read(request_iterator))
        writer = asyncio.create_task(stream.write())
        # The writer may wait for an agent that reads nothing, and so not notice that the stream must end.
        ended = asyncio.create_task(stream.ended())
        tasks = (reader, writer, ended)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except MAPPED as error:
            log.warning("agent stream ended", instance_id=stream.instance_id, error=str(error))
            await context.abort_with_status(to_status(error))
        except Exception as error:
            if context.done():  # the agent went while a message was on its way to it
                log.info("agent stream broke", instance_id=stream.instance_id, error=repr(error))
            else:
                failure = unexpected(error, "Connect", instance_id=stream.instance_id)
                await context.abort_with_status(to_status(failure))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            stream.part()


class _Stream:
    """One agent's stream."""

    def __init__(self, agents: Agents, quotas: Quotas, rate_limiter: RateLimiter, context: Context) -> None:
        self.instance_id = ""
        self._agents = agents
        self._limits = quotas.limits
        self._rate_limiter = rate_limiter
        self._context = context
        self._hostname = ""
        self._principal = caller()
        self._outbox = Outbox()
        self._port = OutboxPort(self._outbox, agents.lease_s)
        self._max_bundle_bytes = 0
        self._is_goodbye = False
        self._logged: set[tuple[str, str, str]] = set()

    async def write(self) -> None:
        """Send the outbox's messages until it is closed."""
        is_last = False
        while not is_last:
            messages, is_last = await self._outbox.take()
            first = messages[0] if messages else None
            is_welcome = isinstance(first, ConnectResponse) and first.HasField("welcome")  # it comes alone
            encoded = [self._stamped(message).SerializeToString() for message in messages]
            for data in encoded_bundles(encoded, 0 if is_welcome else self._max_bundle_bytes):
                await self._context.write(data)

    async def ended(self) -> None:
        """Wait until the stream must be ended with an error.

        Raises:
            CoordinatorError: the reason.
        """
        raise await self._outbox.ended

    def _stamped(self, answer: Answer) -> Answer:
        """Put the commit marker on messages that confirm storage; as late as possible, so that it rises.

        Put the lease epoch on messages about ranks.
        """
        message = answer.response if isinstance(answer, EncodedOffer) else answer
        match message.WhichOneof("message"):
            case "rank_accepted":
                message.rank_accepted.lease_epoch = self._agents.lease_epoch
            case "rank_refused":
                message.rank_refused.lease_epoch = self._agents.lease_epoch
            case "rank_max_clock":
                message.rank_max_clock.lease_epoch = self._agents.lease_epoch
            case "welcome":
                message.welcome.commit_marker = self._agents.commit_marker
            case "telemetry_ack":
                message.telemetry_ack.commit_marker = self._agents.commit_marker
            case "plan_offer":
                message.plan_offer.commit_marker = self._agents.commit_marker
                message.plan_offer.lease_epoch = self._agents.lease_epoch
        return answer

    async def read(self, requests: AsyncIterator[ConnectRequest]) -> None:
        """Take the agent's messages until it ends the stream or says goodbye.

        After every `_UNSTORED_LIMIT` messages it waits until all of them are stored, so no agent fills the
        writer's queue. While all agents together fill it, or the loop's turn, each waits for admission.
        """
        unstored = 0
        async for request in requests:
            messages = request.bundle.messages if request.HasField("bundle") else (request,)
            if (count := len(messages)) <= MAX_MESSAGES:
                rows = (len(each.telemetry.computations.duration_s) for each in messages)
                count += sum(row_count // ROWS_LIKE_A_MESSAGE for row_count in rows)
            unstored += count
            if unstored >= _UNSTORED_LIMIT:
                await self._agents.flush()
                unstored = 0
            if not self._agents.admission.is_admitted(count):
                await self._agents.admission.wait(count)
            if not self.instance_id:
                await self._greet(request)
            elif 0 < len(messages) <= MAX_MESSAGES:
                if self._agents.claim_writer is not None:
                    await self._claim(messages)
                self._take_together(messages)
            else:
                self._refuse(
                    InvalidFieldError(
                        field="bundle.messages", expected=f"1 to {MAX_MESSAGES} of them", found=len(messages)
                    )
                )
            if self._is_goodbye:
                return
            pause_s = self._rate_limiter.take(count)
            if pause_s > _MIN_PAUSE_S:
                self._log_limited("agent sends faster than it may: it is slowed down", ("rate limit", "", ""))
                await asyncio.sleep(pause_s)

    def part(self) -> None:
        """Note that the stream has ended."""
        if self.instance_id:
            self._agents.part(self.instance_id, self._port, self._is_goodbye)

    async def _greet(self, request: ConnectRequest) -> None:
        kind = request.WhichOneof("message")
        if kind != "hello":
            raise HelloExpectedError(found=kind or "an empty message")
        check_hello(request.hello)
        self._max_bundle_bytes = min(request.hello.max_bundle_bytes, MAX_BYTES)
        self._principal.check_host(request.hello.hostname)
        if request.hello.HasField("slot"):
            self._agents.fleet.check_slot(request.hello.slot)
        instance_id = request.hello.instance_id
        self._hostname = request.hello.hostname
        self._port.plan_lease_s = self._agents.plan_lease_s(self._hostname)
        self.instance_id = instance_id  # before greeting: `part` must run even if greeting is cut short
        commit_marker = request.hello.commit_marker
        self._port.epoch, sequence = await self._agents.greet(
            instance_id, self._port, commit_marker, self._principal, request.hello.instance_key
        )
        log.info("agent connected", instance_id=instance_id, hostname=self._hostname)
        their_version = request.hello.protocol_version or 1
        if their_version != PROTOCOL_VERSION:
            log.warning(
                "agent speaks another protocol version: messages that one side doesn't know are refused",
                instance_id=instance_id,
                hostname=self._hostname,
                agent_version=request.hello.agent_version,
                protocol_version=their_version,
                own_protocol_version=PROTOCOL_VERSION,
            )
        fleet = self._agents.fleet
        welcome = agent_service_pb2.Welcome(
            epoch=self._port.epoch,
            lease_s=self._agents.lease_s,
            acknowledged_sequence=sequence,
            protocol_version=PROTOCOL_VERSION,
            instance_key=self._agents.instance_key(instance_id),
            power_interval_s=self._agents.power_interval_s,
            max_bundle_bytes=min(self._limits.limit_message_bytes, MAX_BYTES),
            slot_count=len(fleet.slots),
            slot=fleet.served or 0,
            takes_short_rows=True,
        )
        self._outbox.enqueue(ConnectResponse(welcome=welcome))

    async def _claim(self, messages: Sequence[ConnectRequest]) -> None:
        """Claim the GPUs of the ranks that messages announce; what is wrong with them shows when they are
        taken."""
        wanted: dict[str, Place] = {}
        for message in messages:
            if message.HasField("rank_joined"):
                joined = message.rank_joined
                with suppress(CoordinatorError):
                    self._principal.check_job(joined.job_id)
                    wanted[gpu_uuid_from_proto(joined)] = joined.job_id, place_from_proto(joined)
        if wanted:
            await self._agents.claim(self.instance_id, wanted)

    def _take_together(self, messages: Sequence[ConnectRequest]) -> None:
        """Take messages that came as one, and acknowledge all their telemetry at once."""
        kinds = [message.WhichOneof("message") for message in messages]
        try:
            for kind, some in groupby(zip(kinds, messages, strict=True), key=itemgetter(0)):
                if kind == "telemetry":
                    self._take_telemetry([message.telemetry for _, message in some])
                    continue
                for _, message in some:
                    self._take(kind, message)
                if self._is_goodbye:
                    break
        finally:
            if "telemetry" in kinds:  # even if the stream must end: what was taken must not be taken again
                self._agents.acknowledge_telemetry(self.instance_id)

    def _take(self, kind: str | None, request: ConnectRequest) -> None:
        match kind:
            case "hello":
                raise HelloRepeatedError(instance_id=self.instance_id)
            case "goodbye":
                log.info("agent left", instance_id=self.instance_id, reason=cut(request.goodbye.reason))
                self._is_goodbye = True
            case "bundle":
                self._refuse(
                    InvalidFieldError(
                        field="bundle", expected="a message that comes in a bundle", found="a bundle"
                    )
                )
            case "heartbeat":
                self._take_heartbeat(request.heartbeat)
            case "power_reading":
                self._take_power(request.power_reading)
            case "message_refused":
                self._note_refusal(request.message_refused)
            case "rank_joined":
                self._take_one(request.rank_joined, self._join)
            case "rank_left":
                self._take_one(request.rank_left, self._leave)
            case "plan_answer":
                self._take_one(request.plan_answer, self._take_answer)
            case "plan_in_force":
                self._take_one(request.plan_in_force, self._take_in_force)
            case "gpu_error":
                self._take_one(request.gpu_error, self._take_gpu_error)
            case "trainer_unmarked":
                self._take_one(request.trainer_unmarked, self._take_unmarked)
            case _:
                numbers = unknown_fields(request)
                self._refuse(
                    UnknownMessageError(field_numbers=numbers, protocol_version=PROTOCOL_VERSION)
                    if numbers
                    else EmptyMessageError()
                )

    def _take_one(self, message: M, take: Callable[[M], None]) -> None:
        """Take a message about one rank; an error in it affects nothing else."""
        try:
            check_job_id(message.job_id)
            self._principal.check_job(message.job_id)
            take(message)
        except CoordinatorError as error:
            self._answer_mistake(message, error)
        except Exception as error:
            self._answer_mistake(message, self._unexpected(error, message))

    def _join(self, message: agent_service_pb2.RankJoined) -> None:
        self._agents.join(
            message.job_id, joined_from_proto(message, self.instance_id, self._hostname), message.owner
        )

    def _leave(self, message: agent_service_pb2.RankLeft) -> None:
        self._agents.dispatch(message.job_id, left_from_proto(message, self.instance_id))

    def _take_answer(self, message: agent_service_pb2.PlanAnswer) -> None:
        self._agents.dispatch(message.job_id, answer_from_proto(message, self.instance_id))

    def _take_in_force(self, message: agent_service_pb2.PlanInForce) -> None:
        self._agents.dispatch(message.job_id, in_force_from_proto(message, self.instance_id))

    def _take_gpu_error(self, message: agent_service_pb2.GpuError) -> None:
        self._agents.note_gpu_error(message.job_id, gpu_error_from_proto(message))

    def _take_unmarked(self, message: agent_service_pb2.TrainerUnmarked) -> None:
        place, why = unmarked_from_proto(message)
        self._agents.note_unmarked(self.instance_id, self._hostname, message.job_id, place, why)

    def _take_heartbeat(self, message: agent_service_pb2.Heartbeat) -> None:
        self._agents.hear(self.instance_id)
        savings = self._agents.savings(self.instance_id)
        self._port.heartbeat(self._agents.power_interval_s, savings, time.time())
        if message.HasField("clock_ahead_s"):
            ahead_s = message.clock_ahead_s
            try:
                check_range("heartbeat.clock_ahead_s", ahead_s, -MAX_TOTAL_TIME_S, MAX_TOTAL_TIME_S)
            except InvalidFieldError as error:
                self._refuse(error)
            else:
                self._agents.note_clock(self.instance_id, self._hostname, ahead_s)

    def _take_power(self, message: agent_service_pb2.PowerReading) -> None:
        try:
            self._agents.take_power(self.instance_id, self._hostname, reading_from_proto(message))
        except InvalidFieldError as error:
            self._refuse(error)

    def _take_telemetry(self, messages: Sequence[agent_service_pb2.TelemetryBatch]) -> None:
        """Take batches that came together; those of a job go on together, up to one that is refused here."""
        for job_id, some in groupby(messages, key=attrgetter("job_id")):
            events: list[TelemetryArrived] = []
            for message in some:
                try:
                    if not events:
                        check_job_id(job_id)
                        self._principal.check_job(job_id)
                    computations = message.computations
                    self._limits.check_rows(
                        max(len(computations.iteration), len(computations.kind), len(computations.duration_s))
                    )
                    part = None if self._agents.thinning.part is None else self._thin(message)
                    if part is Part.SUMS:
                        self._pass_on(job_id, events)
                        events = []
                        self._agents.skip(self.instance_id, message.sequence)
                        continue
                    events.append(
                        telemetry_from_proto(message, self.instance_id, is_thinned=part is not None)
                    )
                except Exception as error:
                    self._pass_on(job_id, events)
                    events = []
                    refusal = (
                        error if isinstance(error, CoordinatorError) else self._unexpected(error, message)
                    )
                    self._refuse_telemetry(message.sequence, refusal)
                    if 1 <= message.sequence <= MAX_COUNT:
                        self._agents.pass_telemetry(self.instance_id, message.sequence)
            self._pass_on(job_id, events)

    def _thin(self, message: agent_service_pb2.TelemetryBatch) -> Part | None:
        """Return what is left out of a batch: nothing if it is invalid, or tells of a GPU's other limits."""
        sequence, iterations = message.sequence, message.iterations.iteration
        if not 1 <= sequence <= MAX_COUNT or message.HasField("gpu_limits"):
            return None
        return self._agents.thin(self.instance_id, message.job_id, sequence, iterations)

    def _pass_on(self, job_id: str, events: Sequence[TelemetryArrived]) -> None:
        if not events:
            return
        try:
            refused = self._agents.take_telemetry(self.instance_id, job_id, events)
        except Exception as error:
            failure = self._unexpected(error, agent_service_pb2.TelemetryBatch(job_id=job_id))
            refused = [(event, failure) for event in events]
        for event, why in refused:
            self._refuse_telemetry(event.batch.sequence, why)

    def _refuse_telemetry(self, sequence: int, error: CoordinatorError) -> None:
        self._log_refusal("telemetry", error)
        refused = agent_service_pb2.TelemetryRefused(sequence=sequence, **refused_parts(error))
        self._outbox.enqueue(ConnectResponse(telemetry_refused=refused))

    def _answer_mistake(self, message: RankMessage, error: CoordinatorError) -> None:
        """Refuse the rank if the message announces it (now, or once its job is registered), else the
        message."""
        is_rank_refused = isinstance(message, agent_service_pb2.RankJoined) or (
            isinstance(message, agent_service_pb2.GpuError) and isinstance(error, JobNotFoundError)
        )
        if not is_rank_refused or not message.HasField("rank"):
            self._refuse(error, message)
            return
        count_refusal(error)
        is_foreign = isinstance(error, JobOutOfScopeError)
        max_clock = None if is_foreign else self._agents.max_clock(message.job_id)
        refused = rank_refused(cut(message.job_id), message.rank, error, max_clock)
        self._outbox.enqueue(ConnectResponse(rank_refused=refused))

    def _refuse(self, error: MappedError, about: RankMessage | None = None) -> None:
        self._log_refusal(type(about).__name__ if about is not None else "message", error)
        refused = agent_service_pb2.MessageRefused(
            **refused_parts(error),
            job_id=cut(about.job_id) if about is not None else "",
            rank=about.rank if about is not None and about.HasField("rank") else None,
        )
        self._outbox.enqueue(ConnectResponse(message_refused=refused))

    def _note_refusal(self, refused: agent_service_pb2.MessageRefused) -> None:
        """Log that the agent refused a message. Never answer: two refusals would chase each other."""
        self._log_limited(
            "agent refuses a message",
            ("theirs", refused.reason, _kind(refused.field)),
            reason=cut(refused.reason),
            field=cut(refused.field),
            expected=cut(refused.expected),
            found=cut(refused.found),
            job_id=cut(refused.job_id),
        )

    def _log_refusal(self, what: str, error: MappedError) -> None:
        count_refusal(error)
        parts = refused_parts(error)
        key = (what, parts["reason"], _kind(parts["field"]))
        self._log_limited("message of an agent refused", key, message=what, error=str(error))

    def _log_limited(self, event: str, kind: tuple[str, str, str], **details: str) -> None:
        """Warn once of each kind and stream: a faulty agent may err a thousand times a second."""
        if kind not in self._logged and len(self._logged) < _KINDS_LIMIT:
            self._logged.add(kind)
            log.warning(event, instance_id=self.instance_id, hostname=self._hostname, **details)

    def _unexpected(self, error: Exception, message: RankMessage) -> CoordinatorError:
        where = type(message).__name__
        kind = (where, "INTERNAL", type(error).__name__)
        if kind in self._logged:
            return InternalError(cause=type(error).__name__)
        self._logged.add(kind)
        return unexpected(error, where, instance_id=self.instance_id, job_id=cut(message.job_id))


def rank_refused(
    job_id: str, rank: rank_pb2.RankCoordinates, error: CoordinatorError, max_clock: MaxClock | None
) -> agent_service_pb2.RankRefused:
    """Return the message that tells an agent that a rank is not served."""
    info = error_info(error)
    return agent_service_pb2.RankRefused(
        job_id=job_id,
        rank=rank,
        reason=info.reason,
        message=str(error),
        metadata=info.metadata,
        max_clock=max_clock_to_proto(max_clock),
        lease_left_s=error.lease_left_s if isinstance(error, ServedError) else None,
    )


def _kind(field: str) -> str:
    """Return a field's path without row numbers."""
    return re.sub(r"\[\d+\]", "", cut(field))
