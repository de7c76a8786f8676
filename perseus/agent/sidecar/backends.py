"""The GPUs of this node: found by UUID, left visible by CUDA_VISIBLE_DEVICES, and counted.

An agent without a driver or without GPUs runs all the same: the driver may come later, and trainers are told
what is wrong with theirs. But whoever looks is to see it before the first trainer does (`Inventory`).
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pynvml
import structlog

from perseus.agent.gpu import Gpu, GpuError, GpuNotFoundError, GpuUse
from perseus.agent.gpu.executor import ALL_GPUS, GpuExecutor
from perseus.agent.gpu.nvml import NvmlGpu, calling, inspect
from perseus.agent.sidecar.settings import AgentSettings
from perseus.emulation.gpu import EmulatedGpu


class Backend(Protocol):
    """Where GPUs come from."""

    def open(self, uuid: str) -> Gpu:
        """The GPU, for the caller to close. `GpuError`; a `GpuNotFoundError` lists what there is."""

    def inspect(self, uuid: str) -> GpuUse:
        """Where the GPU is, and who computes on it. `GpuError` as for `open`."""

    def listed(self) -> list[str | GpuError]:
        """The UUIDs of all GPUs, in the order of their bus numbers; for one that is lost, why it has none.

        `GpuError` if nothing is known of any.
        """


class NvmlBackend:
    """Real GPUs. `nvml` is the module `pynvml`, or what stands in for it; device nodes are in a folder."""

    def __init__(self, nvml: Any = pynvml, device_folder: Path = Path("/dev")) -> None:
        self._nvml = nvml
        self._device_folder = device_folder

    def open(self, uuid: str) -> Gpu:
        """See `Backend.open`."""
        try:
            return NvmlGpu(uuid, nvml=self._nvml)
        except GpuNotFoundError as error:
            raise _not_found(uuid, self.listed()) from error

    def inspect(self, uuid: str) -> GpuUse:
        """See `Backend.look`."""
        try:
            return inspect(uuid, str(self._device_folder), self._nvml)
        except GpuNotFoundError as error:
            raise _not_found(uuid, self.listed()) from error

    def listed(self) -> list[str | GpuError]:
        """See `Backend.listed`."""
        nvml = self._nvml
        with calling("nvmlInit", "GPUs", nvml):
            nvml.nvmlInit()
        try:
            with calling("nvmlDeviceGetCount", "GPUs", nvml):
                count = int(nvml.nvmlDeviceGetCount())
            return [self._uuid_or_error(index) for index in range(count)]
        finally:
            with contextlib.suppress(nvml.NVMLError):  # what was asked for has been answered
                nvml.nvmlShutdown()

    def _uuid_or_error(self, index: int) -> str | GpuError:
        nvml = self._nvml
        try:
            with calling("nvmlDeviceGetHandleByIndex, …UUID", f"GPU {index}", nvml):
                return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))
        except GpuError as error:
            return error


class EmulatedBackend:
    """Emulated GPUs: one state file each in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, uuid: str) -> Gpu:
        """See `Backend.open`."""
        return EmulatedGpu(self._path(uuid)[1])

    def inspect(self, uuid: str) -> GpuUse:
        """See `Backend.look`; the device node is the state file."""
        index, path = self._path(uuid)
        gpu = EmulatedGpu(path)
        try:
            return GpuUse(index, str(path), gpu.process_ids())
        finally:
            gpu.close()

    def listed(self) -> list[str | GpuError]:
        """See `Backend.listed`; in the order of the files' names."""
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
    """Those GPUs of another backend that CUDA_VISIBLE_DEVICES leaves visible."""

    def __init__(self, gpus: Backend, visible_devices: str) -> None:
        self._gpus = gpus
        self._visible_devices = visible_devices
        # A node's GPUs don't change, and asking for them means asking all, those that hang as well.
        self._listed: list[str | GpuError] = []

    def open(self, uuid: str) -> Gpu:
        """See `Backend.open`."""
        self._check(uuid)
        return self._gpus.open(uuid)

    def inspect(self, uuid: str) -> GpuUse:
        """See `Backend.look`; the index counts hidden GPUs, too."""
        self._check(uuid)
        return self._gpus.inspect(uuid)

    def listed(self) -> list[str | GpuError]:
        """See `Backend.listed`; in the order in which CUDA counts them, without those that are lost."""
        if not self._listed:
            listed = self._gpus.listed()
            if not all(isinstance(each, str) for each in listed):
                return self._visible(listed)
            self._listed = listed
        return self._visible(self._listed)

    def _visible(self, listed: list[str | GpuError]) -> list[str | GpuError]:
        # One that is lost keeps its index, and no name in the environment is the beginning of its.
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
    """The backend that the settings ask for, with all GPUs of the node."""
    if settings.gpu_backend == "nvml":
        return NvmlBackend(device_folder=settings.device_folder)
    assert settings.emulated_gpus is not None  # the settings see to it
    return EmulatedBackend(settings.emulated_gpus)


def _not_found(uuid: str, listed: list[str | GpuError]) -> GpuNotFoundError:
    return GpuNotFoundError(f"GPU {uuid}: expected one of this node's {len(listed)} GPUs ({_names(listed)})")


def _names(listed: list[str | GpuError]) -> str:
    return ", ".join(map(str, listed)) or "none"


def visible_uuids(visible_devices: str, uuids: Sequence[str]) -> list[str]:
    """The UUIDs among `uuids` (in the order of their bus numbers) that `visible_devices` names, in its order.

    Devices are named by index or by a UUID's beginning that fits only one. The first name that is none hides
    itself and all after it, and so does -1; a device that is named twice hides all. An index counts in the
    order of bus numbers: with CUDA_DEVICE_ORDER=PCI_BUS_ID, and on nodes whose GPUs are of one model, that is
    CUDA's own order.
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
    """How many GPUs there are, and what is wrong: with all of them, or with some."""

    gpu_count: int
    problems: tuple[str, ...] = ()


class Inventory:
    """Looks at a backend's GPUs, in a lane of its own: a driver that hangs keeps nobody else waiting."""

    def __init__(
        self, gpus: Backend, executor: GpuExecutor, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gpus = gpus
        self._executor = executor
        self._clock = clock
        self._found = Found(0)
        self._found_s = float("-inf")

    async def refresh(self) -> Found:
        """What is found now; who asks often is told the same for a moment."""
        if self._clock() >= self._found_s + _KEPT_S:
            self._found, self._found_s = await self._refresh(), self._clock()
        return self._found

    async def report(self) -> None:
        """Say in the log what is found."""
        found = await self.refresh()
        for problem in found.problems:
            _log.error("no GPU can be served" if not found.gpu_count else "GPU lost", reason=problem)
        if found.gpu_count:
            _log.info("GPUs found", count=found.gpu_count)

    async def _refresh(self) -> Found:
        try:
            listed = await self._executor.run(ALL_GPUS, self._gpus.listed)
        except GpuError as error:
            return Found(0, (str(error),))
        problems = [str(each) for each in listed if isinstance(each, GpuError)]
        if not listed:
            problems = ["this node has no GPU, or none that the agent may see (CUDA_VISIBLE_DEVICES)"]
        return Found(sum(isinstance(each, str) for each in listed), tuple(problems))
