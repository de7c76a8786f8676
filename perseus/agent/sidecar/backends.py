"""The GPUs of this node: opened by UUID, filtered by CUDA_VISIBLE_DEVICES, and counted.

An agent without a driver or without GPUs still runs: the driver may be loaded later, and trainers receive the
error of their GPU. `Inventory` shows such problems to operators before the first trainer meets them.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog

from perseus.agent.gpu import Gpu, GpuDriverError, GpuError, GpuNotFoundError, GpuUse
from perseus.agent.gpu.executor import ALL_GPUS, GpuExecutor
from perseus.agent.gpu.nvml import PYNVML, NvmlGpu, calling, connected, inspect, module_problem, text
from perseus.agent.sidecar.self_test import GpuFindings, all_gpu_findings
from perseus.agent.sidecar.settings import AgentSettings
from perseus.emulation.gpu import EmulatedGpu


class Backend(Protocol):
    """A source of GPUs."""

    def open(self, uuid: str) -> Gpu:
        """Open a GPU for the caller to close. Raises `GpuError`; a `GpuNotFoundError` lists all GPUs."""

    def inspect(self, uuid: str) -> GpuUse:
        """Return the GPU's place and the processes that compute on it. Raises `GpuError` as `open` does."""

    def listed(self) -> list[str | GpuError]:
        """Return the UUIDs of all GPUs in the order of their bus numbers; for a lost one its error.

        Raises `GpuError` if no GPU can be listed.
        """


class NvmlBackend:
    """Real GPUs. `nvml` is the module `pynvml` or a substitute; `device_folder` has the device nodes."""

    def __init__(self, nvml: Any = PYNVML, device_folder: Path = Path("/dev")) -> None:
        self._nvml = nvml
        self._device_folder = device_folder

    def open(self, uuid: str) -> Gpu:
        """Open a GPU through NVML."""
        try:
            return NvmlGpu(uuid, nvml=self._nvml)
        except GpuNotFoundError as error:
            raise self._not_found(error, uuid) from error

    def inspect(self, uuid: str) -> GpuUse:
        """Ask NVML for a GPU's place and processes."""
        try:
            return inspect(uuid, str(self._device_folder), self._nvml)
        except GpuNotFoundError as error:
            raise self._not_found(error, uuid) from error

    def listed(self) -> list[str | GpuError]:
        """List the GPUs that NVML counts."""
        nvml = self._nvml
        with connected("GPUs", nvml):
            with calling("nvmlDeviceGetCount", "GPUs", nvml):
                count = int(nvml.nvmlDeviceGetCount())
            return [self._uuid_or_error(index) for index in range(count)]

    def _not_found(self, error: GpuNotFoundError, uuid: str) -> GpuNotFoundError:
        listed = self.listed()
        # NVML contradicts itself; don't do the same.
        return error if uuid in listed else _not_found(uuid, listed)

    def _uuid_or_error(self, index: int) -> str | GpuError:
        nvml = self._nvml
        try:
            with calling("nvmlDeviceGetHandleByIndex, …UUID", f"GPU {index}", nvml):
                uuid = text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))
        except GpuError as error:
            return error
        return uuid or GpuDriverError(f"GPU {index}: nvmlDeviceGetUUID: expected a UUID, found none")


