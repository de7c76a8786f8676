"""The GPU behind one small interface: a real one through NVML, or an emulated one."""

from perseus.agent.gpu.interface import (
    ClockEventReason,
    ClockNotSupportedError,
    EmulatedGpuError,
    Gpu,
    GpuDriverError,
    GpuError,
    GpuLostError,
    GpuNotFoundError,
    GpuPermissionError,
    GpuUnsupportedError,
)

__all__ = [
    "ClockEventReason",
    "ClockNotSupportedError",
    "EmulatedGpuError",
    "Gpu",
    "GpuDriverError",
    "GpuError",
    "GpuLostError",
    "GpuNotFoundError",
    "GpuPermissionError",
    "GpuUnsupportedError",
]
