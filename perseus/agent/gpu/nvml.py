"""A real NVIDIA GPU, through NVML (the module `pynvml`, which the distribution nvidia-ml-py provides)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pynvml

from perseus.agent.gpu.interface import (
    ClockNotSupportedError,
    GpuDriverError,
    GpuError,
    GpuLostError,
    GpuNotFoundError,
    GpuPermissionError,
    GpuUnsupportedError,
)

_ERRORS: dict[int, tuple[type[GpuError], str]] = {
    pynvml.NVML_ERROR_NO_PERMISSION: (
        GpuPermissionError,
        "setting clocks needs root or CAP_SYS_ADMIN: run the agent as root or grant it that capability",
    ),
    pynvml.NVML_ERROR_GPU_IS_LOST: (GpuLostError, "the GPU fell off the bus: see the kernel log"),
    pynvml.NVML_ERROR_RESET_REQUIRED: (GpuLostError, "the GPU needs a reset (nvidia-smi --gpu-reset)"),
    pynvml.NVML_ERROR_NOT_FOUND: (GpuNotFoundError, "compare with the UUIDs that nvidia-smi -L lists"),
    pynvml.NVML_ERROR_NOT_SUPPORTED: (GpuUnsupportedError, "this GPU does not offer it"),
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        GpuDriverError,
        "libnvidia-ml.so.1 is missing: install the NVIDIA driver, or pass it into the container",
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (GpuDriverError, "the NVIDIA kernel driver is not loaded"),
}


class NvmlGpu:
    """One real GPU (implements `Gpu`), chosen by its UUID; Volta or newer, not in MIG mode.

    `nvml` is the module `pynvml`, or what stands in for it.
    """

    def __init__(self, uuid: str, *, nvml: Any = pynvml) -> None:
        """Connect to the GPU; `close` disconnects. Raises any `GpuError` but `ClockNotSupportedError`."""
        self._nvml = nvml
        self._uuid = uuid
        with self._call("nvmlInit"):
            nvml.nvmlInit()
        try:
            self._connect()
        except BaseException:
            nvml.nvmlShutdown()
            raise

    def _connect(self) -> None:
        nvml = self._nvml
        if self._uuid.startswith("MIG-"):
            raise GpuUnsupportedError(
                f"{self._uuid}: expected a whole GPU, found a MIG device: it has no energy counter"
            )
        with self._call("nvmlDeviceGetHandleByUUID"):
            self._handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
        with self._call("nvmlDeviceGetArchitecture"):
            architecture = nvml.nvmlDeviceGetArchitecture(self._handle)
        if architecture < nvml.NVML_DEVICE_ARCH_VOLTA:
            raise GpuUnsupportedError(
                f"GPU {self._uuid}: expected architecture {nvml.NVML_DEVICE_ARCH_VOLTA} (Volta) or newer, "
                f"found {architecture}: it has neither locked clocks nor an energy counter"
            )
        if self._in_mig_mode():
            raise GpuUnsupportedError(
                f"GPU {self._uuid}: expected MIG mode off, found it on: MIG devices have no energy counter"
            )
        with self._call("nvmlDeviceGetName"):
            self._name = str(nvml.nvmlDeviceGetName(self._handle))
        with self._call("nvmlDeviceGetSupportedMemoryClocks"):
            memory_clock_mhz = max(nvml.nvmlDeviceGetSupportedMemoryClocks(self._handle))
        with self._call("nvmlDeviceGetSupportedGraphicsClocks"):
            clocks_mhz = nvml.nvmlDeviceGetSupportedGraphicsClocks(self._handle, memory_clock_mhz)
        self._supported_clocks_mhz = tuple(sorted(clocks_mhz, reverse=True))

    def _in_mig_mode(self) -> bool:
        nvml = self._nvml
        try:
            with self._call("nvmlDeviceGetMigMode"):
                current, _pending = nvml.nvmlDeviceGetMigMode(self._handle)
        except GpuUnsupportedError:  # a GPU that knows no MIG
            return False
        return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)

    @property
    def uuid(self) -> str:
        """The UUID that the GPU was chosen by."""
        return self._uuid

    @property
    def name(self) -> str:
        """NVML's name of the model."""
        return self._name

    @property
    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """The graphics clocks at the highest memory clock, descending."""
        return self._supported_clocks_mhz

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the graphics clock (nvmlDeviceSetGpuLockedClocks)."""
        if clock_mhz not in self._supported_clocks_mhz:
            raise ClockNotSupportedError(self._uuid, clock_mhz, self._supported_clocks_mhz)
        with self._call("nvmlDeviceSetGpuLockedClocks"):
            self._nvml.nvmlDeviceSetGpuLockedClocks(self._handle, clock_mhz, clock_mhz)

    def reset_clock(self) -> None:
        """Unlock the graphics clock (nvmlDeviceResetGpuLockedClocks)."""
        with self._call("nvmlDeviceResetGpuLockedClocks"):
            self._nvml.nvmlDeviceResetGpuLockedClocks(self._handle)

    def total_energy_j(self) -> float:
        """The counter (nvmlDeviceGetTotalEnergyConsumption), since the driver was loaded."""
        with self._call("nvmlDeviceGetTotalEnergyConsumption"):
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000

    def sm_clock_mhz(self) -> int:
        """The SM clock in force (nvmlDeviceGetClockInfo)."""
        with self._call("nvmlDeviceGetClockInfo"):
            return int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))

    def power_w(self) -> float:
        """The instant power field; nvmlDeviceGetPowerUsage averages over a second since Ampere."""
        nvml = self._nvml
        with self._call("nvmlDeviceGetFieldValues(NVML_FI_DEV_POWER_INSTANT)"):
            (field,) = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
            if field.nvmlReturn != nvml.NVML_SUCCESS:
                raise nvml.NVMLError(field.nvmlReturn)
        return float(field.value.uiVal) / 1000

    def clock_event_reasons(self) -> int:
        """The bits of nvmlDeviceGetCurrentClocksEventReasons."""
        with self._call("nvmlDeviceGetCurrentClocksEventReasons"):
            return int(self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle))

    def close(self) -> None:
        """Disconnect from NVML (which counts connections: others in this process keep theirs)."""
        with self._call("nvmlShutdown"):
            self._nvml.nvmlShutdown()

    @contextmanager
    def _call(self, function: str) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as error:
            error_class, advice = _ERRORS.get(error.value, (GpuDriverError, "see the driver's documentation"))
            raise error_class(f"GPU {self._uuid}: {function}: {error}: {advice}") from error
