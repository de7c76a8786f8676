"""One rank being served: its session with the GPU, the clock worker and the counter poller around it.

Thread-safe towards the GPU's threads: what they say is handed over to the event loop. Everything else happens
on the loop, and nothing there waits for the driver, which may hang. Whatever goes wrong here ends this rank
and brings its GPU back.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from perseus.agent.clocks.sets import ClockSet, ResetClock, ScheduleClock, SetClock
from perseus.agent.energy.counter import CounterChange
from perseus.agent.gpu import (
    Gpu,
    GpuError,
    GpuHungError,
    GpuInUseError,
    GpuLostError,
    GpuNotFoundError,
    GpuPermissionError,
    GpuUnsupportedError,
    RecordError,
)
from perseus.agent.gpu.lanes import PATIENCE_S
from perseus.agent.link.computation import Rank
from perseus.agent.rank.commands import EstimateEnergy, Send
from perseus.agent.rank.events import (
    Estimated,
    Event,
    GpuFailed,
    LimitsRead,
    SetNotPermitted,
    Tick,
    TrainerJoined,
)
from perseus.agent.rank.messages import (
    EnergyEstimate,
    FromSession,
    GpuDescription,
    GpuErrorReason,
    GpuErrorReport,
    GpuLimits,
    PlanAnswer,
    PlanInForce,
    RankLeft,
    RankLeftReason,
)
from perseus.agent.rank.session import Session
from perseus.agent.sidecar.clock_worker import STOCK, ClockResult, ClockWorker
from perseus.agent.sidecar.counter_poller import CounterPoller, GpuReading
from perseus.agent.sidecar.estimator import Estimator
from perseus.agent.sidecar.limits_watch import LimitsWatch, read_limits
from perseus.agent.sidecar.vitals import GpuVitals

_log = structlog.get_logger(__name__)

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


@dataclass(frozen=True, slots=True)
class OpenedGpu:
    """A GPU that is open, and what there is to say of it: asking may block."""

    gpu: Gpu
    description: GpuDescription

    @classmethod
    def of(cls, gpu: Gpu) -> "OpenedGpu":
        """Ask a GPU."""
        try:
            limits = read_limits(gpu)
        except GpuError as error:  # of a GPU that fails: who polls its counter will say so
            _log.warning("power limit not known", gpu=gpu.uuid, reason=str(error))
            limits = GpuLimits()
        return cls(gpu, GpuDescription(gpu.uuid, gpu.name, gpu.supported_clocks_mhz, limits))

    def close(self) -> None:
        """Let go of it."""
        self.gpu.close()


class ServedRank:
    """A rank from its trainer's hello, or its GPU's coming back, to its end.

    `say` takes what is for the coordinator, `report` what went wrong with the GPU. Telemetry up to
    `after_sequence` was there before. `is_registered`: the trainer will not say what it belongs to. `owner`:
    whose process it is. `give_back` is called with what closes the GPU (and may block), once it is not needed
    any more. `vitals` counts what is done; power and clock are read every `reading_interval_s`, if at all.
    """

    def __init__(
        self,
        rank: Rank,
        opened: OpenedGpu,
        estimator: Estimator,
        *,
        observe: bool,
        after_sequence: int,
        is_registered: bool,
        owner: str,
        say: Callable[[FromSession], None],
        report: Callable[[GpuError], None],
        give_back: Callable[[Callable[[], None]], Awaitable[None]],
        vitals: GpuVitals,
        reading_interval_s: float | None = None,
    ) -> None:
        self.rank = rank
        self.has_failed = False
        """Whether it ended as its GPU failed, which may come back."""
        self._gpu = gpu = opened.gpu
        self._give_back = give_back
        self._vitals = vitals
        self._estimator = estimator
        self._observe = observe
        self._say = say
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._log = _log.bind(rank=str(rank), gpu=gpu.uuid)
        self._session = Session(
            rank,
            opened.description,
            observe=observe,
            after_sequence=after_sequence,
            is_registered=is_registered,
            owner=owner,
        )
        self._ending: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        # To be said once the GPU is back on stock.
        self._last_words: list[FromSession] = []
        self._worker = ClockWorker(gpu, lambda result: self._hand_over(self._clock_result, result))
        self._poller = CounterPoller(
            gpu,
            lambda change: self._hand_over(self.handle, change),
            lambda error: self._hand_over(self._gpu_failed, error),
            LimitsWatch(
                gpu, opened.description.limits, lambda limits: self._hand_over(self._limits_read, limits)
            ),
            reading_interval_s=reading_interval_s,
        )
        self.handle(TrainerJoined())

    @property
    def gpu_uuid(self) -> str:
        """The GPU that the rank runs on."""
        return self._gpu.uuid

    @property
    def wanted_clock_mhz(self) -> int | None:
        """The clock that the plan wants now, None for stock."""
        return self._session.wanted_clock_mhz

    @property
    def has_plan(self) -> bool:
        """Whether a plan, or a clock to measure, is in force."""
        return self._session.has_plan

    @property
    def set_clock_mhz(self) -> int | None:
        """What the driver was told last, None for stock; see `is_set_known`."""
        return self._worker.set_clock_mhz

    @property
    def is_set_known(self) -> bool:
        """Whether it was told something, and did not fail at it."""
        return self._worker.is_set_known

    @property
    def reading(self) -> GpuReading | None:
        """What the GPU said of itself last."""
        return self._poller.reading

    @property
    def counted(self) -> CounterChange | None:
        """The latest change of the GPU's energy counter; None before the first."""
        return self._poller.change

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come of it; `ended` waits for the GPU to be back on stock."""
        return self._session.has_ended

    def handle(self, event: Event) -> None:
        """Let the session know, and do what it wants done."""
        if self._session.has_ended:
            return
        try:
            self._handle(event)
        except Exception:  # a mistake of ours: the GPU's clock may be anything
            self._log.exception("rank given up", on=type(event).__name__)
            self.has_failed = True
            self._last_words = self._session.give_up()
        if self._session.has_ended:
            self._ending = asyncio.create_task(self._end())

    def _handle(self, event: Event) -> None:
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
                case Send(RankLeft(_, reason) as message):
                    self.has_failed = reason is RankLeftReason.GPU_FAILED
                    self._last_words.append(message)  # it says that the GPU is back on stock
                case Send(message):
                    self._note(message)
                    self._say(message)
        if isinstance(event, Tick) and not self._session.has_ended:
            self._look_for_hung_calls()

    def _look_for_hung_calls(self) -> None:
        now_s = time.monotonic()
        under_way_s = max(self._worker.under_way_s(now_s), self._poller.under_way_s(now_s))
        if under_way_s > PATIENCE_S:
            self._gpu_failed(
                GpuHungError(
                    f"GPU {self.gpu_uuid}: expected the driver to answer within {PATIENCE_S:g} s, "
                    f"found it silent for {under_way_s:.0f} s: the GPU or its driver hangs"
                )
            )

    async def ended(self) -> None:
        """Return when the session has ended and the GPU is back on stock and closed, or its driver hangs."""
        await self._over.wait()

    async def _end(self) -> None:
        if not self._observe:  # also where setting was forbidden on the way: resetting may not be
            self._worker.request(STOCK)
        try:
            await self._give_back(self._close)
        except Exception as error:
            self._log.warning("GPU not closed", reason=str(error) or repr(error))
            if isinstance(error, GpuError):
                self._report(error)
        try:
            for message in self._last_words:
                self._note(message)
                self._say(message)
        finally:
            self._over.set()

    def _close(self) -> None:
        """Blocks until the worker has carried out what was asked for last: the reset."""
        self._worker.close()
        self._poller.close()
        self._gpu.close()

    def _hand_over(self, take: Callable[[T], None], value: T) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # the loop is closed: of a driver that hung until after the end
            self._loop.call_soon_threadsafe(take, value)

    def _clock_result(self, result: ClockResult) -> None:
        match result.error:
            case None:
                self._vitals.sets.add(result.in_force_at_s - result.begun_at_s)
                self.handle(
                    ClockSet(result.target_mhz, result.in_force_at_s, result.begun_at_s, result.due_s)
                )
            case GpuError() as error if result.is_tried_again:
                self._log.warning("clock not set yet", clock_mhz=result.target_mhz, reason=str(error))
                self._report(error)
            case GpuPermissionError() | GpuUnsupportedError() | RecordError() as error:
                self._log.error("clocks can not be set: the rank is only observed", reason=str(error))
                self._report(error)
                if not self._session.has_ended:
                    if result.target_mhz is not STOCK:  # the one before may be in force
                        self._worker.request(STOCK)
                    self.handle(SetNotPermitted(str(error)))
            case error:
                self._log.error("clock not set", clock_mhz=result.target_mhz, reason=str(error))
                self._gpu_failed(error)

    def _limits_read(self, limits: GpuLimits) -> None:
        self._log.warning(
            "GPU's limits changed", power_limit_w=limits.power_limit_w, power_profiles=limits.power_profiles
        )
        self.handle(LimitsRead(limits))

    def _estimated(self, estimate: EnergyEstimate) -> None:
        self.handle(Estimated(estimate))

    def _gpu_failed(self, error: Exception) -> None:
        if isinstance(error, GpuError):
            self._log.error("GPU failed", reason=str(error))
            self._report(error)
        else:  # a mistake of ours, and yet the GPU's clock is unknown
            self._log.error("GPU failed", exc_info=error)
        self.handle(GpuFailed(str(error) or repr(error)))

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
