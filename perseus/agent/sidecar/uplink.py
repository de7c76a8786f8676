"""Messages between the coordinators and this node's trainers and ranks.

`agent.stream` handles streams and the messages kept for them; this module routes each message to its rank.
"""

import asyncio
import random
import socket
import uuid
from collections.abc import Callable, Mapping
from typing import assert_never

import structlog

from perseus.agent.claims.grants import Labels
from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import Registration, Reply, Saving
from perseus.agent.rank.events import Connected, Disconnected, Event, Heard
from perseus.agent.rank.messages import (
    JOB_ALREADY_EXISTS,
    JOB_NOT_FOUND,
    AgentIdentity,
    FromSession,
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
from perseus.job_id import slot_of
from perseus.release import release
from perseus.tls.address import is_local
from perseus.tls.channels import Channels
from perseus.tls.tokens import find_token
from perseus.v1 import agent_service_pb2 as wire

# Per trainer; the text of an error may contain a number, and so differ every time.
_MAX_REPORTS = 16


class GpuReports:
    """GPU error reports of an agent's trainers, from hello to departure; `counters` counts them.

    `coordinator_of` returns a job's coordinator.
    """

    def __init__(self, coordinator_of: Callable[[str], Coordinator], counters: AgentCounters) -> None:
        self._coordinator_of = coordinator_of
        self._counters = counters
        self._reports: dict[Rank, list[wire.GpuError]] = {}

    def begin(self, rank: Rank) -> None:
        """Start the reports of a rank's new trainer."""
        self._reports[rank] = []

    def end(self, rank: Rank) -> None:
        """End the reports of a trainer that is gone; those not sent yet are kept for the next stream."""
        self._coordinator_of(rank.job_id).send_next(self._reports.pop(rank))

    def has_any(self, rank: Rank) -> bool:
        """Whether a trainer's GPU has any error report."""
        return bool(self._reports.get(rank))

    def of(self, rank: Rank) -> list[wire.GpuError]:
        """Return the reports of the current trainer, to which `report` later adds its errors."""
        return self._reports.get(rank, [])

    def report(self, rank: Rank, report: wire.GpuError, reports: list[wire.GpuError]) -> None:
        """Send a report to the coordinator once, even for a trainer that has left."""
        self._counters.note_error(report.gpu_uuid, GpuErrorReason(report.reason))
        coordinator = self._coordinator_of(rank.job_id)
        if reports is not self._reports.get(rank):
            coordinator.send(report)
            coordinator.send_next([report])  # where no stream is open
        elif report not in reports:
            reports.append(report)
            del reports[:-_MAX_REPORTS]
            coordinator.send(report)

    def report_again(self, rank: Rank) -> None:
        """Resend all reports of a rank to a coordinator that may not have them."""
        for report in self._reports.get(rank, []):
            self._coordinator_of(rank.job_id).send(report)

    def report_all_again(self, is_meant: Callable[[str], bool]) -> None:
        """Resend all reports of some jobs on a new stream."""
        for rank in self._reports:
            if is_meant(rank.job_id):
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


class SlotLink:
    """The stream for the jobs of one slot, and their ranks: a `stream.coordinator.Listener`.

    Attributes:
        channels: the way to the coordinator that serves the slot.
        coordinator: takes messages to it.
        lease_s: the lease on the open stream; None if no stream is open.
    """

    def __init__(self, uplink: "Uplink", channels: Channels, slot: int | None = None) -> None:
        self._uplink = uplink
        self._roster = uplink.roster
        self._running: asyncio.Task[None] | None = None
        self.channels = channels
        self.lease_s: float | None = None
        identity = AgentIdentity(uuid.uuid4().hex, release(), socket.gethostname())
        self.coordinator = Coordinator(channels, identity, self, random.random, slot)

    def start(self, streams: asyncio.TaskGroup) -> None:
        """Keep a stream open until `close`."""
        self._running = streams.create_task(self.coordinator.run())

    def close(self, reason: str) -> None:
        """Say goodbye, if a stream is open."""
        self.coordinator.close(reason)
        if self._running is not None and not self.coordinator.is_connected:
            self._running.cancel()

    def owns(self, job_id: str) -> bool:
        """Whether a job is of its slot."""
        return self._uplink.open_link(job_id) is self

    def welcomed(self, welcome: Welcome) -> None:
        """Note which slot the stream is for, and give away what is for others."""
        self._uplink.welcomed(self, welcome)

    def connected(self, welcome: Welcome) -> None:
        """Note an open stream and resend all reports."""
        self.lease_s = welcome.lease_s
        self._dispatch_to_all(Connected(welcome.lease_s))
        self._uplink.reports.report_all_again(self.owns)
        for trainer in self._roster.unmarked:
            if self.owns(trainer.rank.job_id):
                self._uplink.report_unmarked(trainer)

    def disconnected(self) -> None:
        """Note the end of the stream."""
        self.lease_s = None
        self._dispatch_to_all(Disconnected())

    def heard(self) -> None:
        """Renew the lease of all ranks."""
        self._dispatch_to_all(Heard())

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
            if (rank.pipeline, rank.stage, rank.tensor) == (0, 0, 0) and self.owns(rank.job_id):
                saving = savings.get(rank.job_id)
                trainer.inform(saving.rounded() if saving is not None else None)
        self._uplink.close_unused()

    def _dispatch_to_all(self, event: Event) -> None:
        for rank, served in list(self._roster.served.items()):
            if self.owns(rank.job_id):
                served.handle(event)

    def _on_plan_offer(self, offer: PlanOffer) -> None:
        served = self._roster.served.get(offer.rank)
        if served is not None and not served.has_ended:
            served.handle(offer)
        else:
            unknown = PlanRefusal(PlanRefusalReason.UNKNOWN_RANK, f"{offer.rank}: not served by this agent")
            self.coordinator.send(plan_answer(offer.rank, offer.plan, unknown, -1))

    def _on_rank_accepted(self, accepted: RankAccepted) -> None:
        self._notify(accepted.rank, self._uplink.registrar.rank_accepted(accepted.rank))
        self._roster.registry.answered(accepted.rank, is_accepted=True)
        self._roster.dispatch(accepted.rank, accepted)

    def _on_rank_refused(self, refused: RankRefused) -> None:
        rank, reports = refused.rank, self._uplink.reports
        if rank not in self._roster.trainers:
            return  # it has left meanwhile: nothing is registered for it
        self._notify(rank, self._uplink.registrar.rank_refused(refused))
        self._roster.registry.answered(rank, is_accepted=False)
        if refused.reason == JOB_NOT_FOUND and reports.has_any(rank):
            asyncio.get_running_loop().call_later(_REPORT_RETRY_S, reports.report_again, rank)
        self._roster.dispatch(rank, refused)

    def _notify(self, rank: Rank, notice: Reply | None) -> None:
        """Send a notice to a trainer for its own log."""
        if notice is not None:
            self._roster.reply(rank, notice)


class Uplink:
    """The connections of a roster's ranks and trainers to the coordinators. Raises as `channels_of`.

    A fleet's jobs are spread over slots, each of which one of its coordinators serves. The first link is for
    the slot of the first coordinator that answers, and stays. Other slots have one while there are trainers
    of their jobs; it reaches its coordinator from the first one's, which says where that is.

    Attributes:
        roster: the trainers and ranks.
        first: the first link; before its first stream, all jobs' messages are kept there.
        registrar: registers jobs.
        reports: the error reports of the trainers' GPUs.
    """

    def __init__(self, settings: AgentSettings, roster: Roster, counters: AgentCounters) -> None:
        self._address = settings.coordinator
        self.roster = roster
        channels = channels_of(settings)
        if channels.is_exposed:
            _log.warning("insecure: plaintext to another machine", coordinator=settings.coordinator)
        self.registrar = Registrar(lambda job_id: self.link(job_id).channels)
        self.reports = GpuReports(lambda job_id: self.link(job_id).coordinator, counters)
        self.first = SlotLink(self, channels)
        self._slot_count = 1
        self._links = {0: self.first}
        self._streams: asyncio.TaskGroup | None = None
        self._is_closing = False
        # Of links that were closed.
        self._batch_count = self._dropped_batch_count = 0

    @property
    def coordinators(self) -> list[Coordinator]:
        """Those of all links, that of the first one first."""
        return [link.coordinator for link in self._links.values()]

    @property
    def batch_count(self) -> int:
        """How many batches of telemetry were made."""
        return self._batch_count + sum(each.telemetry.batch_count for each in self.coordinators)

    @property
    def dropped_batch_count(self) -> int:
        """How many of them were dropped for lack of room or refused."""
        return self._dropped_batch_count + sum(
            each.telemetry.dropped_batch_count for each in self.coordinators
        )

    def describe(self) -> str:
        """Describe the connections to the coordinators, for people."""
        count = sum(each.is_connected for each in self.coordinators)
        if len(self._links) == 1:
            return f"{'connected' if count else 'not connected'} to {self._address}"
        return f"connected for {count} of {len(self._links)} slots of jobs, through {self._address}"

    async def run(self) -> None:
        """Keep the streams open until `close`."""
        async with asyncio.TaskGroup() as self._streams:
            self.first.start(self._streams)

    def close(self, reason: str) -> None:
        """Say goodbye and cancel registrations in progress; `run` then returns."""
        self._is_closing = True
        self.registrar.close()
        for link in self._links.values():
            link.close(reason)

    # --- Slots ----------------------------------------------------------------------------------------------

    def open_link(self, job_id: str) -> SlotLink | None:
        """Return the link of a job's slot, if there is one."""
        return self._links.get(slot_of(job_id, self._slot_count))

    def link(self, job_id: str) -> SlotLink:
        """Return the link of a job's slot, after opening it if there is none."""
        link = self.open_link(job_id)
        if link is None:
            if self._streams is None or self._is_closing:
                return self.first  # no more are opened
            slot = slot_of(job_id, self._slot_count)
            link = self._links[slot] = SlotLink(self, self.first.channels.beside(), slot)
            link.start(self._streams)
        return link

    def welcomed(self, link: SlotLink, welcome: Welcome) -> None:
        """Note how many slots there are, as the first welcome says, and open the other links."""
        if welcome.slot_count == self._slot_count:
            return
        if self._slot_count > 1:
            expected, found = self._slot_count, welcome.slot_count
            _log.error(
                "another number of slots: ranks join after a restart of the agent",
                expected=expected,
                found=found,
            )
            return
        jobs = link.coordinator.kept_jobs | {rank.job_id for rank in self.roster.trainers}
        self._slot_count, self._links = welcome.slot_count, {welcome.slot: link}
        for other in {self.link(job_id) for job_id in jobs} - {link}:
            other.coordinator.take_over(link.coordinator, other.owns)

    def close_unused(self) -> None:
        """Close links without trainers, once nothing is kept for them."""
        used = {slot_of(rank.job_id, self._slot_count) for rank in self.roster.trainers}
        for slot, link in list(self._links.items()):
            if link is not self.first and slot not in used and not link.coordinator.kept_jobs:
                del self._links[slot]
                self._batch_count += link.coordinator.telemetry.batch_count
                self._dropped_batch_count += link.coordinator.telemetry.dropped_batch_count
                link.close("the last rank of its jobs has left")

    # --- Trainers -------------------------------------------------------------------------------------------

    async def register(self, job_id: str, registration: Registration, owner: str, labels: Labels) -> Reply:
        """Register a job of `owner` with its labels; return the reply for the probe."""
        reply = _reply(await self.registrar.register(job_id, registration, owner, labels))
        if not reply.ok:
            _log.error("registration refused", job=job_id, reason=reply.message)
        return reply

    def begin(self, rank: Rank) -> None:
        """Note that a rank's trainer has arrived."""
        self.reports.begin(rank)

    def end(self, rank: Rank) -> None:
        """Note that a rank's trainer is gone and its claim has ended."""
        self.registrar.forget_rank(rank)
        self.reports.end(rank)
        if not self.roster.registry.has_job(rank.job_id):
            self.registrar.forget_job(rank.job_id)
        self.close_unused()

    def send(self, job_id: str, message: FromSession | wire.TrainerUnmarked) -> None:
        """Send a message about a job, as `Coordinator.send`."""
        self.link(job_id).coordinator.send(message)

    def report_unmarked(self, trainer: Trainer) -> None:
        """Report whether a trainer trains without marked iterations, as it says itself."""
        rank = trainer.rank
        unmarked = wire.TrainerUnmarked(
            job_id=rank.job_id, rank=coordinates(rank), message=trainer.unmarked or ""
        )
        self.send(rank.job_id, unmarked)


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
