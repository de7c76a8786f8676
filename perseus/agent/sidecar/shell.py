"""The agent: local socket, ranks and the coordinator's stream brought together. `run` is the entry point.

Everything that decides is elsewhere: `rank.session` (one rank's life), `stream` (what is said to the
coordinator and kept for it, and registrations), `restore` (what is to be restored).

On every way out the GPUs are reset before the agent says goodbye. A reset that fails leaves its record on
disk, and so does an agent that dies; every agent looks after such records, from its start to its end.

A rank whose GPU can't be used is not served, but its trainer's line stays open: its job can be registered,
and the coordinator learns what is wrong.
"""

import asyncio
import os
import random
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import assert_never

import structlog

from perseus.agent.gpu import GpuError
from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import (
    ComputationMark,
    Finish,
    Hello,
    IterationMark,
    MalformedPacket,
    Membership,
    Message,
    Registration,
    Reply,
)
from perseus.agent.rank.events import (
    AgentStops,
    Connected,
    Disconnected,
    Heard,
    Tick,
    TrainerGone,
    TrainerSpecified,
)
from perseus.agent.rank.messages import (
    JOB_ALREADY_EXISTS,
    JOB_NOT_FOUND,
    AgentIdentity,
    GpuErrorReport,
    PlanAnswer,
    PlanOffer,
    PlanRefusal,
    PlanRefusalReason,
    RankAccepted,
    RankRefused,
    ToSession,
    Welcome,
)
from perseus.agent.restore.guarded import GuardedGpu
from perseus.agent.restore.records import RecordFolder
from perseus.agent.restore.restorer import Restorer
from perseus.agent.sidecar.backends import Backend, VisibleGpus, backend
from perseus.agent.sidecar.estimator import Estimator
from perseus.agent.sidecar.local import Line, LocalServer
from perseus.agent.sidecar.served import ServedRank, gpu_error_report
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.stream.coordinator import Coordinator
from perseus.agent.stream.registration import Outcome, Refused, Registered, Registrar, Unreachable
from perseus.tls.channels import Channels

_log = structlog.get_logger(__name__)

_TICK_S = 0.1
_STOP_S = 5.0
# Marks and clocks must not wait Python's 5 ms for the thread that works energy estimates out.
_SWITCH_INTERVAL_S = 0.0005
_REPORT_RETRY_S = 1.0


