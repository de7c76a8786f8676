"""The GPUs of this node, found by UUID."""

from pathlib import Path
from typing import Any, Protocol

import pynvml

from perseus.agent.gpu import Gpu, GpuError, GpuNotFoundError
from perseus.agent.gpu.emulated import EmulatedGpu
from perseus.agent.gpu.nvml import NvmlGpu
from perseus.agent.settings import AgentSettings


class Backend(Protocol):
    """Where GPUs come from."""

    def open(self, uuid: str) -> Gpu:
        """The GPU, for the caller to close. `GpuError`; a `GpuNotFoundError` lists what there is."""


class NvmlBackend:
    """Real GPUs. `nvml` is the module `pynvml`, or what stands in for it."""

    def __init__(self, nvml: Any = pynvml) -> None:
        self._nvml = nvml

    def open(self, uuid: str) -> Gpu:
        """See `Backend.open`."""
        try:
            return NvmlGpu(uuid, nvml=self._nvml)
        except GpuNotFoundError as error:
            raise _not_found(uuid, self._uuids()) from error

    def _uuids(self) -> list[str]:
        nvml = self._nvml
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            return [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        finally:
            nvml.nvmlShutdown()


class EmulatedBackend:
    """Emulated GPUs: one state file each in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, uuid: str) -> Gpu:
        """See `Backend.open`."""
        found: list[str] = []
        for path in sorted(self._folder.glob("[!.]*")):
            try:
                gpu = EmulatedGpu(path)
            except GpuError:
                continue  # some other file
            if gpu.uuid == uuid:
                return gpu
            found.append(gpu.uuid)
            gpu.close()
        raise _not_found(uuid, found)


def backend(settings: AgentSettings) -> Backend:
    """The backend that the settings ask for."""
    if settings.gpu_backend == "nvml":
        return NvmlBackend()
    assert settings.emulated_gpus is not None  # the settings see to it
    return EmulatedBackend(settings.emulated_gpus)


def _not_found(uuid: str, found: list[str]) -> GpuNotFoundError:
    return GpuNotFoundError(
        f"GPU {uuid}: expected one of this node's {len(found)} GPUs ({', '.join(found) or 'none'})"
    )
