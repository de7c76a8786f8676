"""Messages between the coordinator and this node's trainers and ranks.

`agent.stream` handles streams and the messages kept for them; this module routes each message to its rank.
"""

import asyncio
import random
import socket
import uuid
from collections.abc import Mapping
from typing import assert_never

import structlog

from perseus.agent.claims.grants import Labels
from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import Registration, Reply, Saving
from perseus.agent.rank.events import Connected, Disconnected, Heard
from perseus.agent.rank.messages import (
    JOB_ALREADY_EXISTS,
    JOB_NOT_FOUND,
    AgentIdentity,
    GpuErrorReason,
    PlanOffer,
    PlanRefusal,
    PlanRefusalReason,
    RankAccepted,
    RankMaxClock,
    RankRefused,
    ToSession,
    Welcome,
    coordinates,
    plan_answer,
)
from perseus.agent.sidecar.gpus import AgentCounters
from perseus.agent.sidecar.roster import Roster, Trainer
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.stream.coordinator import Coordinator
from perseus.agent.stream.registration import Outcome, Refused, Registered, Registrar, Unreachable
from perseus.release import release
from perseus.tls.address import is_local
from perseus.tls.channels import Channels
from perseus.tls.tokens import find_token
from perseus.v1 import agent_service_pb2 as wire

# Per trainer; the text of an error may contain a number, and so differ every time.
_MAX_REPORTS = 16


class GpuReports:
    """GPU error reports of an agent's trainers, from hello to departure; `counters` counts them."""

    def __init__(self, coordinator: Coordinator, counters: AgentCounters) -> None:
        self._coordinator = coordinator
        self._counters = counters
        self._reports: dict[Rank, list[wire.GpuError]] = {}

    def begin(self, rank: Rank) -> None:
        """Start the reports of a rank's new trainer."""
        self._reports[rank] = []

    def end(self, rank: Rank) -> None:
        """End the reports of a trainer that is gone; those not sent yet are kept for the next stream."""
        self._coordinator.send_next(self._reports.pop(rank))

    def has_any(self, rank: Rank) -> bool:
        """Whether a trainer's GPU has any error report."""
        return bool(self._reports.get(rank))

    def of(self, rank: Rank) -> list[wire.GpuError]:
        """Return the reports of the current trainer, to which `report` later adds its errors."""
        return self._reports.get(rank, [])

    def report(self, rank: Rank, report: wire.GpuError, reports: list[wire.GpuError]) -> None:
        """Send a report to the coordinator once, even for a trainer that has left."""
        self._counters.note_error(report.gpu_uuid, GpuErrorReason(report.reason))
        if reports is not self._reports.get(rank):
            self._coordinator.send(report)
            self._coordinator.send_next([report])  # where no stream is open
        elif report not in reports:
            reports.append(report)
            del reports[:-_MAX_REPORTS]
            self._coordinator.send(report)

    def report_again(self, rank: Rank) -> None:
        """Resend all reports of a rank to a coordinator that may not have them."""
        for report in self._reports.get(rank, []):
            self._coordinator.send(report)

    def report_all_again(self) -> None:
        """Resend all reports on a new stream."""
        for rank in self._reports:
            self.report_again(rank)


def channels_of(settings: AgentSettings) -> Channels:
    """Return an agent's channels to its coordinator, with its certificates and token.

    Raises:
        TlsError: a certificate can't be used.
        TokenFileError: the token or its file is not valid.
    """
    token = find_token(
        path=settings.token_file,
        token=settings.token.get_secret_value() if settings.token is not None else None,
        is_local=is_local(settings.coordinator),
        variable="PERSEUS_AGENT_TOKEN",
    )
    return Channels(settings.coordinator, settings.tls_files, token)


_log = structlog.get_logger(__name__)

_REPORT_RETRY_S = 1.0


