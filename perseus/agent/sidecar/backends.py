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

    def uuids(self) -> list[str]:
        """All GPUs, in the order of their bus numbers. `GpuError`."""


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
            raise _not_found(uuid, self.uuids()) from error

    def look(self, uuid: str) -> GpuUse:
        """See `Backend.look`."""
        try:
            return look(uuid, str(self._device_folder), self._nvml)
        except GpuNotFoundError as error:
            raise _not_found(uuid, self.uuids()) from error

    def uuids(self) -> list[str]:
        """See `Backend.uuids`."""
        nvml = self._nvml
        with calling("nvmlInit", "GPUs", nvml):
            nvml.nvmlInit()
        try:
            with calling("nvmlDeviceGetCount, …HandleByIndex, …UUID", "GPUs", nvml):
                handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
                return [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        finally:
            with contextlib.suppress(nvml.NVMLError):  # what was asked for has been answered
                nvml.nvmlShutdown()


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

    def uuids(self) -> list[str]:
        """See `Backend.uuids`; in the order of the files' names."""
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

    def open(self, uuid: str) -> Gpu:
        """See `Backend.open`."""
        self._check(uuid)
        return self._gpus.open(uuid)

    def look(self, uuid: str) -> GpuUse:
        """See `Backend.look`; the index counts hidden GPUs, too."""
        self._check(uuid)
        return self._gpus.look(uuid)

    def uuids(self) -> list[str]:
        """See `Backend.uuids`; in the order in which CUDA counts them."""
        return visible_uuids(self._visible_devices, self._gpus.uuids())

    def _check(self, uuid: str) -> None:
        visible = self.uuids()
        if uuid not in visible:
            raise GpuNotFoundError(
                f"GPU {uuid}: expected one that CUDA_VISIBLE_DEVICES={self._visible_devices} leaves visible "
                f"to the agent ({', '.join(visible) or 'none'})"
            )


def backend(settings: AgentSettings) -> Backend:
    """The backend that the settings ask for, with all GPUs of the node."""
    if settings.gpu_backend == "nvml":
        return NvmlBackend(device_folder=settings.device_folder)
    assert settings.emulated_gpus is not None  # the settings see to it
    return EmulatedBackend(settings.emulated_gpus)


def _not_found(uuid: str, found: list[str]) -> GpuNotFoundError:
    return GpuNotFoundError(
        f"GPU {uuid}: expected one of this node's {len(found)} GPUs ({', '.join(found) or 'none'})"
    )
