"""The GPUs of this node, found by UUID."""

import contextlib
from pathlib import Path
from typing import Any, Protocol

import pynvml

from perseus.agent.gpu import Gpu, GpuError, GpuNotFoundError, GpuUse
from perseus.agent.gpu.emulated import EmulatedGpu
from perseus.agent.gpu.nvml import NvmlGpu, calling, look
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.sidecar.visible import visible_uuids


class Backend(Protocol):
    """Where GPUs come from."""

    def open(self, uuid: str) -> Gpu:
        """The GPU, for the caller to close. `GpuError`; a `GpuNotFoundError` lists what there is."""

    def look(self, uuid: str) -> GpuUse:
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

    def look(self, uuid: str) -> GpuUse:
        """See `Backend.look`."""
        try:
            return look(uuid, str(self._device_folder), self._nvml)
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

    def look(self, uuid: str) -> GpuUse:
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

    def look(self, uuid: str) -> GpuUse:
        """See `Backend.look`; the index counts hidden GPUs, too."""
        self._check(uuid)
        return self._gpus.look(uuid)

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