class EmulatedBackend:
    """Emulated GPUs: a folder with one state file for each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, uuid: str) -> Gpu:
        """Open an emulated GPU's state file."""
        return EmulatedGpu(self._path(uuid)[1])

    def inspect(self, uuid: str) -> GpuUse:
        """Return a GPU's place and processes; its device node is the state file."""
        index, path = self._path(uuid)
        gpu = EmulatedGpu(path)
        try:
            return GpuUse(index, str(path), gpu.process_ids())
        finally:
            gpu.close()

    def listed(self) -> list[str | GpuError]:
        """List the GPUs in the order of the files' names."""
        return list(self._paths())

    def _path(self, uuid: str) -> tuple[int, Path]:
        paths = self._paths()
        if uuid not in paths:
            raise _not_found(uuid, list(paths))
        return list(paths).index(uuid), paths[uuid]

    def _paths(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for path in sorted(self._folder.glob("[!.]*")):
            with contextlib.suppress(GpuError):  # some other file
                gpu = EmulatedGpu(path)
                found[gpu.uuid] = path
                gpu.close()
        return found


class VisibleGpus:
    """The GPUs of another backend that CUDA_VISIBLE_DEVICES leaves visible."""

    def __init__(self, gpus: Backend, visible_devices: str) -> None:
        self._gpus = gpus
        self._visible_devices = visible_devices
        # A node's GPUs do not change, and a listing queries all of them, even those that hang.
        self._listed: list[str | GpuError] = []

    def open(self, uuid: str) -> Gpu:
        """Open a visible GPU."""
        self._check(uuid)
        return self._gpus.open(uuid)

    def inspect(self, uuid: str) -> GpuUse:
        """Return a visible GPU's place and processes; the index counts hidden GPUs, too."""
        self._check(uuid)
        return self._gpus.inspect(uuid)

    def listed(self) -> list[str | GpuError]:
        """List the visible GPUs in CUDA's order, without lost ones."""
        if not self._listed:
            listed = self._gpus.listed()
            if not all(isinstance(each, str) for each in listed):
                return self._visible(listed)
            self._listed = listed
        return self._visible(self._listed)

    def _visible(self, listed: list[str | GpuError]) -> list[str | GpuError]:
        # A lost GPU keeps its index, under a name that no prefix in the environment matches.
        uuids = [each if isinstance(each, str) else f"\0{index}" for index, each in enumerate(listed)]
        return [uuid for uuid in visible_uuids(self._visible_devices, uuids) if uuid in listed]

    def _check(self, uuid: str) -> None:
        visible = self.listed()
        if uuid not in visible:
            raise GpuNotFoundError(
                f"GPU {uuid}: expected one that CUDA_VISIBLE_DEVICES={self._visible_devices} leaves visible "
                f"to the agent ({_names(visible)})"
            )


def backend(settings: AgentSettings) -> Backend:
    """Return the configured backend, with all GPUs of the node."""
    if settings.gpu_backend == "nvml":
        return NvmlBackend(device_folder=settings.device_folder)
    assert settings.emulated_gpus is not None  # checked by the settings
    return EmulatedBackend(settings.emulated_gpus)


def _not_found(uuid: str, listed: list[str | GpuError]) -> GpuNotFoundError:
    return GpuNotFoundError(f"GPU {uuid}: expected one of this node's {len(listed)} GPUs ({_names(listed)})")


def _names(listed: list[str | GpuError]) -> str:
    return ", ".join(map(str, listed)) or "none"


def visible_uuids(visible_devices: str, uuids: Sequence[str]) -> list[str]:
    """Return those of `uuids` (in the order of their bus numbers) that `visible_devices` names, in its order.

    A name is an index or a prefix of exactly one UUID. The first invalid name hides itself and all after it,
    and so does -1; a device that is named twice hides all. Indexes count in the order of bus numbers: this is
    CUDA's own order with CUDA_DEVICE_ORDER=PCI_BUS_ID, and on nodes whose GPUs are of one model.
    """
    visible: list[str] = []
    for name in (part.strip() for part in visible_devices.split(",")):
        if name.isdecimal():
            named = list(uuids[int(name) : int(name) + 1])
        else:
            named = [uuid for uuid in uuids if name and uuid.startswith(name)]
        if len(named) != 1:
            break
        visible += named
    return visible if len(set(visible)) == len(visible) else []


_log = structlog.get_logger(__name__)

_KEPT_S = 2.0


@dataclass(frozen=True, slots=True)
class Found:
    """The number of GPUs, and the problems of all or some of them."""

    gpu_count: int
    problems: tuple[str, ...] = ()


class Inventory:
    """Counts a backend's GPUs on a separate executor: a driver that hangs blocks nothing else.

    `find` queries one GPU, if the backend's GPUs can be tested.
    """

    def __init__(
        self,
        gpus: Backend,
        executor: GpuExecutor,
        clock: Callable[[], float] = time.monotonic,
        find: Callable[[str], GpuFindings] | None = None,
    ) -> None:
        self._gpus = gpus
        self._executor = executor
        self._clock = clock
        self._find = find
        self._found = Found(0)
        self._found_s = float("-inf")

    async def refresh(self) -> Found:
        """Return the current inventory, cached for a moment."""
        if self._clock() >= self._found_s + _KEPT_S:
            self._found, self._found_s = await self._refresh(), self._clock()
        return self._found

    async def report(self) -> None:
        """Log the current inventory, and what keeps GPUs from being used."""
        found = await self.refresh()
        for problem in found.problems:
            _log.error("no GPU can be served" if not found.gpu_count else "GPU lost", reason=problem)
        if found.gpu_count:
            _log.info("GPUs found", count=found.gpu_count)
        if found.gpu_count and self._find is not None:
            await self._report_tests(self._find)

    async def _report_tests(self, find: Callable[[str], GpuFindings]) -> None:
        if problem := module_problem():
            _log.warning("NVML is used with limitations", reason=problem)
        listed = await self._executor.run(ALL_GPUS, self._gpus.listed)
        gpus = await all_gpu_findings([each for each in listed if isinstance(each, str)], find)
        log = _log.warning if any(gpu.is_usable for gpu in gpus) else _log.error
        for gpu in gpus:
            if not gpu.is_usable:
                log("GPU can't be used", gpu=gpu.uuid, reason=gpu.problem)
            for limitation in gpu.limitations:
                _log.warning("GPU is used with a limitation", gpu=gpu.uuid, reason=limitation)

    async def _refresh(self) -> Found:
        try:
            listed = await self._executor.run(ALL_GPUS, self._gpus.listed)
        except GpuError as error:
            return Found(0, (str(error),))
        problems = [str(each) for each in listed if isinstance(each, GpuError)]
        if not listed:
            problems = ["this node has no GPU, or none that the agent may see (CUDA_VISIBLE_DEVICES)"]
        return Found(sum(isinstance(each, str) for each in listed), tuple(problems))