class Uplink:
    """The connection of a roster's ranks and trainers to the coordinator. Raises as `channels_of`.

    Attributes:
        coordinator: takes messages to the coordinator.
        reports: the error reports of the trainers' GPUs.
    """

    def __init__(self, settings: AgentSettings, roster: Roster, counters: AgentCounters) -> None:
        self._address = settings.coordinator
        self._roster = roster
        self._welcome: Welcome | None = None
        channels = channels_of(settings)
        if channels.is_exposed:
            _log.warning("insecure: plaintext to another machine", coordinator=settings.coordinator)
        self._registrar = Registrar(channels)
        identity = AgentIdentity(uuid.uuid4().hex, release(), socket.gethostname())
        self.coordinator = Coordinator(channels, identity, self, random.random)
        self.reports = GpuReports(self.coordinator, counters)

    @property
    def lease_s(self) -> float | None:
        """The lease on the open stream; None if no stream is open."""
        return self._welcome.lease_s if self._welcome is not None else None

    def describe(self) -> str:
        """Describe the connection to the coordinator, for people."""
        state = "connected" if self.coordinator.is_connected else "not connected"
        return f"{state} to {self._address}"

    def close(self, reason: str) -> None:
        """Say goodbye and cancel registrations in progress."""
        self._registrar.close()
        self.coordinator.close(reason)

    # --- Trainers -------------------------------------------------------------------------------------------

    async def register(self, job_id: str, registration: Registration, owner: str, labels: Labels) -> Reply:
        """Register a job of `owner` with its labels; return the reply for the probe."""
        reply = _reply(await self._registrar.register(job_id, registration, owner, labels))
        if not reply.ok:
            _log.error("registration refused", job=job_id, reason=reply.message)
        return reply

    def begin(self, rank: Rank) -> None:
        """Note that a rank's trainer has arrived."""
        self.reports.begin(rank)

    def end(self, rank: Rank) -> None:
        """Note that a rank's trainer is gone and its claim has ended."""
        self._registrar.forget_rank(rank)
        self.reports.end(rank)
        if not self._roster.registry.has_job(rank.job_id):
            self._registrar.forget_job(rank.job_id)

    def report_unmarked(self, trainer: Trainer) -> None:
        """Report whether a trainer trains without marked iterations, as it says itself."""
        self.coordinator.send(
            wire.TrainerUnmarked(
                job_id=trainer.rank.job_id, rank=coordinates(trainer.rank), message=trainer.unmarked or ""
            )
        )

    # --- Messages from the coordinator: a `stream.coordinator.Listener` -------------------------------------

    def connected(self, welcome: Welcome) -> None:
        """Note an open stream and resend all reports."""
        self._welcome = welcome
        self._roster.dispatch_to_all(Connected(welcome.lease_s))
        self.reports.report_all_again()
        for trainer in self._roster.unmarked:
            self.report_unmarked(trainer)

    def disconnected(self) -> None:
        """Note the end of the stream."""
        self._welcome = None
        self._roster.dispatch_to_all(Disconnected())

    def heard(self) -> None:
        """Renew the lease of all ranks."""
        self._roster.dispatch_to_all(Heard())

    def received(self, message: ToSession) -> None:
        """Route a message to its rank."""
        match message:
            case PlanOffer():
                self._on_plan_offer(message)
            case RankAccepted():
                self._on_rank_accepted(message)
            case RankRefused():
                self._on_rank_refused(message)
            case RankMaxClock():
                self._roster.dispatch(message.rank, message)
            case _:
                assert_never(message)

    def saved(self, savings: Mapping[str, Saving]) -> None:
        """Pass savings that have changed by a tenth of a percent to the trainers of the jobs' first ranks."""
        for rank, trainer in self._roster.trainers.items():
            if (rank.pipeline, rank.stage, rank.tensor) == (0, 0, 0):
                saving = savings.get(rank.job_id)
                trainer.inform(saving.rounded() if saving is not None else None)

    def _on_plan_offer(self, offer: PlanOffer) -> None:
        served = self._roster.served.get(offer.rank)
        if served is not None and not served.has_ended:
            served.handle(offer)
        else:
            unknown = PlanRefusal(PlanRefusalReason.UNKNOWN_RANK, f"{offer.rank}: not served by this agent")
            self.coordinator.send(plan_answer(offer.rank, offer.plan, unknown, -1))

    def _on_rank_accepted(self, accepted: RankAccepted) -> None:
        self._notify(accepted.rank, self._registrar.rank_accepted(accepted.rank))
        self._roster.registry.answered(accepted.rank, is_accepted=True)
        self._roster.dispatch(accepted.rank, accepted)

    def _on_rank_refused(self, refused: RankRefused) -> None:
        rank = refused.rank
        self._notify(rank, self._registrar.rank_refused(refused))
        self._roster.registry.answered(rank, is_accepted=False)
        if refused.reason == JOB_NOT_FOUND and self.reports.has_any(rank):
            asyncio.get_running_loop().call_later(_REPORT_RETRY_S, self.reports.report_again, rank)
        self._roster.dispatch(rank, refused)

    def _notify(self, rank: Rank, notice: Reply | None) -> None:
        """Send a notice to a trainer for its own log."""
        if notice is not None:
            self._roster.reply(rank, notice)


def _reply(outcome: Outcome) -> Reply:
    """Return the reply to the probe for the outcome of a registration."""
    match outcome:
        case Registered():
            return Reply(True)
        case Unreachable(message):
            return Reply(True, message=f"the job is registered as soon as possible: {message}")
        case Refused(reason, message):
            if reason == JOB_ALREADY_EXISTS:
                message = f"{message}: this training runs at stock clocks meanwhile"
            return Reply(False, reason, message)
