"""One rank being served: its session with the GPU, the clock worker and the counter poller around it.

Thread-safe towards the GPU's threads: what they say is handed over to the event loop. Everything else happens
on the loop.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from perseus.agent.clocks.sets import ClockSet, ResetClock, ScheduleClock, SetClock
from perseus.agent.gpu import (
    Gpu,
    GpuError,
    GpuInUseError,
    GpuLostError,
    GpuNotFoundError,
    GpuPermissionError,
    GpuUnsupportedError,
    RecordError,
)
from perseus.agent.link.computation import Rank
from perseus.agent.rank.commands import EstimateEnergy, Send
from perseus.agent.rank.events import Estimated, Event, GpuFailed, SetNotPermitted, TrainerJoined
from perseus.agent.rank.messages import (
    EnergyEstimate,
    FromSession,
    GpuDescription,
    GpuErrorReason,
    GpuErrorReport,
    PlanAnswer,
    PlanInForce,
    RankLeft,
)
from perseus.agent.rank.session import Session
from perseus.agent.sidecar.clock_worker import STOCK, ClockResult, ClockWorker
from perseus.agent.sidecar.counter_poller import CounterPoller
from perseus.agent.sidecar.estimator import Estimator

T = TypeVar("T")

_REASONS: dict[type[GpuError], GpuErrorReason] = {
    GpuNotFoundError: GpuErrorReason.NOT_FOUND,
    GpuPermissionError: GpuErrorReason.NO_PERMISSION,
    GpuLostError: GpuErrorReason.LOST,
    GpuUnsupportedError: GpuErrorReason.NOT_SUPPORTED,
    GpuInUseError: GpuErrorReason.IN_USE,
    RecordError: GpuErrorReason.NOT_RECORDED,
}


def gpu_error_report(rank: Rank, gpu_uuid: str, error: GpuError, owner: str) -> GpuErrorReport:
    """What the coordinator is told of a GPU's error, met by a trainer of `owner`'s."""
    reasons = (reason for error_class, reason in _REASONS.items() if isinstance(error, error_class))
    return GpuErrorReport(rank, gpu_uuid, next(reasons, GpuErrorReason.DRIVER_FAILED), str(error), owner)


class ServedRank:
    """A rank from its trainer's hello to its end.

    `say` takes what is for the coordinator, `report` what went wrong with the GPU. Telemetry up to
    `after_sequence` was there before. `is_registered`: the trainer will not say what it belongs to. `owner`:
    whose process it is.
    """

    def __init__(
        self,
        rank: Rank,
        gpu: Gpu,
        estimator: Estimator,
        *,
        observe: bool,
        after_sequence: int,
        is_registered: bool,
        owner: str,
        say: Callable[[FromSession], None],
        report: Callable[[GpuError], None],
    ) -> None:
        self.rank = rank
        self._gpu = gpu
        self._estimator = estimator
        self._observe = observe
        self._say = say
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._log = structlog.get_logger(__name__).bind(rank=str(rank), gpu=gpu.uuid)
        self._session = Session(
            rank,
            GpuDescription(gpu.uuid, gpu.name, gpu.supported_clocks_mhz, self._power_limit_w()),
            observe=observe,
            after_sequence=after_sequence,
            is_registered=is_registered,
            owner=owner,
        )
        self._ending: asyncio.Task[None] | None = None
        self._worker = ClockWorker(gpu, lambda result: self._hand_over(self._clock_result, result))
        self._poller = CounterPoller(
            gpu,
            lambda change: self._hand_over(self.handle, change),
            lambda error: self._hand_over(self._gpu_failed, error),
        )
        self.handle(TrainerJoined())

    @property
    def gpu_uuid(self) -> str:
        """The GPU that the rank runs on."""
        return self._gpu.uuid

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come of it; `ended` waits for the GPU to be back on stock."""
        return self._session.has_ended

    def handle(self, event: Event) -> None:
        """Let the session know, and do what it wants done."""
        last_words: list[FromSession] = []
        for command in self._session.handle(event, time.monotonic()):
            match command:
                case SetClock(clock_mhz):
                    self._worker.request(clock_mhz)
                case ResetClock():
                    self._worker.request(STOCK)
                case ScheduleClock(clock_mhz, at_s):
                    self._worker.schedule(clock_mhz, at_s)
                case EstimateEnergy(request):
                    self._estimator.request(
                        self.rank, request, lambda estimate: self._hand_over(self._estimated, estimate)
                    )
                case Send(RankLeft() as message):
                    last_words.append(message)  # it says that the GPU is back on stock
                case Send(message):
                    self._note(message)
                    self._say(message)
        if self._session.has_ended and self._ending is None:
            self._ending = asyncio.create_task(self._end(last_words))

    async def ended(self) -> None:
        """Return when the session has ended and the GPU is back on stock and closed."""
        assert self._ending is not None  # the caller knows that it has ended
        await asyncio.shield(self._ending)

    async def _end(self, last_words: list[FromSession]) -> None:
        if not self._observe:  # also where setting was forbidden on the way: resetting may not be
            self._worker.request(STOCK)
        # Both join a thread; the worker carries out the reset first.
        await asyncio.to_thread(self._worker.close)
        await asyncio.to_thread(self._poller.close)
        try:
            self._gpu.close()
        except GpuError as error:
            self._log.warning("GPU not closed", reason=str(error))
            self._report(error)
        for message in last_words:
            self._note(message)
            self._say(message)

    def _power_limit_w(self) -> float:
        try:
            return self._gpu.power_limit_w()
        except GpuError as error:  # of a GPU that fails: who polls its counter will say so
            self._log.warning("power limit not known", reason=str(error))
            return 0.0

    def _hand_over(self, take: Callable[[T], None], value: T) -> None:
        self._loop.call_soon_threadsafe(take, value)

    def _clock_result(self, result: ClockResult) -> None:
        match result.error:
            case None:
                self.handle(
                    ClockSet(result.target_mhz, result.in_force_at_s, result.begun_at_s, result.due_s)
                )
            case GpuPermissionError() | GpuUnsupportedError() | RecordError() as error:
                self._log.error("clocks can not be set: the rank is only observed", reason=str(error))
                self._report(error)
                if not self._session.has_ended:
                    if result.target_mhz is not STOCK:  # the one before may be in force
                        self._worker.request(STOCK)
                    self.handle(SetNotPermitted(str(error)))
            case GpuError() as error:
                self._log.error("clock not set", clock_mhz=result.target_mhz, reason=str(error))
                self._gpu_failed(error)
            case error:  # a mistake of ours, and yet the GPU's clock is unknown
                self._log.error("clock not set", clock_mhz=result.target_mhz, exc_info=error)
                self.handle(GpuFailed(repr(error)))

    def _estimated(self, estimate: EnergyEstimate) -> None:
        self.handle(Estimated(estimate))

    def _gpu_failed(self, error: GpuError) -> None:
        self._log.error("GPU failed", reason=str(error))
        self._report(error)
        self.handle(GpuFailed(str(error)))

    def _note(self, message: FromSession) -> None:
        match message:
            case PlanInForce(_, plan, iteration):
                self._log.info("plan in force", version=plan.version, epoch=plan.epoch, iteration=iteration)
            case PlanAnswer(_, plan, refusal, _) if refusal is not None:
                self._log.warning(
                    "plan refused", version=plan.version, reason=refusal.reason.name, message=refusal.message
                )
            case RankLeft(_, reason):
                self._log.info("rank left", reason=reason.name)
            case _:
                pass
