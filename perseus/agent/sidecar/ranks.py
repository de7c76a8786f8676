"""Serving the ranks of trainers that are here: their GPUs opened, given back, and tried again.

A rank whose GPU can't be used is not served, but its trainer's line stays open: its job can be registered,
and the coordinator learns what is wrong. The GPU is tried again from time to time, and the rank served when
it has come back.
"""

import asyncio
import contextlib
import time

import structlog

from perseus.agent.clocks.patience import Comeback
from perseus.agent.gpu import GpuError, GpuInUseError
from perseus.agent.gpu.lanes import Lanes
from perseus.agent.link.packets import Reply
from perseus.agent.rank.events import AgentStops, Connected, TrainerGone, TrainerSpecified
from perseus.agent.restore.guarded import GuardedGpu
from perseus.agent.restore.records import RecordFolder
from perseus.agent.restore.restorer import Restorer
from perseus.agent.sidecar.admission import Admission
from perseus.agent.sidecar.backends import Backend
from perseus.agent.sidecar.estimator import Estimator
from perseus.agent.sidecar.job_mapping import JobMapping
from perseus.agent.sidecar.roster import Roster, Trainer
from perseus.agent.sidecar.served import OpenedGpu, ServedRank, gpu_error_report
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.sidecar.uplink import Uplink
from perseus.agent.sidecar.vitals import Vitals

_log = structlog.get_logger(__name__)

# How often power and clock are read for the metrics.
_READING_S = 1.0


class Ranks:
    """The served ranks of a roster, on GPUs of `gpus`, which `restorer` hands out; recorded in `records`."""

    def __init__(
        self,
        settings: AgentSettings,
        gpus: Backend,
        lanes: Lanes,
        records: RecordFolder,
        restorer: Restorer,
        roster: Roster,
        admission: Admission,
        uplink: Uplink,
        vitals: Vitals,
    ) -> None:
        self._settings = settings
        self._gpus = gpus
        self._lanes = lanes
        self._records = records
        self._restorer = restorer
        self._roster = roster
        self._admission = admission
        self._uplink = uplink
        self._vitals = vitals
        self._estimator = Estimator()
        self._mapping = JobMapping(settings.job_mapping_folder) if settings.job_mapping_folder else None
        if self._mapping is not None:
            self._mapping.clear()

    async def serve(self, trainer: Trainer) -> None:
        """Serve a trainer's rank from now on; the trainer was answered when this returns."""
        served = await self._take_up(trainer)
        trainer.serving = asyncio.create_task(self._keep_serving(trainer, served))

    async def let_go(self, trainer: Trainer) -> None:
        """End the rank of a trainer that is gone; its GPU is back on stock when this returns."""
        tasks = [task for task in (trainer.watching, trainer.serving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if (served := self._roster.served.get(trainer.rank)) is not None:
            served.handle(TrainerGone())
            await served.ended()

    def forget(self, trainer: Trainer) -> None:
        """Its rank has ended, whatever came of that."""
        self._roster.served.pop(trainer.rank, None)
        if self._mapping is not None and trainer.gpu_index is not None:
            self._mapping.leave(trainer.gpu_index)

    async def stop(self) -> None:
        """End all ranks; their GPUs are back on stock when this returns."""
        served = list(self._roster.served.values())
        self._roster.tell_all(AgentStops())
        await asyncio.gather(*(rank.ended() for rank in served))

    def close(self) -> None:
        """Blocks while an energy estimate is under way; the ranks were stopped before."""
        self._estimator.close()

    async def _take_up(self, trainer: Trainer) -> ServedRank | None:
        """Serve a rank, or tell its probe and the coordinator what is wrong with its GPU."""
        claim, line = trainer.claim, trainer.line
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
            if trainer.told_problem != str(error):
                _log.error("GPU not usable", rank=str(claim.rank), gpu=claim.gpu_uuid, reason=str(error))
            trainer.told_problem = str(error)
            if is_first:
                line.reply(Reply(True, "GPU_NOT_USABLE", f"the rank is not served: {error}"))
            report = gpu_error_report(claim.rank, claim.gpu_uuid, error, claim.user.name)
            self._uplink.reports.report(report, reports)
            return None
        if is_first:
            line.reply(Reply(True))
        if trainer.spec_fingerprint is not None:
            rank.handle(TrainerSpecified(trainer.spec_fingerprint))
        if (lease_s := self._uplink.lease_s) is not None:
            rank.handle(Connected(lease_s))
        if trainer.watching is None:
            trainer.watching = asyncio.create_task(self._admission.watch(trainer))
        return rank

    async def _open(self, trainer: Trainer) -> ServedRank:
        """`GpuError` if the GPU can't be had; whatever is raised, it is free again."""
        claim, owner, observe = trainer.claim, trainer.claim.user.name, self._settings.observe
        uuid, coordinator, reports = claim.gpu_uuid, self._uplink.coordinator, self._uplink.reports
        own = reports.of(claim.rank)

        def open_gpu(uuid: str) -> OpenedGpu:
            gpu = self._gpus.open(uuid)
            try:
                return OpenedGpu.of(gpu if observe else GuardedGpu(gpu, self._records, self._settings.stock))
            except BaseException:
                gpu.close()
                raise

        opened = await self._restorer.take(uuid, open_gpu)
        try:
            if self._roster.is_stopping:
                raise GpuInUseError(f"GPU {uuid}: the agent is being stopped")
            rank = ServedRank(
                claim.rank,
                opened,
                self._estimator,
                observe=observe,
                after_sequence=coordinator.telemetry_sequence,
                is_registered=trainer.is_registered,
                owner=owner,
                say=coordinator.say,
                report=lambda error: reports.report(gpu_error_report(claim.rank, uuid, error, owner), own),
                give_back=lambda close: self._restorer.give_back(uuid, close),
                vitals=self._vitals.opened(uuid),
                reading_interval_s=_READING_S if self._settings.metrics_listen is not None else None,
            )
        except BaseException:
            await self._restorer.give_back(uuid, opened.close)
            raise
        self._roster.served[claim.rank] = rank
        trainer.told_problem = ""
        if self._mapping is not None and trainer.gpu_index is None:
            with contextlib.suppress(GpuError):  # whoever serves it meets the same
                trainer.gpu_index = (await self._lanes.run(uuid, lambda: self._gpus.look(uuid))).index
                self._mapping.enter(trainer.gpu_index, claim.rank.job_id)
        _log.info("rank served", rank=str(rank.rank), gpu=rank.gpu_uuid, user=owner)
        return rank

    async def _keep_serving(self, trainer: Trainer, rank: ServedRank | None) -> None:
        """Take a rank up again whose GPU has failed, for as long as its trainer stays."""
        comeback = Comeback()
        while not self._roster.is_stopping:
            if rank is not None:
                comeback.served(time.monotonic())
                await rank.ended()
                if not rank.has_failed:
                    return
                del self._roster.served[trainer.rank]
            now_s = time.monotonic()
            await asyncio.sleep(comeback.failed(now_s) - now_s)
            try:
                rank = await self._take_up(trainer)
            except Exception:  # a mistake of ours; it is tried again all the same
                _log.exception("rank not served", rank=str(trainer.rank))
                rank = None
