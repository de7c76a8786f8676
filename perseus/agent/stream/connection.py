"""The stream to the coordinator: opened, kept alive, and reopened for as long as the agent runs.

The agent reconnects with full jitter, so that a coordinator that restarts is not hit by all agents at once.
Every end of a stream leads to another attempt; a busy server refuses calls with CANCELLED and INTERNAL during
set-up, so they are as ordinary as UNAVAILABLE. If a status has a retry delay, the agent makes no attempt
before that. Repeated failures with the same cause are logged once, and again from time to time. The
coordinator answers heartbeats: silence for a whole lease means that the stream is dead, even if TCP considers
it open.

The agent refuses messages of the coordinator that it does not know (the coordinator may be newer)
individually, and the stream continues. Any other error, here or in gRPC, ends at most the stream, never the
agent.

Concurrent writes on one stream fail, hence one queue and one writer task. It sends together what a node's
ranks, which end their iterations at about the same time, report within a few milliseconds. Messages queued
for a stream that has ended are dropped; their senders resend them when `connected` is called.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Protocol

import grpc
import structlog

from perseus.agent.rank.messages import AgentIdentity, HeartbeatAnswer, Incoming, MessageRefused, Welcome
from perseus.agent.stream import statuses, translate
from perseus.agent.stream.call import Call
from perseus.bundles import bundled
from perseus.clock_skew import clock_ahead_s
from perseus.rate_limited_log import RateLimitedLog
from perseus.retry import Retry
from perseus.tls.channels import Channels
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1.agent_service_pb2_grpc import AgentServiceStub

_log = structlog.get_logger(__name__)

_HANDSHAKE_S = 10.0
_GOODBYE_S = 2.0
_FIRST_DELAY_S, _MAX_DELAY_S = 0.25, 15.0
_MAX_ROUND_DELAY_S = 5.0
"""The longest delay before all of several coordinators are tried again: ranks keep their plans if one that
takes over is found within their lease."""
_MAX_COMMIT_MARKER_LENGTH = 256

_MAX_JOBS = 1024
"""Jobs whose lease epochs are kept: no node serves more at a time."""

_GATHERING_S = 0.005
"""How long a message waits for others of a bundle: no answer is needed faster, and ranks that wait for each
other end an iteration closer together."""

_TRANSIENT = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL}

# Attempts follow our own backoff, so a new attempt must not wait for gRPC's own on a shared connection.
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


class _NoWelcomeError(Exception):
    """The coordinator's first message on a stream is not a Welcome."""


class Handler(Protocol):
    """Receives events of the connection; called on the event loop, never concurrently."""

    def connected(self, welcome: Welcome) -> None:
        """Called when a stream has opened."""

    def received(self, message: Incoming) -> None:
        """Called for each message of the coordinator."""

    def disconnected(self) -> None:
        """Called when the open stream has ended."""


