"""The ranks of connected trainers: each from its trainer's hello to its end.

    converse         a trainer's connection, from its first packet to its last
      admit            may it have this GPU and this job? (`admission`, which keeps checking)
      _take_up         opens its GPU and serves the rank (`served`), or reports the error
      _keep_serving    serves a rank again after its GPU has failed, for as long as its trainer stays
      _on_message      passes marks to the rank's session and registrations to the coordinator
      _let_go          ends the rank; its GPU is back at stock before its claim ends

A rank whose GPU can't be used is not served, but its trainer stays connected: its job can be registered, and
the coordinator receives the error. The coordinator's messages for a rank arrive through `uplink`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import assert_never

import structlog

from perseus.agent.claims.decision import Refused
from perseus.agent.gpu import GpuError, GpuInUseError
from perseus.agent.link.packets import (
    ComputationMark,
    EngineHello,
    EngineReport,
    Finish,
    HealthQuestion,
    Hello,
    Instances,
    InstancesQuestion,
    IterationMark,
    MalformedPacket,
    Membership,
    Message,
    Packing,
    Registration,
    Reply,
    Unmarked,
    WaitMark,
)
from perseus.agent.rank.events import AgentStops, Connected, TrainerGone, TrainerSpecified
from perseus.agent.rank.session import Session
from perseus.agent.sidecar.admission import Admission
from perseus.agent.sidecar.gpus import RankGpus
from perseus.agent.sidecar.local import HELLO_TIMEOUT_S, REFUSAL_LOG_PERIOD_S, ProbeConnection
from perseus.agent.sidecar.roster import Roster, Trainer
from perseus.agent.sidecar.served import Estimator, ServedRank, gpu_error_report
from perseus.agent.sidecar.uplink import Uplink
from perseus.rate_limited_log import RateLimitedLog
from perseus.retry import Retry

_log = structlog.get_logger(__name__)

# A failed GPU is retried soon at first, then at least once a minute; some minutes without failure reset the
# delay.
_FIRST_DELAY_S, _MAX_DELAY_S, _FORGET_S = 1.0, 60.0, 120.0


class Ranks:
    """The ranks of a roster's trainers. `health` answers health questions, `serve_instances` engines."""

    def __init__(
        self,
        roster: Roster,
        admission: Admission,
        gpus: RankGpus,
        uplink: Uplink,
        health: Callable[[], Awaitable[Reply]],
        serve_instances: Callable[[ProbeConnection, EngineHello | InstancesQuestion], Awaitable[None]],
    ) -> None:
        self._roster = roster
        self._admission = admission
        self._gpus = gpus
        self._uplink = uplink
        self._health = health
        self._serve_instances = serve_instances
        self._estimator = Estimator()
        self._refusal_log = RateLimitedLog(_log, REFUSAL_LOG_PERIOD_S)

    async def stop(self) -> None:
        """End all ranks; their GPUs are back at stock when this returns."""
        served = list(self._roster.served.values())
        self._roster.dispatch_to_all(AgentStops())
        await asyncio.gather(*(rank.ended() for rank in served))

    def close(self) -> None:
        """End the estimator; blocks while an energy estimate is in progress. Call `stop` first."""
        self._estimator.close()

    # --- A trainer's connection -----------------------------------------------------------------------------

    async def converse(self, connection: ProbeConnection) -> None:
        """Serve one trainer's connection, from its first packet to its last."""
        trainer: Trainer | None = None
        try:
            hello = await self._hello(connection)
            if hello is None:
                return
            if isinstance(hello, HealthQuestion):
                connection.reply(await self._health())
                await connection.pay_hello()  # after the answer, which others of this user must not hold up
                return
            if isinstance(hello, EngineHello | InstancesQuestion):
                await self._serve_instances(connection, hello)
                return
            admitted = await self._admission.admit(hello, connection)
            if isinstance(admitted, Refused):
                self._admission.turn_away(connection, hello, admitted)
                return
            trainer = admitted
            self._uplink.begin(trainer.rank)
            served = await self._take_up(trainer)
            trainer.serving = asyncio.create_task(self._keep_serving(trainer, served))
            while messages := await connection.receive():
                for message in messages:
                    await self._on_message(trainer, message)
        except MalformedPacket as error:
            rank = str(trainer.rank) if trainer else None
            self._log_refusal(
                "malformed packet from trainer", "MALFORMED_PACKET", connection, str(error), rank=rank
            )
        finally:
            if trainer is not None:
                await self._let_go(trainer)

    async def _hello(
        self, connection: ProbeConnection
    ) -> Hello | HealthQuestion | EngineHello | InstancesQuestion | None:
        """Return the first packet of a connection; None if none arrives."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await connection.receive_small()
        except TimeoutError:
            message = f"expected a hello within {HELLO_TIMEOUT_S:g} s, found silence"
            self._log_refusal("connection refused", "HELLO_TIMEOUT", connection, message)
            return None
        if hello is not None and not isinstance(
            hello, Hello | HealthQuestion | EngineHello | InstancesQuestion
        ):
            raise MalformedPacket(f"expected a hello, found {type(hello).__name__}")
        return hello

    def _log_refusal(
        self, event: str, reason: str, connection: ProbeConnection, message: str, **details: object
    ) -> None:
        """Log a peer's error and send it to the peer."""
        uid = connection.peer.uid
        self._refusal_log.warning(event, uid, reason, uid=uid, reason=reason, message=message, **details)
        connection.reply(Reply(False, reason, message))

    async def _on_message(self, trainer: Trainer, message: Message) -> None:
        # Marks don't wait for the coordinator: meanwhile the trainer's socket would fill.
        is_mark = isinstance(message, IterationMark | ComputationMark | WaitMark)
        if trainer.registering is not None and (not is_mark or trainer.registering.done()):
            await trainer.registering
            trainer.registering = None
        match message:
            case IterationMark() | ComputationMark() | WaitMark() | Finish():
                trainer.has_marked.set()
                if trainer.unmarked:
                    self._note_unmarked(trainer, "")
                if isinstance(message, IterationMark) and message.dropped_mark_count:
                    dropped_count = message.dropped_mark_count - trainer.dropped_mark_count
                    trainer.dropped_mark_count = message.dropped_mark_count
                    self._gpus.counters.note_dropped(trainer.claim.gpu_uuid, max(0, dropped_count))
                self._roster.dispatch(trainer.rank, message)
            case Registration():
                trainer.registering = asyncio.create_task(self._register(trainer, message))
            case Membership(spec_fingerprint):
                self._specify(trainer, spec_fingerprint)
            case Unmarked(text):
                if trainer.unmarked is None:  # a client that floods its connection with them is not heard
                    _log.warning("no iteration marked", rank=str(trainer.rank), reason=text)
                    self._note_unmarked(trainer, text)
            case (
                HealthQuestion()
                | InstancesQuestion()
                | Hello()
                | EngineHello()
                | EngineReport()
                | Instances()
                | Reply()
                | Packing()
            ):
                raise MalformedPacket(
                    f"expected a registration, a membership or a mark, found {type(message).__name__}"
                )
            case _:
                assert_never(message)

    async def _register(self, trainer: Trainer, registration: Registration) -> None:
        claim = trainer.claim
        labels = claim.verdict.labels if claim.verdict is not None else ()
        try:
            reply = await self._uplink.register(claim.rank.job_id, registration, claim.user.name, labels)
        except Exception:  # a bug: it concerns only this job
            _log.exception("job not registered", job=claim.rank.job_id)
            reply = Reply(False, "INTERNAL", "the agent failed to register the job: see its log")
        trainer.connection.reply(reply)
        self._specify(trainer, registration.spec_fingerprint)

    def _note_unmarked(self, trainer: Trainer, why: str) -> None:
        """Note that a trainer trains without marked iterations, or no longer does if `why` is empty."""
        trainer.unmarked = why
        self._uplink.report_unmarked(trainer)

    def _specify(self, trainer: Trainer, spec_fingerprint: str) -> None:
        """Note a trainer's specification; the coordinator refuses one that was not registered."""
        trainer.spec_fingerprint = spec_fingerprint
        self._roster.dispatch(trainer.rank, TrainerSpecified(spec_fingerprint))

    async def _let_go(self, trainer: Trainer) -> None:
        """End a trainer's rank; its GPU is back at stock when its claim ends."""
        try:
            tasks = [
                task for task in (trainer.watching, trainer.serving, trainer.registering) if task is not None
            ]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if (served := self._roster.served.get(trainer.rank)) is not None:
                served.handle(TrainerGone())
                await served.ended()
        finally:
            self._roster.served.pop(trainer.rank, None)
            if trainer.gpu_index is not None:
                self._gpus.unmap_job(trainer.gpu_index)
            self._roster.leave(trainer)
            if trainer.unmarked:
                self._note_unmarked(trainer, "")
            self._uplink.end(trainer.rank)
            trainer.gone.set()

    # --- Its rank -------------------------------------------------------------------------------------------

    async def _take_up(self, trainer: Trainer) -> ServedRank | None:
        """Serve a rank, or report its GPU's error to the probe and the coordinator."""
        claim, connection = trainer.claim, trainer.connection
        reports = self._uplink.reports.of(claim.rank)
        is_first = trainer.serving is None
        try:
            if trainer.problem is not None:
                error, trainer.problem = trainer.problem, None
                raise error
            if claim.verdict is None and not await self._admission.may_have_its_gpu(trainer):
                return None
            rank = await self._open(trainer)
        except GpuError as error:
            claim.verdict = None
            trainer.problems.error(
                "GPU not usable", rank=str(claim.rank), gpu=claim.gpu_uuid, reason=str(error)
            )
            if is_first:
                connection.reply(Reply(True, "GPU_NOT_USABLE", f"the rank is not served: {error}"))
            report = gpu_error_report(claim.rank, claim.gpu_uuid, error, claim.user.name)
            self._uplink.reports.report(claim.rank, report, reports)
            return None
        if is_first:
            connection.reply(Reply(True))
        if trainer.spec_fingerprint is not None:
            rank.handle(TrainerSpecified(trainer.spec_fingerprint))
        if (lease_s := self._uplink.link(claim.rank.job_id).lease_s) is not None:
            rank.handle(Connected(lease_s))
        if trainer.watching is None:
            trainer.watching = asyncio.create_task(self._admission.watch(trainer))
        return rank

    async def _open(self, trainer: Trainer) -> ServedRank:
        """Open a trainer's GPU and serve its rank. Raises `GpuError`; any exception leaves the GPU free."""
        claim, owner = trainer.claim, trainer.claim.user.name
        uuid, job_id, reports = claim.gpu_uuid, claim.rank.job_id, self._uplink.reports
        own = reports.of(claim.rank)
        opened = await self._gpus.open(uuid)
        try:
            if self._roster.is_stopping:
                raise GpuInUseError(f"GPU {uuid}: the agent is being stopped")
            session = Session(
                claim.rank,
                opened.description,
                observe=self._gpus.observe,
                after_sequence=self._uplink.link(job_id).coordinator.telemetry_sequence,
                is_registered=trainer.hello.is_registered,
                owner=owner,
            )
            rank = ServedRank(
                session,
                opened,
                self._estimator,
                self._gpus.counters.opened(uuid),
                send=partial(self._uplink.send, job_id),
                allow_packing=trainer.allow_packing,
                report=lambda error: reports.report(
                    claim.rank, gpu_error_report(claim.rank, uuid, error, owner), own
                ),
            )
        except BaseException:
            await opened.give_back(opened.close)
            raise
        self._roster.served[claim.rank] = rank
        trainer.problems.reset()
        if trainer.gpu_index is None:
            trainer.gpu_index = await self._gpus.map_job(uuid, job_id)
        _log.info("rank served", rank=str(rank.rank), gpu=rank.gpu_uuid, user=owner)
        return rank

    async def _keep_serving(self, trainer: Trainer, rank: ServedRank | None) -> None:
        """Serve a rank again after its GPU has failed, for as long as its trainer stays."""
        retry = Retry(_FIRST_DELAY_S, _MAX_DELAY_S, forget_after_s=_FORGET_S)
        while not self._roster.is_stopping:
            if rank is not None:
                await rank.ended()
                if not rank.has_failed:
                    return
                del self._roster.served[trainer.rank]
            await asyncio.sleep(retry.failed(time.monotonic()))
            try:
                rank = await self._take_up(trainer)
            except Exception:  # a bug; it is still retried
                _log.exception("rank not served", rank=str(trainer.rank))
                rank = None
