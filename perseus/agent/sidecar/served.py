"""One served rank: its session with the GPU, the clock worker and the counter poller around it.

The GPU's threads hand their results over to the event loop. Everything else happens on the loop, and nothing
there waits for the driver, which may hang. Any error here ends this rank and restores its GPU.

Energy estimates take milliseconds, so one thread computes them for all ranks (`Estimator`): the event loop
and its clocks must not wait for them.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from perseus.agent.clocks.foreign import ForeignClock
from perseus.agent.clocks.sets import ClockSet, RepeatSet, ResetClock, ScheduleClock, SetClock
from perseus.agent.energy.counter import CounterChange
from perseus.agent.gpu import (
    GpuError,
    GpuHungError,
    GpuInUseError,
    GpuLostError,
    GpuNotFoundError,
    GpuPermissionError,
    GpuUnsupportedError,
    RecordError,
)
from perseus.agent.gpu.executor import TIMEOUT_S
from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import MAX_NAME_LENGTH
from perseus.agent.rank.commands import AllowPacking, EstimateEnergy, Send
from perseus.agent.rank.events import (
    Event,
    GpuFailed,
    SetNotPermitted,
    Tick,
    TrainerJoined,
)
from perseus.agent.rank.messages import (
    EnergyEstimate,
    FromSession,
    GpuErrorReason,
    GpuLimits,
    PlanRefusalReason,
    RankLeftReason,
    coordinates,
    sentence,
)
from perseus.agent.rank.sampling import EstimateRequest, estimate
from perseus.agent.rank.session import Session
from perseus.agent.sidecar.clock_worker import STOCK, ClockResult, ClockWorker
from perseus.agent.sidecar.counter_poller import CounterPoller, GpuReading, LimitsWatch
from perseus.agent.sidecar.gpus import GpuCounters, OpenedGpu
from perseus.printable import printable
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import rank_pb2

_log = structlog.get_logger(__name__)

Listener = Callable[[EnergyEstimate], None]


class Estimator:
    """One thread for the estimates of all ranks. Only a rank's newest request under a plan counts."""

    def __init__(self, estimate: Callable[[EstimateRequest], EnergyEstimate | None] = estimate) -> None:
        self._estimate = estimate
        self._changed = threading.Condition()
        self._waiting: dict[tuple[Rank, int], tuple[EstimateRequest, Listener]] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="energy estimates", daemon=True)
        self._thread.start()

    def request(self, rank: Rank, request: EstimateRequest, on_estimate: Listener) -> None:
        """Estimate on the thread, which then passes the result, if any, to `on_estimate`; returns at once."""
        with self._changed:
            self._waiting[rank, request.plan_version] = (request, on_estimate)
            self._changed.notify()

    def close(self) -> None:
        """End the thread and drop waiting requests; blocks while an estimate is in progress."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                rank, plan_version = key = next(iter(self._waiting))
                request, on_estimate = self._waiting.pop(key)
            try:
                found = self._estimate(request)
                if found is not None:
                    on_estimate(found)
            except Exception:  # only this estimate fails
                _log.exception("energy not estimated", rank=str(rank), version=plan_version)


T = TypeVar("T")

_REASONS: dict[type[GpuError], GpuErrorReason] = {
    GpuNotFoundError: GpuErrorReason.NOT_FOUND,
    GpuPermissionError: GpuErrorReason.NO_PERMISSION,
    GpuLostError: GpuErrorReason.LOST,
    GpuUnsupportedError: GpuErrorReason.NOT_SUPPORTED,
    GpuInUseError: GpuErrorReason.IN_USE,
    RecordError: GpuErrorReason.NOT_RECORDED,
}


def gpu_error_report(rank: Rank, gpu_uuid: str, error: GpuError, owner: str) -> wire.GpuError:
    """Return the report of a GPU's error to the coordinator, for a trainer of `owner`."""
    reasons = (reason for error_class, reason in _REASONS.items() if isinstance(error, error_class))
    return wire.GpuError(
        job_id=rank.job_id,
        rank=coordinates(rank),
        # As a trainer sent it: it may not be a GPU's.
        gpu_uuid=printable(gpu_uuid)[:MAX_NAME_LENGTH],
        reason=rank_pb2.GpuErrorReason.ValueType(int(next(reasons, GpuErrorReason.DRIVER_FAILED))),
        message=sentence(str(error)),
        owner=owner,
    )