async def run(settings: AgentSettings, lifeline: int | None = None) -> None:
    """Serve this node's trainers until SIGTERM or SIGINT, or until the supervisor is gone.

    `lifeline` is a file descriptor that becomes readable when the supervisor's end of it is closed.

    Raises:
        OSError: the local socket can not be had.
        TlsError: a certificate, its key or the CAs can't be used.
        RecordError: a GPU could not be brought back to stock; its record stays.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if lifeline is not None:
        loop.add_reader(lifeline, stop.set)
    try:
        async with serving(settings) as failure:
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait([stopped, failure], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if failure.done():
                failure.result()
    finally:
        if lifeline is not None:
            loop.remove_reader(lifeline)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def serving(settings: AgentSettings) -> AsyncIterator[asyncio.Task[None]]:
    """An agent that serves until the context is left; yields the task that ends only if the agent fails.

    Raises:
        OSError, TlsError, RecordError: as `run`.
    """
    gpus = backend(settings)
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible_gpus = gpus if visible_devices is None else VisibleGpus(gpus, visible_devices)
    agent = Agent(settings, visible_gpus, gpus)
    server = LocalServer(settings.socket, agent.converse)
    working = asyncio.create_task(agent.work())
    _log.info("serving", socket=str(settings.socket), coordinator=settings.coordinator)
    try:
        yield working
    finally:
        await agent.stop()
        await server.close()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await agent.restore_all()
        _log.info("stopped")


class Agent:
    """All ranks of this node, and their coordinator.

    Trainers may use `gpus`; whatever a dead agent has left is restored on `all_gpus`.
    """

    def __init__(self, settings: AgentSettings, gpus: Backend, all_gpus: Backend) -> None:
        self._settings = settings
        self._gpus = gpus
        self._records = RecordFolder(settings.restore_folder)
        self._restorer = Restorer(self._records, all_gpus.open)
        self._ranks: dict[Rank, ServedRank] = {}
        self._estimator = Estimator()
        self._welcome: Welcome | None = None
        # What went wrong with the GPUs of trainers that are connected: told on every stream, each once.
        self._reports: dict[Rank, list[GpuErrorReport]] = {}
        channels = Channels(settings.coordinator, settings.tls_files)
        if channels.is_exposed:
            _log.warning("insecure: plaintext to another machine", coordinator=settings.coordinator)
        self._registrar = Registrar(channels)
        self._connecting: asyncio.Task[None] | None = None
        self._is_stopping = False
        identity = AgentIdentity(uuid.uuid4().hex, version("perseus-energy"), socket.gethostname())
        self._coordinator = Coordinator(channels, identity, self, random.random)

    async def work(self) -> None:
        """Keep in touch with the coordinator, and let time pass. Ends when cancelled, or if a part fails."""
        async with asyncio.TaskGroup() as parts:
            self._connecting = parts.create_task(self._coordinator.run())
            parts.create_task(self._tick())
            if not self._settings.observe:
                parts.create_task(self._restorer.keep_restoring())

    async def stop(self) -> None:
        """Every GPU back to stock, then goodbye."""
        self._is_stopping = True
        ranks = list(self._ranks.values())
        for rank in ranks:
            rank.handle(AgentStops())
        await asyncio.gather(*(rank.ended() for rank in ranks))
        await asyncio.to_thread(self._estimator.close)
        self._registrar.close()
        self._coordinator.close("the agent was stopped")
        if self._coordinator.is_connected and self._connecting is not None:
            await asyncio.wait([self._connecting], timeout=_STOP_S)

    async def restore_all(self) -> None:
        """Bring back what dead agents have left, trying for a while. `RecordError` if a GPU can't be."""
        if not self._settings.observe:
            await self._restorer.restore_all()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._tell_all(Tick())

    # --- Trainers -------------------------------------------------------------------------------------------

    async def converse(self, line: Line) -> None:
        """One trainer's connection, from its first packet to its last."""
        admitted: Hello | None = None
        try:
            hello = await line.receive()
            if hello is None:
                return
            if not isinstance(hello, Hello):
                raise MalformedPacket(f"expected a hello, found {type(hello).__name__}")
            refusal = self._refusal(hello)
            if refusal is not None:
                _log.error(
                    "rank refused", rank=str(hello.rank), reason=refusal.reason, message=refusal.message
                )
                line.reply(refusal)
                return
            admitted = hello
            await self._admit(hello, line)
            while (message := await line.receive()) is not None:
                await self._trainer_said(hello.rank, message, line)
        except MalformedPacket as error:
            rank = str(admitted.rank) if admitted else None
            _log.error("trainer not understood", rank=rank, reason=str(error))
            line.reply(Reply(False, "MALFORMED_PACKET", str(error)))
        finally:
            if admitted is not None:
                if (served := self._ranks.get(admitted.rank)) is not None:
                    served.handle(TrainerGone())
                    await served.ended()
                self._forget(admitted)

    async def _admit(self, hello: Hello, line: Line) -> None:
        """Serve a rank, or tell its probe and the coordinator what is wrong with its GPU."""
        self._reports[hello.rank] = []
        try:
            gpu = await self._restorer.take(hello.gpu_uuid, self._gpus.open)
        except GpuError as error:
            _log.error("GPU not usable", rank=str(hello.rank), gpu=hello.gpu_uuid, reason=str(error))
            line.reply(Reply(True, "GPU_NOT_USABLE", f"the rank is not served: {error}"))
            self._report(gpu_error_report(hello.rank, hello.gpu_uuid, error))
            return
        observe = self._settings.observe
        rank = ServedRank(
            hello.rank,
            gpu if observe else GuardedGpu(gpu, self._records, self._settings.stock),
            self._estimator,
            observe=observe,
            after_sequence=self._coordinator.telemetry_sequence,
            is_registered=hello.is_registered,
            say=self._coordinator.say,
            report=lambda error: self._report(gpu_error_report(hello.rank, hello.gpu_uuid, error)),
        )
        self._ranks[hello.rank] = rank
        _log.info("rank served", rank=str(rank.rank), gpu=rank.gpu_uuid)
        line.reply(Reply(True))
        if self._welcome is not None:
            rank.handle(Connected(self._welcome.lease_s))

    def _refusal(self, hello: Hello) -> Reply | None:
        if self._is_stopping:
            return Reply(False, "AGENT_STOPS", "the agent is being stopped")
        if hello.rank in self._reports:
            message = f"{hello.rank}: another trainer is connected as this rank"
            return Reply(False, "RANK_ALREADY_SERVED", message)
        if self._restorer.is_taken(hello.gpu_uuid):
            return Reply(False, "GPU_ALREADY_IN_USE", f"GPU {hello.gpu_uuid}: another rank runs on it")
        return None

    async def _trainer_said(self, rank: Rank, message: Message, line: Line) -> None:
        match message:
            case IterationMark() | ComputationMark() | Finish():
                if rank in self._ranks:
                    self._ranks[rank].handle(message)
            case Registration():
                reply = _reply(await self._registrar.register(rank.job_id, message))
                if not reply.ok:
                    _log.error("registration refused", job=rank.job_id, reason=reply.message)
                line.reply(reply)
                self._specify(rank, message.spec_fingerprint)
            case Membership(spec_fingerprint):
                self._specify(rank, spec_fingerprint)
            case Hello() | Reply():
                raise MalformedPacket(
                    f"expected a registration, a membership or a mark, found {type(message).__name__}"
                )
            case _:
                assert_never(message)

    def _specify(self, rank: Rank, spec_fingerprint: str) -> None:
        """Its trainer has said what it belongs to; the coordinator refuses what was not registered."""
        if rank in self._ranks:
            self._ranks[rank].handle(TrainerSpecified(spec_fingerprint))

    def _forget(self, hello: Hello) -> None:
        rank = hello.rank
        if self._ranks.pop(rank, None) is not None:
            self._restorer.give_back(hello.gpu_uuid)
        self._registrar.forget_rank(rank)
        self._coordinator.say_next(self._reports.pop(rank))
        if not any(other.job_id == rank.job_id for other in self._reports):
            self._registrar.forget_job(rank.job_id)

    def _report(self, report: GpuErrorReport) -> None:
        """Let the coordinator know what went wrong with a GPU, once; its log keeps it."""
        reports = self._reports[report.rank]
        if report not in reports:
            reports.append(report)
            self._coordinator.say(report)

    def _report_again(self, rank: Rank) -> None:
        for report in self._reports.get(rank, []):
            self._coordinator.say(report)

    def _tell_all(self, event: Tick | Heard | Connected | Disconnected) -> None:
        for rank in list(self._ranks.values()):
            rank.handle(event)

    # --- Coordinator ----------------------------------------------------------------------------------------

    def connected(self, welcome: Welcome) -> None:
        """See `Listener.connected`."""
        self._welcome = welcome
        self._tell_all(Connected(welcome.lease_s))
        for rank in self._reports:
            self._report_again(rank)

    def disconnected(self) -> None:
        """See `Listener.disconnected`."""
        self._welcome = None
        self._tell_all(Disconnected())

    def heard(self) -> None:
        """See `Listener.heard`."""
        self._tell_all(Heard())

    def received(self, message: ToSession) -> None:
        """See `Listener.received`."""
        match message:
            case PlanOffer():
                self._on_plan_offer(message)
            case RankAccepted():
                self._on_rank_accepted(message)
            case RankRefused():
                self._on_rank_refused(message)
            case _:
                assert_never(message)

    def _on_plan_offer(self, offer: PlanOffer) -> None:
        rank = offer.rank
        if rank in self._ranks and not self._ranks[rank].has_ended:
            self._ranks[rank].handle(offer)
        else:
            unknown = PlanRefusal(PlanRefusalReason.UNKNOWN_RANK, f"{rank}: not served by this agent")
            self._coordinator.say(PlanAnswer(rank, offer.plan, unknown, -1))

    def _on_rank_accepted(self, accepted: RankAccepted) -> None:
        self._registrar.rank_accepted(accepted.rank)
        if accepted.rank in self._ranks:
            self._ranks[accepted.rank].handle(accepted)

    def _on_rank_refused(self, refused: RankRefused) -> None:
        rank = refused.rank
        self._registrar.rank_refused(refused)
        if refused.reason == JOB_NOT_FOUND and self._reports.get(rank):
            asyncio.get_running_loop().call_later(_REPORT_RETRY_S, self._report_again, rank)
        if rank in self._ranks:
            self._ranks[rank].handle(refused)


def _reply(outcome: Outcome) -> Reply:
    """What became of a registration, for the probe that asked for it."""
    match outcome:
        case Registered():
            return Reply(True)
        case Unreachable(message):
            return Reply(True, message=f"the job is registered as soon as possible: {message}")
        case Refused(reason, message):
            if reason == JOB_ALREADY_EXISTS:
                message = f"{message}: this training goes on at stock clocks while they are"
            return Reply(False, reason, message)
