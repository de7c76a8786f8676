"""One inference engine's instance: waits for its engine, confirms its GPUs, and follows the controller.

All decisions are the controller's (`perseus.serving`). GPUs are opened, recorded and given back as those of
ranks are: taken while the engine reports and runs on them as the user that the operator named, at stock again
whenever that ends, however the agent ends.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import structlog

from perseus.agent.claims.decision import Refused
from perseus.agent.energy.mean_power import MeanPower
from perseus.agent.gpu import (
    ClockNotSupportedError,
    GpuError,
    GpuHungError,
    GpuNotFoundError,
    GpuPermissionError,
    GpuUnsupportedError,
    RecordError,
)
from perseus.agent.gpu.executor import ALL_GPUS, TIMEOUT_S, GpuExecutor
from perseus.agent.sidecar.access import AccessChecker
from perseus.agent.sidecar.backends import Backend
from perseus.agent.sidecar.clock_worker import STOCK, ClockResult, ClockWorker
from perseus.agent.sidecar.counter_poller import CounterPoller
from perseus.agent.sidecar.engine_metrics import MetricsReader
from perseus.agent.sidecar.gpus import OpenedGpu, RankGpus
from perseus.agent.sidecar.instance_settings import InstanceSettings
from perseus.rate_limited_log import RateLimitedLog
from perseus.retry import Retry
from perseus.serving.controller import MAX_STATS_AGE_S, Command, Controller, SetClock, StockReason
from perseus.serving.errors import ServingError
from perseus.serving.model import StepModel
from perseus.serving.profile_csv import for_gpu
from perseus.serving.savings import MAX_H, WINDOW_S, SavingsMeter
from perseus.serving.scrape import EngineTotals, interval
from perseus.serving.sources import Sources
from perseus.serving.stats import EngineLimits, EngineStats
from perseus.tls.address import host_and_port

_log = structlog.get_logger(__name__)

_TICK_S = 0.1
_COUNTER_POLL_S = 0.02
"""Powers are means over a quarter of a second."""
_CONFIRM_S = 5.0
_SAVE_S = 60.0
"""Between two writes of the measured savings; what a crash loses."""
_GONE_S = 10.0
"""Without statistics, until an instance's GPUs are free for others; they are at stock long before."""
_FIRST_DELAY_S, _MAX_DELAY_S, _FORGET_S = 1.0, 60.0, 120.0
_REFUSALS = (GpuPermissionError, GpuUnsupportedError, RecordError, ClockNotSupportedError)
_SCRAPED = "metrics"

T = TypeVar("T")


class NotConfirmedError(Exception):
    """A GPU is not the instance's, as far as grants and the kernel show."""


