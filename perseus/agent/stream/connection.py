"""The stream to the coordinator: opened, kept alive, and opened again for as long as the agent runs.

The agent owns reconnection, with full jitter: a coordinator that restarts is not to be met by all agents at
once. Every end of a stream is followed by another attempt; CANCELLED and INTERNAL during set-up are how a
busy server turns calls away, so they are as ordinary as UNAVAILABLE. Where a status says when to come again,
no attempt is made before that. Attempts that fail alike are told of once, and again once in a while. The
coordinator answers heartbeats: a lease's silence means that the stream is dead, whatever TCP says.

What the coordinator says and this agent does not understand (it may be newer) is refused by itself, and the
stream goes on. Whatever else goes wrong, here or in gRPC, ends the stream at most, and never the agent.

Concurrent writes on one stream fail, hence one queue and one writer task. What was queued for a stream that
has ended is forgotten; whoever sent it says it anew when `connected` is called.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Protocol

import grpc
import structlog

from perseus.agent.rank.messages import AgentIdentity, Incoming, MessageRefused, Welcome
from perseus.agent.stream import statuses, translate
from perseus.agent.stream.call import Call
from perseus.rate_limited_log import RateLimitedLog
from perseus.retry import Retry
from perseus.tls.channels import Channels
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1.agent_service_pb2_grpc import AgentServiceStub

_log = structlog.get_logger(__name__)

_HANDSHAKE_S = 10.0
_GOODBYE_S = 2.0
_FIRST_DELAY_S, _MAX_DELAY_S = 0.25, 15.0
_MAX_COMMIT_MARKER_LENGTH = 256
_TRANSIENT = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL}

# Attempts follow our own backoff, so a new attempt must not wait for gRPC's own on a shared connection.
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


class _NoWelcomeError(Exception):
    """The coordinator's first word on a stream is another."""


class Handler(Protocol):
    """Who hears of the coordinator; called on the event loop, never concurrently."""

    def connected(self, welcome: Welcome) -> None:
        """A stream is open."""

    def received(self, message: Incoming) -> None:
        """The coordinator said something."""

    def disconnected(self) -> None:
        """The stream that was open has ended."""


