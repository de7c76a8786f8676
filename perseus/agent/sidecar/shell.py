"""The agent: local socket, ranks and the coordinator's stream brought together. `run` is the entry point.

Everything that decides is elsewhere: `rank.session` (one rank's life), `stream` (what is said to the
coordinator and kept for it, and registrations), `restore` (what is to be restored).

On every way out the GPUs are reset before the agent says goodbye. A reset that fails leaves its record on
disk, and so does an agent that dies; every agent looks after such records, from its start to its end.

A rank whose GPU can't be used is not served, but its trainer's line stays open: its job can be registered,
and the coordinator learns what is wrong. The GPU is tried again from time to time, and the rank served when
it has come back. A trainer that may not have its GPU, or its job, is turned away: `claims` decides that, of
what `door` sees, before anything is done, and again for as long as the rank is served.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import assert_never

import structlog

from perseus.agent.claims.book import GPU_TAKEN, Book, Claim
from perseus.agent.claims.decision import Allowed, Refused
from perseus.agent.clocks.patience import Comeback
from perseus.agent.gpu import GpuError, GpuInUseError
from perseus.agent.gpu.lanes import Lanes
from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import (
    ComputationMark,
    Finish,
    HealthQuestion,
    Hello,
    IterationMark,
    MalformedPacket,
    Membership,
    Message,
    Registration,
    Reply,
    WaitMark,
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
from perseus.agent.sidecar.collector import AgentCollector
from perseus.agent.sidecar.complaints import Complaints
from perseus.agent.sidecar.door import Door
from perseus.agent.sidecar.estimator import Estimator
from perseus.agent.sidecar.inventory import Inventory
from perseus.agent.sidecar.job_mapping import JobMapping
from perseus.agent.sidecar.listening import SocketAccess
from perseus.agent.sidecar.local import HELLO_TIMEOUT_S, Line, LocalServer
from perseus.agent.sidecar.metrics_server import serving_metrics_of
from perseus.agent.sidecar.same_clock import check_clock
from perseus.agent.sidecar.served import OpenedGpu, ServedRank, gpu_error_report
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.sidecar.vitals import Vitals
from perseus.agent.stream import registration
from perseus.agent.stream.coordinator import Coordinator
from perseus.agent.stream.registration import Outcome, Registered, Registrar, Unreachable
from perseus.tls.address import is_local
from perseus.tls.channels import Channels
from perseus.tls.tokens import find_token

_log = structlog.get_logger(__name__)

_TICK_S = 0.1
_STOP_S = 5.0
# Marks and clocks must not wait Python's 5 ms for the thread that works energy estimates out.
_SWITCH_INTERVAL_S = 0.0005
_REPORT_RETRY_S = 1.0
# Of one trainer's GPU; a text may have a figure in it, and so be another every time.
_MOST_REPORTS = 16
# How often power and clock are read for the metrics.
_READING_S = 1.0
# How often a claim is judged again: one that nothing speaks for yet, and one that something does.
_WATCH_UNPROVEN_S = 1.0
_WATCH_S = 5.0
# How long a trainer waits for another one's GPU, which gives way to it.
_GIVE_WAY_S = 10.0
# How long a process that says hello again is given to have left before.
_LEAVE_S = 2.0
_CLAIM_LOST = "CLAIM_LOST"


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
    access = SocketAccess(int(settings.socket_mode, 8), settings.socket_group)
    server = LocalServer(settings.socket, access, agent.converse)
    metrics = contextlib.ExitStack()
    try:
        metrics.enter_context(serving_metrics_of(agent.collector, settings))
    except BaseException:
        await server.close()
        raise
    working = asyncio.create_task(agent.work())
    _log.info("serving", socket=str(settings.socket), coordinator=settings.coordinator)
    try:
        yield working
    finally:
        await asyncio.to_thread(metrics.close)
        await agent.stop()
        await server.close()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await agent.restore_all()
        _log.info("stopped")


class _Trainer:
    """A trainer whose claim is entered. `problem`: what is wrong with its GPU, if that is known already."""

    def __init__(self, claim: Claim, line: Line, is_registered: bool, problem: GpuError | None) -> None:
        self.claim = claim
        self.line = line
        self.is_registered = is_registered
        self.problem = problem
        self.told_problem = ""
        self.dropped_mark_count = 0
        self.gpu_index: int | None = None
        self.spec_fingerprint: str | None = None
        self.has_marked = asyncio.Event()
        self.gone = asyncio.Event()
        self.serving: asyncio.Task[None] | None = None
        self.watching: asyncio.Task[None] | None = None

    @property
    def rank(self) -> Rank:
        """The rank that it trains."""
        return self.claim.rank


class Agent:
    """All ranks of this node, and their coordinator.

    Trainers may use `gpus`; whatever a dead agent has left is restored on `all_gpus`.

    Attributes:
        collector: reads its metrics.
    """

    def __init__(self, settings: AgentSettings, gpus: Backend, all_gpus: Backend) -> None:
        self._settings = settings
        self._gpus = gpus
        self._records = RecordFolder(settings.restore_folder)
        lanes = Lanes()
        self._restorer = Restorer(self._records, all_gpus.open, lanes)
        self._ranks: dict[Rank, ServedRank] = {}
        self._lanes = lanes
        self._door = Door(gpus, settings.grants, lanes)
        self._inventory = Inventory(gpus, lanes)
        self._book = Book()
        self._trainers: dict[Rank, _Trainer] = {}
        self._complaints = Complaints(_log)
        self._estimator = Estimator()
        self._welcome: Welcome | None = None
        # What went wrong with the GPUs of trainers that are connected: told on every stream, each once.
        self._reports: dict[Rank, list[GpuErrorReport]] = {}
        token = find_token(
            path=settings.token_file,
            token=settings.token.get_secret_value() if settings.token is not None else None,
            is_local=is_local(settings.coordinator),
        )
        channels = Channels(settings.coordinator, settings.tls_files, token)
        if channels.is_exposed:
            _log.warning("insecure: plaintext to another machine", coordinator=settings.coordinator)
        self._registrar = Registrar(channels)
        self._connecting: asyncio.Task[None] | None = None
        self._is_stopping = False
        identity = AgentIdentity(uuid.uuid4().hex, version("perseus-energy"), socket.gethostname())
        self._coordinator = Coordinator(channels, identity, self, random.random)
        self._vitals = Vitals()
        self.collector = AgentCollector(self._ranks, self._coordinator, self._restorer, self._vitals)
        self._mapping = JobMapping(settings.job_mapping_folder) if settings.job_mapping_folder else None
        if self._mapping is not None:
            self._mapping.clear()

    async def work(self) -> None:
        """Keep in touch with the coordinator, and let time pass. Ends when cancelled, or if a part fails."""
        async with asyncio.TaskGroup() as parts:
            self._connecting = parts.create_task(self._coordinator.run())
            parts.create_task(self._tick())
            parts.create_task(self._inventory.tell())
            if not self._settings.observe:
                parts.create_task(self._restorer.keep_restoring())

    async def stop(self) -> None:
        """Every GPU back to stock, then goodbye."""
        self._is_stopping = True
        ranks = list(self._ranks.values())
        for rank in ranks:
            rank.handle(AgentStops())
        await asyncio.gather(*(rank.ended() for rank in ranks))
        self._door.close()
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
        trainer: _Trainer | None = None
        try:
            hello = await self._hello(line)
            if hello is None:
                return
            if isinstance(hello, HealthQuestion):
                line.reply(await self._health())
                return
            admitted = await self._admit(hello, line)
            if isinstance(admitted, Refused):
                self._turn_away(line, hello, admitted)
                return
            trainer = admitted
            served = await self._take_up(trainer)
            trainer.serving = asyncio.create_task(self._keep_serving(trainer, served))
            while (message := await line.receive()) is not None:
                await self._trainer_said(trainer, message)
        except MalformedPacket as error:
            rank = str(trainer.rank) if trainer else None
            uid, text = line.peer.uid, str(error)
            self._complaints.complain(
                uid, "trainer not understood", "MALFORMED_PACKET", rank=rank, message=text
            )
            line.reply(Reply(False, "MALFORMED_PACKET", text))
        finally:
            if trainer is not None:
                await self._let_go(trainer)

    async def _let_go(self, trainer: "_Trainer") -> None:
        try:
            tasks = [task for task in (trainer.watching, trainer.serving) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if (served := self._ranks.get(trainer.rank)) is not None:
                served.handle(TrainerGone())
                await served.ended()
        finally:
            self._forget(trainer)

    async def _health(self) -> Reply:
        """Whether GPUs can be served; a coordinator that is away is no fault of the agent's."""
        found = await self._inventory.look()
        address = self._settings.coordinator
        is_connected = self._coordinator.is_connected
        coordinator = f"connected to {address}" if is_connected else f"not connected to {address}"
        parts = [f"GPUs: {found.gpu_count}", f"ranks: {len(self._ranks)}", coordinator, *found.problems]
        return Reply(found.gpu_count > 0, "" if found.gpu_count else "NO_GPU", "; ".join(parts))

    async def _hello(self, line: Line) -> Hello | HealthQuestion | None:
        """The first packet of a connection; None if there is none to come."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await line.receive_small()
        except TimeoutError:
            message = f"expected a hello within {HELLO_TIMEOUT_S:g} s, found silence"
            self._complaints.complain(line.peer.uid, "connection refused", "HELLO_TIMEOUT", message=message)
            line.reply(Reply(False, "HELLO_TIMEOUT", message))
            return None
        if hello is not None and not isinstance(hello, Hello | HealthQuestion):
            raise MalformedPacket(f"expected a hello, found {type(hello).__name__}")
        return hello

    def _turn_away(self, line: Line, hello: Hello, refused: Refused) -> None:
        self._vitals.refusal_counts[refused.reason] += 1
        self._complaints.complain(
            line.peer.uid, "rank refused", refused.reason, rank=str(hello.rank), message=refused.message
        )
        line.end(Reply(False, refused.reason, refused.message))

    async def _admit(self, hello: Hello, line: Line) -> "_Trainer | Refused":
        """Enter a trainer's claim, or say why not; whoever has to give way to it is gone by then."""
        if self._is_stopping:
            return Refused("AGENT_STOPS", "the agent is being stopped")
        if (refused := check_clock(line.peer, hello.time_ns, time.monotonic_ns())) is not None:
            return refused
        user = await self._door.user(line.peer)
        verdict: Allowed | Refused | None
        problem = None
        try:
            verdict = await self._door.judge(line.peer, user, hello.gpu_uuid, None)
        except GpuError as error:  # whoever serves it will meet the same, and tell
            verdict, problem = None, error
        if isinstance(verdict, Refused):
            return verdict
        claim = Claim(hello.rank, hello.gpu_uuid, user, verdict)
        if (before := self._trainers.get(hello.rank)) is not None and before.line.peer.pid == line.peer.pid:
            # It has left, and is back at once: its last words, and its GPU's way to stock, take a moment.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await before.gone.wait()
        try:
            async with asyncio.timeout(_GIVE_WAY_S):
                while conflicting := self._book.conflicts(claim):
                    if isinstance(conflicting, Refused):
                        return conflicting
                    for other in [self._trainers[each.rank] for each in conflicting]:
                        self._end(
                            other, Refused(_CLAIM_LOST, f"{other.rank}: it is user {user}'s, as is seen now")
                        )
                        await other.gone.wait()
        except TimeoutError:
            return Refused(GPU_TAKEN, f"GPU {hello.gpu_uuid}: another rank runs on it")
        if self._is_stopping:
            return Refused("AGENT_STOPS", "the agent is being stopped")
        self._book.enter(claim)
        trainer = self._trainers[hello.rank] = _Trainer(claim, line, hello.is_registered, problem)
        self._reports[hello.rank] = []
        return trainer

    async def _take_up(self, trainer: "_Trainer") -> ServedRank | None:
        """Serve a rank, or tell its probe and the coordinator what is wrong with its GPU."""
        claim, line = trainer.claim, trainer.line
        is_first = trainer.serving is None
        try:
            if trainer.problem is not None:
                error, trainer.problem = trainer.problem, None
                raise error
            if claim.verdict is None and not await self._may_have_its_gpu(trainer):
                return None
            rank = await self._serve(trainer)
        except GpuError as error:
            claim.verdict = None
            if trainer.told_problem != str(error):
                _log.error("GPU not usable", rank=str(claim.rank), gpu=claim.gpu_uuid, reason=str(error))
            trainer.told_problem = str(error)
            if is_first:
                line.reply(Reply(True, "GPU_NOT_USABLE", f"the rank is not served: {error}"))
            self._report(gpu_error_report(claim.rank, claim.gpu_uuid, error, claim.user.name))
            return None
        if is_first:
            line.reply(Reply(True))
        if trainer.spec_fingerprint is not None:
            rank.handle(TrainerSpecified(trainer.spec_fingerprint))
        if self._welcome is not None:
            rank.handle(Connected(self._welcome.lease_s))
        if trainer.watching is None:
            trainer.watching = asyncio.create_task(self._watch(trainer))
        return rank

    async def _may_have_its_gpu(self, trainer: "_Trainer") -> bool:
        """Judge the claim to a GPU that could not be used before; `GpuError` if that can't be done now."""
        claim = trainer.claim
        verdict = await self._door.judge(trainer.line.peer, claim.user, claim.gpu_uuid, None)
        if isinstance(verdict, Refused):
            self._end(trainer, verdict)
            return False
        if self._book.has_other_for_gpu(claim):
            raise GpuInUseError(f"GPU {claim.gpu_uuid}: another rank runs on it")
        claim.verdict = verdict
        return True

    async def _serve(self, trainer: "_Trainer") -> ServedRank:
        """`GpuError` if the GPU can't be had; whatever is raised, it is free again."""
        claim, owner, observe = trainer.claim, trainer.claim.user.name, self._settings.observe
        uuid = claim.gpu_uuid

        def open_gpu(uuid: str) -> OpenedGpu:
            gpu = self._gpus.open(uuid)
            try:
                return OpenedGpu.of(gpu if observe else GuardedGpu(gpu, self._records, self._settings.stock))
            except BaseException:
                gpu.close()
                raise

        opened = await self._restorer.take(uuid, open_gpu)
        try:
            if self._is_stopping:
                raise GpuInUseError(f"GPU {uuid}: the agent is being stopped")
            rank = ServedRank(
                claim.rank,
                opened,
                self._estimator,
                observe=observe,
                after_sequence=self._coordinator.telemetry_sequence,
                is_registered=trainer.is_registered,
                owner=owner,
                say=self._coordinator.say,
                report=lambda error: self._report(gpu_error_report(claim.rank, uuid, error, owner)),
                give_back=lambda close: self._restorer.give_back(uuid, close),
                vitals=self._vitals.opened(uuid),
                reading_interval_s=_READING_S if self._settings.metrics_listen is not None else None,
            )
        except BaseException:
            await self._restorer.give_back(uuid, opened.close)
            raise
        self._ranks[claim.rank] = rank
        trainer.told_problem = ""
        if self._mapping is not None and trainer.gpu_index is None:
            with contextlib.suppress(GpuError):  # whoever serves it meets the same
                trainer.gpu_index = (await self._lanes.run(uuid, lambda: self._gpus.look(uuid))).index
                self._mapping.enter(trainer.gpu_index, claim.rank.job_id)
        _log.info("rank served", rank=str(rank.rank), gpu=rank.gpu_uuid, user=owner)
        return rank

    async def _keep_serving(self, trainer: "_Trainer", rank: ServedRank | None) -> None:
        """Take a rank up again whose GPU has failed, for as long as its trainer stays."""
        comeback = Comeback()
        while not self._is_stopping:
            if rank is not None:
                comeback.served(time.monotonic())
                await rank.ended()
                if not rank.has_failed:
                    return
                del self._ranks[trainer.rank]
            now_s = time.monotonic()
            await asyncio.sleep(comeback.failed(now_s) - now_s)
            try:
                rank = await self._take_up(trainer)
            except Exception:  # a mistake of ours; it is tried again all the same
                _log.exception("rank not served", rank=str(trainer.rank))
                rank = None

    async def _watch(self, trainer: "_Trainer") -> None:
        """Judge a claim again, at the first mark and from then on: what can be seen changes."""
        claim = trainer.claim
        while True:
            pause_s = _WATCH_S if claim.is_proven else _WATCH_UNPROVEN_S
            if trainer.has_marked.is_set():
                await asyncio.sleep(pause_s)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await trainer.has_marked.wait()
            try:
                verdict = await self._door.judge(trainer.line.peer, claim.user, claim.gpu_uuid, claim.verdict)
            except GpuError:  # whoever serves the GPU meets it, too
                continue
            if claim.verdict is None:  # it could not be served meanwhile: it is judged when it comes back
                continue
            if isinstance(verdict, Refused):
                self._end(trainer, verdict)
                return
            claim.verdict = verdict

    def _end(self, trainer: "_Trainer", refused: Refused) -> None:
        """What was good is not good any more: the rank ends, and its GPU goes back to stock."""
        self._vitals.refusal_counts[refused.reason] += 1
        uid, rank = trainer.line.peer.uid, str(trainer.rank)
        self._complaints.complain(uid, "rank refused", refused.reason, rank=rank, message=refused.message)
        trainer.line.end(Reply(False, refused.reason, refused.message))
        if (served := self._ranks.get(trainer.rank)) is not None:
            served.handle(TrainerGone())

    async def _trainer_said(self, trainer: "_Trainer", message: Message) -> None:
        rank = trainer.rank
        match message:
            case IterationMark() | ComputationMark() | WaitMark() | Finish():
                trainer.has_marked.set()
                if isinstance(message, IterationMark) and message.dropped_mark_count:
                    dropped_count = message.dropped_mark_count - trainer.dropped_mark_count
                    trainer.dropped_mark_count = message.dropped_mark_count
                    self._vitals.note_dropped(trainer.claim.gpu_uuid, max(0, dropped_count))
                if rank in self._ranks:
                    self._ranks[rank].handle(message)
            case Registration():
                owner = trainer.claim.user.name
                reply = _reply(await self._registrar.register(rank.job_id, message, owner))
                if not reply.ok:
                    _log.error("registration refused", job=rank.job_id, reason=reply.message)
                trainer.line.reply(reply)
                self._specify(trainer, message.spec_fingerprint)
            case Membership(spec_fingerprint):
                self._specify(trainer, spec_fingerprint)
            case HealthQuestion() | Hello() | Reply():
                raise MalformedPacket(
                    f"expected a registration, a membership or a mark, found {type(message).__name__}"
                )
            case _:
                assert_never(message)

    def _specify(self, trainer: "_Trainer", spec_fingerprint: str) -> None:
        """Its trainer has said what it belongs to; the coordinator refuses what was not registered."""
        trainer.spec_fingerprint = spec_fingerprint
        if trainer.rank in self._ranks:
            self._ranks[trainer.rank].handle(TrainerSpecified(spec_fingerprint))

    def _forget(self, trainer: "_Trainer") -> None:
        rank = trainer.rank
        self._ranks.pop(rank, None)
        if self._mapping is not None and trainer.gpu_index is not None:
            self._mapping.leave(trainer.gpu_index)
        self._book.end(trainer.claim)
        del self._trainers[rank]
        self._registrar.forget_rank(rank)
        self._coordinator.say_next(self._reports.pop(rank))
        if not self._book.has_job(rank.job_id):
            self._registrar.forget_job(rank.job_id)
        trainer.gone.set()

    def _report(self, report: GpuErrorReport) -> None:
        """Let the coordinator know what went wrong with a GPU, once; its log keeps it."""
        self._vitals.note_error(report.gpu_uuid, report.reason)
        reports = self._reports[report.rank]
        if report not in reports:
            reports.append(report)
            del reports[:-_MOST_REPORTS]
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
        self._notify(accepted.rank, self._registrar.rank_accepted(accepted.rank))
        self._book.answered(accepted.rank, is_accepted=True)
        if accepted.rank in self._ranks:
            self._ranks[accepted.rank].handle(accepted)

    def _notify(self, rank: Rank, notice: Reply | None) -> None:
        """Let a trainer's own log know what became of its rank."""
        if notice is not None and (trainer := self._trainers.get(rank)) is not None:
            trainer.line.reply(notice)

    def _on_rank_refused(self, refused: RankRefused) -> None:
        rank = refused.rank
        self._notify(rank, self._registrar.rank_refused(refused))
        self._book.answered(rank, is_accepted=False)
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
        case registration.Refused(reason, message):
            if reason == JOB_ALREADY_EXISTS:
                message = f"{message}: this training goes on at stock clocks while they are"
            return Reply(False, reason, message)