class _ControlledGpu:
    """An open GPU with its threads. `on_result` and `on_error` are called on these."""

    def __init__(
        self,
        opened: OpenedGpu,
        observes: bool,
        on_result: Callable[[ClockResult], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._opened, self._observes = opened, observes
        self.worker = ClockWorker(opened.gpu, on_result)
        self.poller = CounterPoller(
            opened.gpu,
            lambda change: None,
            on_error,
            on_part_failed=opened.on_part_failed,
            interval_s=_COUNTER_POLL_S,
            reading_interval_s=opened.reading_interval_s,
        )

    @property
    def uuid(self) -> str:
        return self._opened.gpu.uuid

    @property
    def supported_mhz(self) -> Sequence[int]:
        return self._opened.gpu.supported_clocks_mhz

    def under_way_s(self, now_s: float) -> float:
        return max(self.worker.under_way_s(now_s), self.poller.under_way_s(now_s))

    async def give_back(self) -> None:
        """Return the GPU to stock and close it."""
        if not self._observes:
            self.worker.request(STOCK)
        await self._opened.give_back(self._close)

    def _close(self) -> None:
        self.worker.close()
        self.poller.close()
        self._opened.close()


@dataclass(frozen=True, slots=True)
class InstanceParts:
    """The agent's parts that instances use."""

    gpus: Backend
    executor: GpuExecutor
    access: AccessChecker
    rank_gpus: RankGpus


class Instance:
    """One instance.

    Attributes:
        sources: what reports on it.
        problem: why it is not controlled, for people; empty while it is, or no statistics come.
        controller: None while its GPUs are not taken.
        latest: the latest statistics, with power.
        meter: what has been measured, over restarts of the agent.
    """

    def __init__(
        self,
        name: str,
        settings: InstanceSettings,
        profile: StepModel,
        savings_file: Path,
        parts: InstanceParts,
    ) -> None:
        self.name, self.settings = name, settings
        self.sources = Sources()
        self.problem = ""
        self.controller: Controller | None = None
        self.latest: EngineStats | None = None
        self.meter = _read_savings(savings_file, settings)
        self._savings_file = savings_file
        self._judged_s = 0.0
        self._profile = profile
        self._parts = parts
        self._observes = parts.rank_gpus.observe
        self._log = _log.bind(instance=name)
        self._problems = RateLimitedLog(self._log)
        self._gpus: Sequence[_ControlledGpu] = ()
        self._wanted_mhz: int | None = STOCK
        self._failure: Exception | None = None
        self._scraped: tuple[float, EngineTotals] | None = None
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Control the instance until cancelled; its GPUs are back at stock then."""
        retry = Retry(_FIRST_DELAY_S, _MAX_DELAY_S, forget_after_s=_FORGET_S)
        reader = self._reader()
        try:
            while True:
                await asyncio.sleep(_TICK_S)
                if time.monotonic() - self.sources.heard_s >= MAX_STATS_AGE_S:
                    continue
                try:
                    async with self._opened() as gpus:
                        await self._control(gpus)
                except (GpuError, NotConfirmedError, ServingError) as error:
                    self.problem = str(error)
                    self._problems.error("instance not controlled", reason=self.problem)
                    await asyncio.sleep(retry.failed(time.monotonic()))
        finally:
            if reader is not None:
                await asyncio.to_thread(reader.close)

    # --- Signals --------------------------------------------------------------------------------------------

    def _reader(self) -> MetricsReader | None:
        if self.settings.metrics is None:
            return None
        found = host_and_port(self.settings.metrics)
        assert found is not None  # checked by the settings
        return MetricsReader(*found, lambda *scraped: self._hand_over(self._take_scraped, scraped))

    def _take_scraped(self, scraped: tuple[float, EngineTotals]) -> None:
        before, self._scraped = self._scraped, scraped
        at_s, totals = scraped
        if before is None:
            self.sources.join(_SCRAPED, at_s)
            return
        stats = interval(before[1], totals, at_s - before[0])
        if stats is None:  # the engine's counters went back: it has restarted
            self.sources.leave(_SCRAPED)
            self.sources.join(_SCRAPED, at_s)
        elif stats.length_s < MAX_STATS_AGE_S:  # a longer one says too little of what is there now
            self.sources.report(_SCRAPED, at_s, stats)

    # --- GPUs -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Sequence[_ControlledGpu]]:
        """Open the instance's GPUs, and bring them back to stock at the end.

        Raises:
            GpuError: one can't be opened, or another runs a rank.
            NotConfirmedError: one is not the instance's.
        """
        gpus: list[_ControlledGpu] = []
        self._failure = None
        uuids = await self._uuids()
        await self._confirm(uuids)
        try:
            for uuid in uuids:
                opened = await self._parts.rank_gpus.open(uuid)
                gpus.append(
                    _ControlledGpu(
                        opened,
                        self._observes,
                        lambda result: self._hand_over(self._on_result, result),
                        lambda error: self._hand_over(self._fail, error),
                    )
                )
            yield gpus
        finally:
            done = await asyncio.gather(*(gpu.give_back() for gpu in gpus), return_exceptions=True)
            for gpu, error in zip(gpus, done, strict=True):
                if error is not None:
                    self._log.error("GPU not closed", gpu=gpu.uuid, reason=str(error) or repr(error))

    async def _uuids(self) -> list[str]:
        listed = await self._parts.executor.run(ALL_GPUS, self._parts.gpus.listed)
        uuids = [each for each in listed if isinstance(each, str)]
        found = []
        for name in self.settings.gpus:
            index = int(name) if name.isdecimal() else -1
            place = listed[index] if 0 <= index < len(listed) else name
            if isinstance(place, GpuError):
                raise place
            if place not in uuids or place in found:
                raise GpuNotFoundError(
                    f"gpus: expected different ones of this node's {len(listed)}, found {name}"
                )
            found.append(place)
        return found

    async def _confirm(self, uuids: Sequence[str]) -> None:
        for uuid in uuids:
            verdict = await self._parts.access.judge_use(self.settings.user, uuid)
            if isinstance(verdict, Refused):
                raise NotConfirmedError(verdict.message)
            if not verdict.is_proven:
                raise NotConfirmedError(
                    f"GPU {uuid}: expected a process of user {self.settings.user} on it, found none"
                )

    async def _keep_confirming(self, uuids: Sequence[str]) -> None:
        while True:
            await asyncio.sleep(_CONFIRM_S)
            try:
                await self._confirm(uuids)
            except Exception as error:  # whatever it is: nobody has confirmed the GPUs
                self._fail(error)

    # --- Control --------------------------------------------------------------------------------------------

    async def _control(self, gpus: Sequence[_ControlledGpu]) -> None:
        """Follow the controller until statistics have been gone for a while.

        Raises:
            GpuError: a GPU failed.
            NotConfirmedError: one is not the instance's any more.
            ServingError: the profile is not of this GPU.
        """
        supported = set.intersection(*(set(gpu.supported_mhz) for gpu in gpus))
        limits = EngineLimits(self.settings.max_batched_tokens, self.settings.kv_capacity_tokens)
        steps = for_gpu(self._profile, sorted(supported))
        controller = Controller(steps, limits, self.settings.objectives, time.monotonic())
        self._gpus, self.controller = gpus, controller
        self._wanted_mhz, self.problem = STOCK, ""
        self._log.info("instance taken up", gpus=[gpu.uuid for gpu in gpus], observes=self._observes)
        power = MeanPower()
        watching = asyncio.create_task(self._keep_confirming([gpu.uuid for gpu in gpus]))
        try:
            while time.monotonic() - self.sources.heard_s < _GONE_S:
                await asyncio.sleep(_TICK_S)
                self._tick(controller, power, time.monotonic())
            self._log.info("instance let go: no statistics")
        finally:
            watching.cancel()
            self._save()
            self._gpus, self.controller, self.latest = (), None, None

    def _tick(self, controller: Controller, power: MeanPower, now_s: float) -> None:
        if self._failure is not None:
            raise self._failure
        for gpu in self._gpus:
            gpu.worker.renew()
            if gpu.under_way_s(now_s) > TIMEOUT_S:
                raise GpuHungError(f"GPU {gpu.uuid}: expected the driver to answer within {TIMEOUT_S:g} s")
        if self.sources.has_restarted:
            self._carry_out(controller.on_engine_restarted(now_s))
        stats = self.sources.take(now_s)
        if stats is None:
            self._carry_out(controller.on_tick(now_s))
            return
        changes = {gpu.uuid: gpu.poller.change for gpu in self._gpus}
        powers = power.take({uuid: (c.time_s, c.energy_j) for uuid, c in changes.items() if c is not None})
        if len(powers) == len(self._gpus):
            stats = replace(stats, power_w=sum(powers.values()))
        self._carry_out(controller.on_stats(now_s, stats))
        if stats.contradiction is None:
            self.latest = stats
            self._measure(controller, stats, now_s)

    def _measure(self, controller: Controller, stats: EngineStats, now_s: float) -> None:
        """Count the interval, and go to stock where that is to be measured, or clocks save nothing."""
        meter = self.meter
        if meter.is_in_window and controller.stock_reason is not StockReason.MEASURED:
            meter.end_window()
        meter.add(stats)
        if self._observes or controller.clock_mhz is None:
            return
        if meter.is_due(stats.waiting_count):
            meter.begin_window()
            self._carry_out(controller.on_stock_wanted(now_s, StockReason.MEASURED, WINDOW_S))
        elif now_s - self._judged_s >= _SAVE_S:
            self._judged_s = now_s
            self._save()
            if meter.saves_nothing:
                self.meter = SavingsMeter(self.settings.objectives)
                self._carry_out(controller.on_stock_wanted(now_s, StockReason.NO_SAVING, 3600 * MAX_H))

    def _save(self) -> None:
        try:
            self._savings_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside = self._savings_file.with_suffix(".new")
            beside.write_text(json.dumps(self.meter.to_json()))
            beside.replace(self._savings_file)
        except OSError as error:
            self._problems.warning("savings not kept", file=str(self._savings_file), reason=error.strerror)

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, SetClock):
                self._wanted_mhz = command.clock_mhz
            else:
                self._wanted_mhz = STOCK
                self._log.info("instance at stock", reason=command.reason.value)
            if not self._observes:
                for gpu in self._gpus:
                    gpu.worker.request(self._wanted_mhz)

    def _on_result(self, result: ClockResult) -> None:
        controller = self.controller
        if controller is None:
            return
        if result.error is None:
            workers = [gpu.worker for gpu in self._gpus]
            if all(each.is_set_known and each.set_clock_mhz == self._wanted_mhz for each in workers):
                controller.on_clock_set(result.in_force_at_s, self._wanted_mhz)
        elif result.is_tried_again:
            self._problems.warning("clock not set yet", reason=str(result.error))
        elif isinstance(result.error, _REFUSALS) and result.target_mhz is not STOCK:
            self._problems.error("clock refused", clock_mhz=result.target_mhz, reason=str(result.error))
            self._carry_out(controller.on_clock_refused(time.monotonic()))
        else:
            self._fail(result.error)

    def _fail(self, error: Exception) -> None:
        """End control at the next tick."""
        self._failure = error

    def _hand_over(self, take: Callable[[T], None], value: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(take, value)

    @property
    def wanted_clock_mhz(self) -> int | None:
        """The clock that is chosen; None at stock, and while only observed."""
        return None if self.controller is None or self._observes else self._wanted_mhz

    def view(self) -> dict[str, Any]:
        """Return settings, state and figures, for `perseus serving`."""
        controller, stats = self.controller, self.latest
        state, reason = "controlled", ""
        if controller is None:
            state, reason = ("not controlled", self.problem) if self.problem else ("no statistics", "")
        elif self._observes:
            state = "observed"
        elif controller.stock_reason is not None:
            state, reason = "at stock", controller.stock_reason.value
        predicted = controller.prediction if controller is not None else None
        clocks = []
        if controller is not None and predicted is not None:
            clocks = [
                {
                    "clock_mhz": clock_mhz,
                    "power_w": float(predicted.power_w[column]),
                    "late_ttft_share": float(predicted.late_ttft_share[column]),
                    "late_itl_share": float(predicted.late_itl_share[column]),
                }
                for column, clock_mhz in enumerate(controller.model.steps.clocks_mhz)
            ]
        savings = self.meter.savings()
        return {
            "name": self.name,
            "state": state,
            "reason": reason,
            "clock_mhz": self.wanted_clock_mhz,
            "running_count": stats.running_count if stats is not None else None,
            "waiting_count": stats.waiting_count if stats is not None else None,
            "tokens_per_s": stats.generation_tokens / stats.length_s if stats is not None else None,
            "power_w": stats.power_w if stats is not None else None,
            "time_scale": controller.model.time.scale if controller is not None else None,
            "gpus": list(self.settings.gpus),
            "user": self.settings.user,
            "ttft": self.settings.ttft,
            "itl": self.settings.itl,
            "source": self.settings.metrics or "vLLM's plug-in",
            "clocks": clocks,
            "savings": asdict(savings) | {"is_useful": savings.is_useful},
        }


def _read_savings(file: Path, settings: InstanceSettings) -> SavingsMeter:
    """Return what was measured so far; from the beginning if the file can't be used."""
    try:
        return SavingsMeter.from_json(settings.objectives, json.loads(file.read_text()))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # ServingError is one, too
        _log.warning("savings not read: measured anew", file=str(file), reason=str(error))
    return SavingsMeter(settings.objectives)