class Connection:
    """One agent's stream to a coordinator, reopened whenever it ends.

    It is for the jobs of `slot`; None for those of the first coordinator that serves, which says so.
    """

    def __init__(
        self,
        channels: Channels,
        agent: AgentIdentity,
        handler: Handler,
        random: Callable[[], float],
        slot: int | None = None,
    ) -> None:
        self._channels = channels
        self._agent = agent
        self._handler = handler
        self._slot = slot
        self._random = random
        self._retry = self._new_retry()
        self._outbox: asyncio.Queue[wire.ConnectRequest | None] | None = None
        self._heard_at_s = 0.0
        # Wall clock: when the oldest heartbeat without an answer was sent, and how far it is ahead of theirs.
        self._asked_time_s: float | None = None
        self._clock_ahead_s: float | None = None
        self._was_welcome = self._has_short_rows = False
        self._asked_delay_s = 0.0
        self._error: grpc.aio.AioRpcError | None = None
        self._is_closing = False
        # Kept across streams: lets the coordinator detect that it has lost state.
        self._commit_marker = ""
        # Likewise: identifies this agent to the coordinator, even with another token.
        self._instance_key = ""
        # Likewise: by job, the highest lease epoch; messages with a lower one are out of date.
        self._lease_epochs: dict[str, int] = {}
        self._refused_log = RateLimitedLog(_log)
        self._outage_log = RateLimitedLog(_log)

    @property
    def is_connected(self) -> bool:
        """Whether a stream is open."""
        return self._outbox is not None

    @property
    def _may_be_taken_over(self) -> bool:
        return self._channels.has_several or self._slot is not None

    @property
    def heard_at_s(self) -> float:
        """The time of the coordinator's latest message, CLOCK_MONOTONIC; 0 before the first."""
        return self._heard_at_s

    def send(self, message: translate.Sendable) -> None:
        """Queue a message for the open stream; drop it if there is none, or it is about to end."""
        if self._outbox is not None and not self._is_closing:
            self._outbox.put_nowait(translate.request(message, has_short_rows=self._has_short_rows))

    def close(self, reason: str) -> None:
        """Send queued messages and a goodbye; `run` then returns. Without an open stream, cancel `run`."""
        self._is_closing = True
        if self._outbox is not None:
            self._outbox.put_nowait(translate.goodbye(reason))
            self._outbox.put_nowait(None)

    async def run(self) -> None:
        """Keep a stream open until `close`."""
        renewed: grpc.aio.Channel | None = None
        while not self._is_closing:
            channel, renewed = renewed, None
            try:
                renewed, reason = await self._attempt(channel)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                reason = "the call was cancelled"  # by gRPC: this task was not cancelled
            except Exception as error:
                reason = repr(error)
                self._outage_log.error(
                    "stream failed", reason, reason=reason, exc_info=True, coordinator=self._channels.address
                )
            address = self._channels.address
            if not self._is_closing and renewed is None and self._channels.move_on(self._error):
                delay_s = self._asked_delay_s + self._retry.failed()
                self._outage_log.warning(
                    "no coordinator",
                    reason,
                    reason=reason,
                    coordinator=address,
                    retry_in_s=round(delay_s, 3),
                )
                await asyncio.sleep(delay_s)
        if renewed is not None:
            await renewed.close()

    async def _attempt(self, channel: grpc.aio.Channel | None) -> tuple[grpc.aio.Channel | None, str]:
        """Run one stream to its end; return a channel with newer certificates, if any, and why it ended."""
        renewed: grpc.aio.Channel | None = None
        generation = self._channels.generation
        self._was_welcome, self._asked_delay_s, self._error = False, 0.0, None
        try:
            async with channel or self._channels.open(CHANNEL_OPTIONS) as opened:
                renewed = await self._stream(Call(AgentServiceStub(opened).Connect()), generation)
            reason = "the coordinator ended the stream"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            if error.code() is grpc.StatusCode.UNAUTHENTICATED and self._channels.token_origin:
                reason += f"; the token is from {self._channels.token_origin}"
            self._error = error
            retry_s = statuses.retry_delay_s(error)
            self._asked_delay_s = retry_s or 0.0
            if error.code() is grpc.StatusCode.UNAVAILABLE and retry_s is None and not self._was_welcome:
                reason = await self._channels.diagnosis() or reason
            elif error.code() not in _TRANSIENT and retry_s is None:
                self._outage_log.error(
                    "coordinator refuses the stream",
                    reason,
                    reason=reason,
                    coordinator=self._channels.address,
                )
        except (TimeoutError, _NoWelcomeError, translate.MalformedMessageError) as error:
            reason = str(error)
        return renewed, reason

    async def _stream(self, call: Call, generation: int) -> grpc.aio.Channel | None:
        """Exchange messages until the stream ends; return a channel if newer certificates ended it."""
        tasks: list[asyncio.Task[None]] = []
        is_renewed = False
        renewing = asyncio.create_task(self._channels.renewed(generation, CHANNEL_OPTIONS))
        try:
            welcome = await self._handshake(call)
            self._was_welcome = True
            self._retry.succeeded()
            self._outage_log.reset()
            self._heard_at_s = time.monotonic()
            self._outbox = asyncio.Queue()
            self._asked_time_s = self._clock_ahead_s = None
            self._has_short_rows = welcome.takes_short_rows
            _log.info(
                "connected", coordinator=self._channels.address, epoch=welcome.epoch, lease_s=welcome.lease_s
            )
            if welcome.protocol_version != translate.PROTOCOL_VERSION:
                self._refused_log.warning(
                    "the coordinator speaks another protocol version: unknown messages are refused",
                    str(welcome.protocol_version),
                    coordinator=self._channels.address,
                    protocol_version=welcome.protocol_version,
                    own_protocol_version=translate.PROTOCOL_VERSION,
                )
            self._handler.connected(welcome)
            writer = asyncio.create_task(self._write(call, self._outbox, welcome.max_bundle_bytes))
            reader = asyncio.create_task(self._read(call))
            heart = asyncio.create_task(self._send_heartbeats(self._outbox, welcome.lease_s))
            tasks = [writer, reader, heart]
            await asyncio.wait([*tasks, renewing], return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and writer.exception() is None:  # the last message is sent: let it arrive
                await asyncio.wait([reader], timeout=_GOODBYE_S)
            # An error in the reader is the stream's status; errors of writer and heart say less.
            for task in (reader, writer, heart):
                if task.done():
                    task.result()
            if not renewing.done():
                return None
            _log.info(
                "certificates renewed: continuing with a new stream", coordinator=self._channels.address
            )
            is_renewed = True
            return renewing.result()
        finally:
            for each in (*tasks, renewing):
                each.cancel()
            *_, channel = await asyncio.gather(*tasks, renewing, return_exceptions=True)
            if not is_renewed and isinstance(channel, grpc.aio.Channel):  # it ended for another reason
                await channel.close()
            call.cancel()
            if self._outbox is not None:
                self._outbox = None
                self._handler.disconnected()

    async def _handshake(self, call: Call) -> Welcome:
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                with contextlib.suppress(asyncio.InvalidStateError):  # the call has ended; reading says why
                    await call.write(
                        translate.hello(self._agent, self._commit_marker, self._instance_key, self._slot)
                    )
                while True:
                    answer = await call.read()
                    if answer is None:
                        raise _NoWelcomeError("expected a welcome, found the end of the stream")
                    try:
                        welcome = translate.response(answer)
                    except translate.MalformedMessageError as error:
                        if answer.HasField("welcome"):
                            raise
                        with contextlib.suppress(asyncio.InvalidStateError):  # as above
                            await call.write(translate.request(self._refusal(error)))
                        continue
                    if isinstance(welcome, Welcome):
                        self._bind(welcome)
                        self._note_commit_marker(answer)
                        if 0 < len(answer.welcome.instance_key) <= _MAX_COMMIT_MARKER_LENGTH:
                            self._instance_key = answer.welcome.instance_key
                        return welcome
                    raise _NoWelcomeError(f"expected a welcome, found {type(welcome).__name__}")
        except TimeoutError:
            raise TimeoutError(f"expected a welcome within {_HANDSHAKE_S} s, found silence") from None

    def _new_retry(self) -> Retry:
        max_delay_s = _MAX_ROUND_DELAY_S if self._may_be_taken_over else _MAX_DELAY_S
        return Retry(_FIRST_DELAY_S, max_delay_s, jitter=1.0, random=self._random)

    def _bind(self, welcome: Welcome) -> None:
        """Note the slot that the stream is for, as the first welcome says."""
        if self._slot not in (None, welcome.slot):
            raise _NoWelcomeError(f"expected a welcome for slot {self._slot}, found one for {welcome.slot}")
        if welcome.slot_count > 1:
            self._slot = welcome.slot
            self._retry = self._new_retry()

    async def _write(
        self, call: Call, outbox: asyncio.Queue[wire.ConnectRequest | None], max_bundle_bytes: int
    ) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):  # the call has ended; reading says why
            is_last = False
            while not is_last:
                waiting = [await outbox.get()]
                if max_bundle_bytes:
                    await asyncio.sleep(_GATHERING_S)
                while not outbox.empty():
                    waiting.append(outbox.get_nowait())
                is_last = None in waiting
                requests = [each for each in waiting if each is not None]
                for request in bundled(requests, max_bundle_bytes):
                    await call.write(request)
            await call.done_writing()

    async def _read(self, call: Call) -> None:
        while (answer := await call.read()) is not None:
            self._heard_at_s = time.monotonic()
            try:
                answers = translate.unbundled(answer)
            except translate.MalformedMessageError as error:
                self.send(self._refusal(error))
                continue
            for each in answers:
                self._take(each)

    def _take(self, answer: wire.ConnectResponse) -> None:
        self._note_commit_marker(answer)
        try:
            message = translate.response(answer)
            self._check_lease_epoch(answer)
        except translate.MalformedMessageError as error:
            self.send(self._refusal(error))
            return
        if isinstance(message, HeartbeatAnswer) and message.time_s is not None:
            self._compare_clocks(message.time_s)
        try:
            self._handler.received(message)
        except Exception:  # a bug that concerns one message
            _log.exception("message not handled", message=type(message).__name__)

    def _compare_clocks(self, their_time_s: float) -> None:
        if self._asked_time_s is not None:
            self._clock_ahead_s = -clock_ahead_s(self._asked_time_s, their_time_s, time.time())
            self._asked_time_s = None

    def _note_commit_marker(self, answer: wire.ConnectResponse) -> None:
        if 0 < len(marker := translate.commit_marker(answer)) <= _MAX_COMMIT_MARKER_LENGTH:
            self._commit_marker = marker

    def _check_lease_epoch(self, answer: wire.ConnectResponse) -> None:
        """Refuse a message of a coordinator from which another has taken over, as far as known here."""
        about = translate.about_rank(answer)
        if about is None or not about.lease_epoch:
            return
        highest = self._lease_epochs.pop(about.job_id, 0)
        self._lease_epochs[about.job_id] = max(highest, about.lease_epoch)  # the latest heard of comes last
        if len(self._lease_epochs) > _MAX_JOBS:
            del self._lease_epochs[next(iter(self._lease_epochs))]
        if about.lease_epoch < highest:
            raise translate.MalformedMessageError(
                "lease_epoch", f"at least {highest}", about.lease_epoch, "LEASE_EPOCH_PASSED"
            )

    def _refusal(self, error: translate.MalformedMessageError) -> MessageRefused:
        """Log an invalid or unknown message of the coordinator, and return the refusal."""
        refused = error.refused
        self._refused_log.warning(
            "message of the coordinator refused",
            refused.reason,
            refused.field,
            coordinator=self._channels.address,
            reason=str(error),
        )
        return refused

    async def _send_heartbeats(
        self, outbox: asyncio.Queue[wire.ConnectRequest | None], lease_s: float
    ) -> None:
        # Where another coordinator may have taken over, it must be found while the ranks keep their plans.
        limit_s = lease_s / 2 if self._may_be_taken_over else lease_s
        while time.monotonic() - self._heard_at_s < limit_s:
            outbox.put_nowait(translate.heartbeat(self._clock_ahead_s))
            if self._asked_time_s is None:  # one answer may stand for several heartbeats
                self._asked_time_s = time.time()
            await asyncio.sleep(limit_s / 3)
        raise TimeoutError(f"expected a message within {limit_s:g} s, found silence")
