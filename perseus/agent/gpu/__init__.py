"""The GPU behind one small interface: a real one through NVML, or an emulated one."""

from perseus.agent.gpu.interface import (
    ClockEventReason,
    ClockNotSupportedError,
    EmulatedGpuError,
    Gpu,
    GpuDriverError,
    GpuError,
    GpuHungError,
    GpuInUseError,
    GpuLostError,
    GpuNotFoundError,
    GpuPermissionError,
    GpuUnsupportedError,
    GpuUse,
    RecordError,
    RecordHeldError,
    is_transient,
)

__all__ = [
    "ClockEventReason",
    "ClockNotSupportedError",
    "EmulatedGpuError",
    "Gpu",
    "GpuDriverError",
    "GpuError",
    "GpuHungError",
    "GpuInUseError",
    "GpuLostError",
    "GpuNotFoundError",
    "GpuPermissionError",
    "GpuUnsupportedError",
    "GpuUse",
    "RecordError",
    "RecordHeldError",
    "is_transient",
]
