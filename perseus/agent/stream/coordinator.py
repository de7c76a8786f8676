"""The coordinator as the agent's shell sees it: an endpoint for messages, independent of streams.

Telemetry is kept until it is acknowledged. The end of a rank, and GPU errors of a trainer that is gone, wait
for the next stream if none is open. All other messages go to the open stream or are dropped: on the next
stream they would be out of date.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, assert_never

import structlog

from perseus.agent.link.packets import Saving
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
    """Receives the coordinator's messages; called on the event loop, never concurrently."""

    def welcomed(self, welcome: Welcome) -> None:
        """Called first when a stream has opened: take away what is for other slots' coordinators."""

    def connected(self, welcome: Welcome) -> None:
        """Called when a stream has opened: send what the coordinator needs at once, before telemetry."""

    def heard(self) -> None:
        """Called for every message of the coordinator."""

    def received(self, message: ToSession) -> None:
        """Called for a message about one rank."""

    def saved(self, savings: Mapping[str, Saving]) -> None:
        """Called with the known savings of the jobs whose first ranks this agent serves."""

    def disconnected(self) -> None:
        """Called when the open stream has ended."""


class Coordinator:
    """The coordinator behind `channels` (a `connection.Handler`) that serves a slot of jobs.

    `slot` is as for `Connection`, `random` as for `Retry`.

    Attributes:
        telemetry: the telemetry kept for it.
        lease_s: its latest lease; None before the first.
        power_interval_s: its requested interval of power readings; None if it requests none or is absent.
    """

    def __init__(
        self,
        channels: Channels,
        agent: AgentIdentity,
        listener: Listener,
        random: Callable[[], float],
        slot: int | None = None,
    ) -> None:
        self._listener = listener
        self.telemetry = TelemetryRing()
        self.lease_s: float | None = None
        self.power_interval_s: float | None = None
        self._channels = channels
        self._final_messages: list[wire.RankLeft | wire.GpuError] = []
        self._connection = Connection(channels, agent, self, random, slot)
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
    def kept_jobs(self) -> set[str]:
        """The jobs of what is kept for it."""
        return {*self.telemetry.jobs, *(each.job_id for each in self._final_messages)}

    @property
    def heard_at_s(self) -> float:
        """The time of its latest message, CLOCK_MONOTONIC; 0 before the first."""
        return self._connection.heard_at_s

    @property
    def certificate_expiries_s(self) -> Mapping[str, float]:
        """The Unix time, by file, when a certificate for the connection expires."""
        return self._channels.expiries_s

    async def run(self) -> None:
        """Keep a stream open until `close`."""
        await self._connection.run()

    def close(self, reason: str) -> None:
        """Say goodbye; `run` then returns. Without an open stream, cancel `run`."""
        self._connection.close(reason)

    def send(self, message: FromSession | wire.GpuError | wire.PowerReading | wire.TrainerUnmarked) -> None:
        """Send a message: telemetry and a rank's end are kept for later streams, others are not."""
        match message:
            case Telemetry():
                self.telemetry.append(message)
                self._send_telemetry()
            case wire.RankLeft() if not self.is_connected:
                self._keep_final_message(message)
            case _:
                self._connection.send(message)

    def send_next(self, reports: Iterable[wire.GpuError]) -> None:
        """Keep reports of a departing trainer for the next stream, unless a stream is open."""
        if not self.is_connected:
            for report in reports:
                self._keep_final_message(report)

    def take_over(self, other: "Coordinator", is_own: Callable[[str], bool]) -> None:
        """Take over what is kept for another coordinator about jobs that turn out to be this one's.

        Call it first of all; batches keep their numbers.
        """
        self.telemetry = other.telemetry.split(lambda batch: is_own(batch.rank.job_id))
        self._final_messages = [each for each in other._final_messages if is_own(each.job_id)]
        other._final_messages = [each for each in other._final_messages if not is_own(each.job_id)]

    def _keep_final_message(self, message: wire.RankLeft | wire.GpuError) -> None:
        """Keep a message for the next stream, dropping duplicates and the oldest messages."""
        if message in self._final_messages:
            self._final_messages.remove(message)
        self._final_messages.append(message)
        del self._final_messages[:-_MAX_FINAL_MESSAGES]

    def connected(self, welcome: Welcome) -> None:
        """Resend everything that the coordinator has not acknowledged."""
        self.lease_s = welcome.lease_s
        self.power_interval_s = welcome.power_interval_s
        # Before another slot's coordinator takes over what is kept: it knows nothing of these sequences.
        self._acknowledge(welcome.acknowledged_sequence)
        self._listener.welcomed(welcome)
        self.telemetry.rewind()
        # These come first: a rank that has left may meanwhile be served for another trainer.
        final_messages, self._final_messages = self._final_messages, []
        for final in final_messages:
            self._connection.send(final)
        self._listener.connected(welcome)
        self._send_telemetry()

    def disconnected(self) -> None:
        """Note the end of the stream."""
        self.power_interval_s = None
        self._listener.disconnected()

    def received(self, message: Incoming) -> None:
        """Handle a message of the coordinator, or pass it to the listener."""
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
            case HeartbeatAnswer(power_interval_s, savings):
                self._listener.saved(savings)
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
                "telemetry refused and dropped",
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