class Connection:
    """One agent's stream to a coordinator, over and over."""

    def __init__(
        self, channels: Channels, agent: AgentIdentity, handler: Handler, random: Callable[[], float]
    ) -> None:
        self._channels = channels
        self._address = channels.address
        self._agent = agent
        self._handler = handler
        self._retry = Retry(_FIRST_DELAY_S, _MAX_DELAY_S, jitter=1.0, random=random)
        self._outbox: asyncio.Queue[wire.ConnectRequest | None] | None = None
        self._heard_at_s = 0.0
        self._was_welcome = False
        self._asked_delay_s = 0.0
        self._is_closing = False
        # Kept over streams: by it the coordinator finds that it has lost state.
        self._commit_marker = ""
        # Likewise: by it the coordinator knows this agent again, with whatever token it comes.
        self._instance_key = ""
        self._misunderstood = RateLimitedLog(_log)
        self._outage_log = RateLimitedLog(_log)

    @property
    def is_connected(self) -> bool:
        """Whether a stream is open."""
        return self._outbox is not None

    @property
    def heard_at_s(self) -> float:
        """When the coordinator said something last, CLOCK_MONOTONIC; 0 before."""
        return self._heard_at_s

    def send(self, message: translate.Sendable) -> None:
        """Queue for the stream that is open; without one, forget it."""
        if self._outbox is not None:
            self._outbox.put_nowait(translate.request(message))

    def close(self, reason: str) -> None:
        """Say what is queued and goodbye; `run` then returns. Without an open stream it must be cancelled."""
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
                reason = "the call was cancelled"  # by gRPC: nobody wants us to end
            except Exception as error:
                reason = repr(error)
                self._outage_log.error(
                    "stream failed", reason, reason=reason, exc_info=True, coordinator=self._address
                )
            if not self._is_closing and renewed is None:
                delay_s = self._asked_delay_s + self._retry.failed()
                self._outage_log.warning(
                    "no coordinator",
                    reason,
                    reason=reason,
                    coordinator=self._address,
                    retry_in_s=round(delay_s, 3),
                )
                await asyncio.sleep(delay_s)
        if renewed is not None:
            await renewed.close()

    async def _attempt(self, channel: grpc.aio.Channel | None) -> tuple[grpc.aio.Channel | None, str]:
        """One stream, from its beginning to its end: a channel with newer certificates, and why it ended."""
        renewed: grpc.aio.Channel | None = None
        generation = self._channels.generation
        self._was_welcome, self._asked_delay_s = False, 0.0
        try:
            async with channel or self._channels.open(CHANNEL_OPTIONS) as opened:
                renewed = await self._stream(Call(AgentServiceStub(opened).Connect()), generation)
            reason = "the coordinator ended the stream"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            retry_s = statuses.retry_delay_s(error)
            self._asked_delay_s = retry_s or 0.0
            if error.code() is grpc.StatusCode.UNAVAILABLE and not self._was_welcome:
                reason = await self._channels.diagnosis() or reason
            elif error.code() not in _TRANSIENT and retry_s is None:
                self._outage_log.error(
                    "coordinator refuses the stream", reason, reason=reason, coordinator=self._address
                )
        except (TimeoutError, _NoWelcomeError, translate.MalformedMessageError) as error:
            reason = str(error)
        return renewed, reason

    async def _stream(self, call: Call, generation: int) -> grpc.aio.Channel | None:
        """Talk until the stream ends; a channel with newer certificates, if that is why it does."""
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
            _log.info("connected", coordinator=self._address, epoch=welcome.epoch, lease_s=welcome.lease_s)
            if welcome.protocol_version != translate.PROTOCOL_VERSION:
                self._misunderstood.warning(
                    "the coordinator speaks another protocol version: what one side doesn't know is refused",
                    str(welcome.protocol_version),
                    coordinator=self._address,
                    protocol_version=welcome.protocol_version,
                    own_protocol_version=translate.PROTOCOL_VERSION,
                )
            self._handler.connected(welcome)
            writer = asyncio.create_task(self._write(call, self._outbox))
            reader = asyncio.create_task(self._read(call))
            heart = asyncio.create_task(self._send_heartbeats(self._outbox, welcome.lease_s))
            tasks = [writer, reader, heart]
            await asyncio.wait([*tasks, renewing], return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and writer.exception() is None:  # the last word is said: let it arrive
                await asyncio.wait([reader], timeout=_GOODBYE_S)
            # An error in the reader is the stream's status; writer and heart can only say less.
            for task in (reader, writer, heart):
                if task.done():
                    task.result()
            if not renewing.done():
                return None
            _log.info("certificates renewed: going on with a new stream", coordinator=self._address)
            is_renewed = True
            return renewing.result()
        finally:
            for each in (*tasks, renewing):
                each.cancel()
            *_, channel = await asyncio.gather(*tasks, renewing, return_exceptions=True)
            if not is_renewed and isinstance(channel, grpc.aio.Channel):  # the stream has ended all the same
                await channel.close()
            call.cancel()
            if self._outbox is not None:
                self._outbox = None
                self._handler.disconnected()

    async def _handshake(self, call: Call) -> Welcome:
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                with contextlib.suppress(asyncio.InvalidStateError):  # the call has ended; reading says why
                    await call.write(translate.hello(self._agent, self._commit_marker, self._instance_key))
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
                        self._note_commit_marker(answer)
                        if 0 < len(answer.welcome.instance_key) <= _MAX_COMMIT_MARKER_LENGTH:
                            self._instance_key = answer.welcome.instance_key
                        return welcome
                    raise _NoWelcomeError(f"expected a welcome, found {type(welcome).__name__}")
        except TimeoutError:
            raise TimeoutError(f"expected a welcome within {_HANDSHAKE_S} s, found silence") from None

    async def _write(self, call: Call, outbox: asyncio.Queue[wire.ConnectRequest | None]) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):  # the call has ended; reading says why
            while (request := await outbox.get()) is not None:
                await call.write(request)
            await call.done_writing()

    async def _read(self, call: Call) -> None:
        while (answer := await call.read()) is not None:
            self._heard_at_s = time.monotonic()
            self._note_commit_marker(answer)
            try:
                message = translate.response(answer)
            except translate.MalformedMessageError as error:
                self.send(self._refusal(error))
                continue
            try:
                self._handler.received(message)
            except Exception:  # a mistake of ours, on one message
                _log.exception("message not handled", message=type(message).__name__)

    def _note_commit_marker(self, answer: wire.ConnectResponse) -> None:
        if 0 < len(word := translate.commit_marker(answer)) <= _MAX_COMMIT_MARKER_LENGTH:
            self._commit_marker = word

    def _refusal(self, error: translate.MalformedMessageError) -> MessageRefused:
        """Say in the log what the coordinator said wrong, or newly, and return what it is told."""
        refused = error.refused
        self._misunderstood.warning(
            "message of the coordinator refused",
            refused.reason,
            refused.field,
            coordinator=self._address,
            reason=str(error),
        )
        return refused

    async def _send_heartbeats(
        self, outbox: asyncio.Queue[wire.ConnectRequest | None], lease_s: float
    ) -> None:
        while time.monotonic() - self._heard_at_s < lease_s:
            outbox.put_nowait(translate.heartbeat())
            await asyncio.sleep(lease_s / 3)
        raise TimeoutError(f"expected a word within the lease of {lease_s} s, found silence")
