"""Reporting the power of this node's GPUs to the coordinator, with and without ranks.

The counters of ranks' GPUs are polled anyway. This module reads the others' counters on a separate executor:
one that hangs delays only these.
"""

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping

import structlog

from perseus.agent.energy.mean_power import MeanPower
from perseus.agent.gpu import Gpu, GpuError
from perseus.agent.gpu.executor import GpuExecutor
from perseus.agent.link.computation import Rank
from perseus.agent.sidecar.backends import Backend
from perseus.agent.sidecar.served import ServedRank
from perseus.agent.sidecar.uplink import Uplink
from perseus.agent.stream.coordinator import Coordinator
from perseus.rate_limited_log import RateLimitedLog
from perseus.v1 import agent_service_pb2 as wire

_log = structlog.get_logger(__name__)

_EXECUTOR_KEY = "those without a rank"
_UNASKED_S = 1.0
_LIST_S = 60.0
_CLOSE_S = 1.0
_MAX_GPUS = 256
"""Per reading, as in the contract."""


class OtherGpus:
    """The counters of GPUs without a rank. Its methods block."""

    def __init__(self, gpus: Backend) -> None:
        self._gpus = gpus
        self._opened: dict[str, Gpu] = {}
        self._listed: list[str] = []
        self._listed_at_s = float("-inf")
        self._failures = RateLimitedLog(_log)

    def read(self, served: Collection[str]) -> dict[str, tuple[float, float]]:
        """Return the time and value of each counter, by UUID. One that fails is retried after a minute."""
        now_s = time.monotonic()
        if now_s >= self._listed_at_s + _LIST_S:
            self._listed_at_s = now_s
            self._listed = [each for each in self._gpus.listed() if isinstance(each, str)]
        counters = {}
        for gpu_uuid in self._listed:
            try:
                if gpu_uuid in served:
                    self._let_go(gpu_uuid)
                else:
                    counters[gpu_uuid] = self._read(gpu_uuid)
            except GpuError as error:
                self._failures.warning("power not known", gpu=gpu_uuid, reason=str(error))
                self._listed = [each for each in self._listed if each != gpu_uuid]
                with contextlib.suppress(GpuError):
                    self._let_go(gpu_uuid)
        return counters

    def close(self) -> None:
        """Close all GPUs."""
        for gpu_uuid in list(self._opened):
            self._let_go(gpu_uuid)

    def _read(self, gpu_uuid: str) -> tuple[float, float]:
        if gpu_uuid not in self._opened:
            self._opened[gpu_uuid] = self._gpus.open(gpu_uuid)
        energy_j = self._opened[gpu_uuid].total_energy_j()
        return time.monotonic(), energy_j

    def _let_go(self, gpu_uuid: str) -> None:
        if (gpu := self._opened.pop(gpu_uuid, None)) is not None:
            gpu.close()


class PowerReadings:
    """Power readings of all GPUs of a node, some of which run the `served` ranks."""

    def __init__(
        self, gpus: Backend, executor: GpuExecutor, served: Mapping[Rank, ServedRank], uplink: Uplink
    ) -> None:
        self._others = OtherGpus(gpus)
        self._executor = executor
        self._served = served
        self._uplink = uplink
        self._mean_power = MeanPower()
        self._failures = RateLimitedLog(_log)

    async def report(self) -> None:
        """Send readings while the coordinator requests them, until cancelled."""
        try:
            await self._report()
        finally:
            with contextlib.suppress(GpuError, TimeoutError):  # one hangs: the process can still end
                await asyncio.wait_for(self._executor.run(_EXECUTOR_KEY, self._others.close), _CLOSE_S)

    async def _report(self) -> None:
        reported_s: float | None = None
        while True:
            await asyncio.sleep(min(self._intervals_s, default=_UNASKED_S))
            if not self._intervals_s:
                reported_s = None
                continue
            powers_w = self._mean_power.take(await self._counters())
            before_s, reported_s = reported_s, time.monotonic()
            if before_s is not None:
                self._send(powers_w, reported_s - before_s)

    @property
    def _intervals_s(self) -> list[float]:
        intervals_s = (each.power_interval_s for each in self._uplink.coordinators)
        return [each for each in intervals_s if each is not None]

    def _send(self, powers_w: Mapping[str, float], duration_s: float) -> None:
        """Send each GPU's power to the coordinator of its rank's job, that of the others to the first."""
        jobs = {each.gpu_uuid: rank.job_id for rank, each in self._served.items() if not each.has_ended}
        readings: dict[Coordinator, wire.PowerReading] = {}
        for uuid, power_w in powers_w.items():
            link = self._uplink.link(jobs[uuid]) if uuid in jobs else self._uplink.first
            reading = readings.setdefault(link.coordinator, wire.PowerReading(duration_s=duration_s))
            if link.coordinator.power_interval_s is not None and len(reading.gpu_uuid) < _MAX_GPUS:
                reading.gpu_uuid.append(uuid)
                reading.power_w.append(power_w)
        for coordinator, reading in readings.items():
            if reading.gpu_uuid:
                coordinator.send(reading)

    async def _counters(self) -> dict[str, tuple[float, float]]:
        """Return the time and value of each GPU's counter: its latest change, or its reading."""
        served = {each.gpu_uuid: each.counted for each in self._served.values() if not each.has_ended}
        counters = {uuid: (each.time_s, each.energy_j) for uuid, each in served.items() if each is not None}
        try:
            counters |= await self._executor.run(_EXECUTOR_KEY, lambda: self._others.read(served.keys()))
        except GpuError as error:
            self._failures.warning("power of GPUs without a rank not known", reason=str(error))
        return counters
