"""The coordinator as the agent's shell sees it: whom to say things to, whatever becomes of the streams.

Telemetry is kept until it is acknowledged. The end of a rank, and what went wrong with a GPU whose trainer is
gone, wait for the next stream where none is open. All else is said on the stream that is open, or not at all:
it would be out of date on the next.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, assert_never

import structlog

from perseus.agent.rank.messages import (
    AgentIdentity,
    Drain,
    FromSession,
    HeartbeatAnswer,
    Incoming,
    MessageRefused,
    PlanOffer,
    RankAccepted,
    RankMaxClock,
    RankRefused,
    Telemetry,
    TelemetryAck,
    TelemetryRefused,
    ToSession,
    Welcome,
)
from perseus.agent.stream.connection import Connection
from perseus.agent.stream.telemetry import TelemetryRing
from perseus.rate_limited_log import RateLimitedLog
from perseus.tls.channels import Channels
from perseus.v1 import agent_service_pb2 as wire

_log = structlog.get_logger(__name__)

_MAX_FINAL_MESSAGES = 1024


class Listener(Protocol):
    """Who hears of the coordinator; called on the event loop, never concurrently."""

    def connected(self, welcome: Welcome) -> None:
        """A stream is open: say what the coordinator must know at once. Telemetry follows it."""

    def heard(self) -> None:
        """The coordinator said something, whatever it was."""

    def received(self, message: ToSession) -> None:
        """It said this of one rank."""

    def disconnected(self) -> None:
        """The stream that was open has ended."""


class Coordinator:
    """The coordinator that `channels` lead to (a `connection.Handler`); `random` is as for `Retry`.

    Attributes:
        telemetry: what is kept for it.
        lease_s: that it granted last, None before it did.
        power_interval_s: how often it wants to know what GPUs draw; None if it does not, or is not there.
    """

    def __init__(
        self, channels: Channels, agent: AgentIdentity, listener: Listener, random: Callable[[], float]
    ) -> None:
        self._listener = listener
        self.telemetry = TelemetryRing()
        self.lease_s: float | None = None
        self.power_interval_s: float | None = None
        self._channels = channels
        self._final_messages: list[wire.RankLeft | wire.GpuError] = []
        self._connection = Connection(channels, agent, self, random)
        self._refusals = RateLimitedLog(_log)

    @property
    def is_connected(self) -> bool:
        """Whether a stream is open."""
        return self._connection.is_connected

    @property
    def telemetry_sequence(self) -> int:
        """Number of the latest batch of telemetry, 0 before the first."""
        return self.telemetry.sequence

    @property
    def heard_at_s(self) -> float:
        """When it said something last, CLOCK_MONOTONIC; 0 before."""
        return self._connection.heard_at_s

    @property
    def certificate_expiries_s(self) -> Mapping[str, float]:
        """By file, the Unix time when a certificate on the way to it is of no use."""
        return self._channels.expiries_s

    async def run(self) -> None:
        """Keep a stream open until `close`."""
        await self._connection.run()

    def close(self, reason: str) -> None:
        """Say goodbye; `run` then returns. Without an open stream it must be cancelled."""
        self._connection.close(reason)

    def send(self, message: FromSession | wire.GpuError | wire.PowerReading) -> None:
        """Say it: telemetry and the end of a rank sooner or later, all else now or not at all."""
        match message:
            case Telemetry():
                self.telemetry.append(message)
                self._send_telemetry()
            case wire.RankLeft() if not self.is_connected:
                self._keep_final_message(message)
            case _:
                self._connection.send(message)

    def send_next(self, reports: Iterable[wire.GpuError]) -> None:
        """Say it on the next stream, unless one is open: whoever said it before is about to be gone."""
        if not self.is_connected:
            for report in reports:
                self._keep_final_message(report)

    def _keep_final_message(self, message: wire.RankLeft | wire.GpuError) -> None:
        """For the next stream; what has been said already, or too long ago, is not said again."""
        if message in self._final_messages:
            self._final_messages.remove(message)
        self._final_messages.append(message)
        del self._final_messages[:-_MAX_FINAL_MESSAGES]

    def connected(self, welcome: Welcome) -> None:
        """See `connection.Handler.connected`."""
        self.lease_s = welcome.lease_s
        self.power_interval_s = welcome.power_interval_s
        self._acknowledge(welcome.acknowledged_sequence)
        self.telemetry.rewind()
        # First of all: a rank that has left may be served for another trainer by now.
        final_messages, self._final_messages = self._final_messages, []
        for final in final_messages:
            self._connection.send(final)
        self._listener.connected(welcome)
        self._send_telemetry()

    def disconnected(self) -> None:
        """See `connection.Handler.disconnected`."""
        self.power_interval_s = None
        self._listener.disconnected()

    def received(self, message: Incoming) -> None:
        """See `connection.Handler.received`."""
        self._listener.heard()
        match message:
            case PlanOffer() | RankAccepted() | RankRefused() | RankMaxClock():
                self._listener.received(message)
            case TelemetryAck(sequence):
                self._acknowledge(sequence)
                self._send_telemetry()
            case TelemetryRefused():
                self._drop_refused(message)
            case MessageRefused(reason, field, expected, found, rank):
                self._refusals.warning(
                    "the coordinator refuses a message",
                    reason,
                    field,
                    reason=reason,
                    field=field,
                    expected=expected,
                    found=found,
                    rank=str(rank) if rank is not None else None,
                )
            case Drain(reason):
                _log.info("the coordinator is about to stop", reason=reason)
            case HeartbeatAnswer(power_interval_s):
                if power_interval_s is not None:
                    self.power_interval_s = power_interval_s
            case Welcome():
                _log.error("message ignored", reason="expected one welcome on a stream, found another")
            case _:
                assert_never(message)

    def _drop_refused(self, refused: TelemetryRefused) -> None:
        dropped_batch_count = self.telemetry.refuse(refused.sequence)
        if dropped_batch_count is not None:
            self._refusals.warning(
                "telemetry refused, and dropped",
                refused.reason,
                refused.field,
                sequence=refused.sequence,
                reason=refused.reason,
                field=refused.field,
                expected=refused.expected,
                found=refused.found,
                dropped_batch_count=dropped_batch_count,
            )
        self._send_telemetry()

    def _acknowledge(self, sequence: int) -> None:
        try:
            self.telemetry.acknowledge(sequence)
        except ValueError as error:
            _log.error("message ignored", reason=str(error))
            expected = f"at most {self.telemetry.sequence}, the latest that was sent"
            self._connection.send(
                MessageRefused("INVALID_FIELD", "telemetry_ack.sequence", expected, str(sequence))
            )

    def _send_telemetry(self) -> None:
        if self.is_connected:
            for batch in self.telemetry.sendable():
                self._connection.send(batch)