class ServedRank:
    """A rank from its trainer's hello, or its GPU's recovery, to its end.

    `counters` counts sets, `send` takes messages to the coordinator, `allow_packing` whether the trainer may
    pack its marks, `report` errors of the GPU. The GPU is given back at the end.
    """

    def __init__(
        self,
        session: Session,
        opened: OpenedGpu,
        estimator: Estimator,
        counters: GpuCounters,
        send: Callable[[FromSession], None],
        allow_packing: Callable[[bool], None],
        report: Callable[[GpuError], None],
    ) -> None:
        self.rank = session.rank
        self.has_failed = False
        """Whether it ended because its GPU failed; the GPU may recover."""
        self._session = session
        self._opened = opened
        self._counters = counters
        self._gpu = gpu = opened.gpu
        self._estimator = estimator
        self._send = send
        self._allow_packing = allow_packing
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._log = _log.bind(rank=str(self.rank), gpu=gpu.uuid)
        self._ending: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        # To be sent once the GPU is back at stock.
        self._final_messages: list[FromSession] = []
        self._worker = ClockWorker(gpu, lambda result: self._hand_over(self._clock_result, result))
        self._poller = CounterPoller(
            gpu,
            lambda change: self._hand_over(self.handle, change),
            lambda error: self._hand_over(self._gpu_failed, error),
            LimitsWatch(
                gpu, opened.description.limits, lambda limits: self._hand_over(self._limits_read, limits)
            ),
            opened.on_part_failed,
            reading_interval_s=opened.reading_interval_s,
        )
        self.handle(TrainerJoined())

    @property
    def gpu_uuid(self) -> str:
        """The GPU that the rank runs on."""
        return self._gpu.uuid

    @property
    def wanted_clock_mhz(self) -> int | None:
        """The clock that the plan requests now; None for stock."""
        return self._session.wanted_clock_mhz

    @property
    def has_plan(self) -> bool:
        """Whether a plan, or a clock for profiling, is in force."""
        return self._session.has_plan

    @property
    def foreign_clock(self) -> ForeignClock | None:
        """The clock at which another client of the driver holds the GPU; None if none does."""
        return self._session.foreign_clock

    @property
    def set_clock_mhz(self) -> int | None:
        """The clock that the driver was last set to, None for stock; valid if `is_set_known`."""
        return self._worker.set_clock_mhz

    @property
    def is_set_known(self) -> bool:
        """Whether the latest set or reset succeeded."""
        return self._worker.is_set_known

    @property
    def reading(self) -> GpuReading | None:
        """The GPU's latest reading; None before the first."""
        return self._poller.reading

    @property
    def counted(self) -> CounterChange | None:
        """The latest change of the GPU's energy counter; None before the first."""
        return self._poller.change

    @property
    def has_ended(self) -> bool:
        """Whether the session has ended; `ended` also waits for the GPU to be back at stock."""
        return self._session.has_ended

    def handle(self, event: Event) -> None:
        """Pass an event to the session and execute its commands."""
        if self._session.has_ended:
            return
        try:
            self._handle(event)
        except Exception:  # a bug: the GPU's clock is unknown
            self._log.exception("rank given up", on=type(event).__name__)
            self.has_failed = True
            self._final_messages = self._session.give_up()
        if self._session.has_ended and self._ending is None:  # handling an event may lead to another
            self._ending = asyncio.create_task(self._end())

    def _handle(self, event: Event) -> None:
        before = self.foreign_clock
        commands = self._session.handle(event, time.monotonic())
        if before != self.foreign_clock:
            self._note_foreign_clock()
        for command in commands:
            match command:
                case SetClock(clock_mhz):
                    self._worker.request(clock_mhz)
                case ResetClock():
                    self._worker.request(STOCK)
                case ScheduleClock(clock_mhz, at_s):
                    self._worker.schedule(clock_mhz, at_s)
                case RepeatSet():
                    self._worker.set_again()
                case EstimateEnergy(request):
                    self._estimator.request(
                        self.rank, request, lambda estimate: self._hand_over(self.handle, estimate)
                    )
                case AllowPacking(is_allowed):
                    self._allow_packing(is_allowed)
                case Send(wire.RankLeft(reason=reason) as message):
                    self.has_failed = reason == rank_pb2.RANK_LEFT_REASON_GPU_FAILED
                    self._final_messages.append(message)  # it reports that the GPU is back at stock
                case Send(message):
                    self._note(message)
                    self._send(message)
        if isinstance(event, Tick) and not self._session.has_ended:
            self._worker.renew()
            self._check_for_hung_calls()

    def _check_for_hung_calls(self) -> None:
        now_s = time.monotonic()
        under_way_s = max(self._worker.under_way_s(now_s), self._poller.under_way_s(now_s))
        if under_way_s > TIMEOUT_S:
            self._gpu_failed(
                GpuHungError(
                    f"GPU {self.gpu_uuid}: expected the driver to answer within {TIMEOUT_S:g} s, "
                    f"found it silent for {under_way_s:.0f} s: the GPU or its driver hangs"
                )
            )

    async def ended(self) -> None:
        """Wait until the session has ended and the GPU is back at stock and closed, or its driver hangs."""
        await self._over.wait()

    async def _end(self) -> None:
        try:
            if not self._session.observe:  # even if sets were refused meanwhile: a reset may be permitted
                self._worker.request(STOCK)
            await self._opened.give_back(self._close)
        except Exception as error:
            self._log.warning("GPU not closed", reason=str(error) or repr(error))
            if isinstance(error, GpuError):
                self._report(error)
        try:
            for message in self._final_messages:
                self._note(message)
                self._send(message)
        finally:
            self._over.set()

    def _close(self) -> None:
        """Close the GPU; blocks until the worker has carried out the last request, the reset."""
        self._worker.close()
        self._poller.close()
        self._gpu.close()

    def _hand_over(self, take: Callable[[T], None], value: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the driver hung until after the end
            self._loop.call_soon_threadsafe(take, value)

    def _clock_result(self, result: ClockResult) -> None:
        match result.error:
            case None:
                self._counters.sets.add(result.in_force_at_s - result.begun_at_s)
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
                    if result.target_mhz is not STOCK:  # the previous clock may be in force
                        self._worker.request(STOCK)
                    self.handle(SetNotPermitted(str(error)))
            case error:
                self._log.error("clock not set", clock_mhz=result.target_mhz, reason=str(error))
                self._gpu_failed(error)

    def _limits_read(self, limits: GpuLimits) -> None:
        self._log.warning(
            "GPU's limits changed", power_limit_w=limits.power_limit_w, power_profiles=limits.power_profiles
        )
        self.handle(limits)

    def _gpu_failed(self, error: Exception) -> None:
        if isinstance(error, GpuError):
            self._log.error("GPU failed", reason=str(error))
            self._report(error)
        else:  # a bug, but the GPU's clock is unknown all the same
            self._log.error("GPU failed", exc_info=error)
        self.handle(GpuFailed(str(error) or repr(error)))

    def _note_foreign_clock(self) -> None:
        if (clock := self.foreign_clock) is None:
            self._log.info("no other client holds the clock any more")
        else:
            self._log.warning(
                "another client of the driver holds the clock",
                clock_mhz=clock.clock_mhz,
                wanted_mhz=clock.wanted_mhz or "stock",
            )

    def _note(self, message: FromSession) -> None:
        match message:
            case wire.PlanInForce(epoch=epoch, version=version, iteration=iteration):
                self._log.info("plan in force", version=version, epoch=epoch, iteration=iteration)
            case wire.PlanAnswer(accepted=False, version=version, refusal_reason=reason, message=text):
                name = PlanRefusalReason(reason).name
                self._log.warning("plan refused", version=version, reason=name, message=text)
            case wire.RankLeft(reason=why):
                self._log.info("rank left", reason=RankLeftReason(why).name)
            case _:
                pass
