"""The GPUs of a node, behind the small interface of `perseus.gpu`: NVML and the executor for its calls."""

from perseus.gpu import (
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
