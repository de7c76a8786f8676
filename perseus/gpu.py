"""The agent's interface to a GPU, and its errors.

Two implementations: `perseus.agent.gpu.nvml.NvmlGpu` (a real one) and
`perseus.emulation.gpu.EmulatedGpu` (a physical model shared between processes). Locked clocks only.

    GpuError
    ├── GpuNotFoundError        no such GPU on this node
    ├── GpuDriverError          the driver or its library is absent, or failed
    │   └── GpuHungError        the driver does not answer
    ├── GpuPermissionError      the caller may not set clocks
    ├── GpuLostError            the GPU fell off the bus or needs a reset
    ├── GpuUnsupportedError     this GPU or this mode of it cannot do what Perseus needs
    ├── GpuInUseError           another client of the driver blocks the operation
    ├── RecordError             the restore record can't be written, so no clock is set
    │   └── RecordHeldError     another running agent has changed this GPU's clocks
    ├── ClockNotSupportedError  the GPU has no such clock
    └── EmulatedGpuError        an emulated GPU's file is foreign or truncated, or the GPU is misused
"""

from dataclasses import dataclass
from typing import Protocol


class GpuError(Exception):
    """A GPU or its driver refuses an operation or fails."""


class GpuNotFoundError(GpuError):
    """There is no such GPU on this node."""


class GpuDriverError(GpuError):
    """The driver or its library is absent, or failed in a way that no other class covers."""


class GpuHungError(GpuDriverError):
    """A call to the driver does not return, and can't be cancelled."""


class GpuPermissionError(GpuError):
    """The caller may not set clocks."""


class GpuLostError(GpuError):
    """The GPU fell off the bus or needs a reset; further calls are useless."""


class GpuUnsupportedError(GpuError):
    """This GPU, or the mode that it is in, cannot do what Perseus needs."""


class GpuInUseError(GpuError):
    """Another client of the driver blocks the operation."""


class RecordError(GpuError):
    """The restore record can't be written or read, so no clock is set."""


class RecordHeldError(RecordError):
    """Another running agent has changed this GPU's clocks."""


class ClockNotSupportedError(GpuError):
    """The GPU has no such clock."""

    def __init__(self, uuid: str, clock_mhz: int, supported_clocks_mhz: tuple[int, ...]) -> None:
        nearest_mhz = min(supported_clocks_mhz, key=lambda supported_mhz: abs(supported_mhz - clock_mhz))
        super().__init__(
            f"GPU {uuid}: expected one of its {len(supported_clocks_mhz)} supported clocks "
            f"({supported_clocks_mhz[-1]} to {supported_clocks_mhz[0]} MHz), found {clock_mhz} MHz "
            f"(nearest: {nearest_mhz} MHz)"
        )
        self.clock_mhz = clock_mhz


class EmulatedGpuError(GpuError):
    """An emulated GPU's shared file is foreign or truncated, or the emulated GPU is misused."""


class ClockEventReason:
    """Bits of `Gpu.clock_event_reasons` (NVML's nvmlClocksEventReasons)."""

    GPU_IDLE = 0x1
    SW_POWER_CAP = 0x4
    HW_SLOWDOWN = 0x8
    SYNC_BOOST = 0x10
    SW_THERMAL_SLOWDOWN = 0x20
    HW_THERMAL_SLOWDOWN = 0x40
    HW_POWER_BRAKE_SLOWDOWN = 0x80
    DISPLAY_CLOCK_SETTING = 0x100

    THROTTLED = (
        SW_POWER_CAP | HW_SLOWDOWN | SW_THERMAL_SLOWDOWN | HW_THERMAL_SLOWDOWN | HW_POWER_BRAKE_SLOWDOWN
    )
    """With any of these, measurements do not belong to the locked clock."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """A GPU's place on its node, and the processes that compute on it.

    `index` is its number among all GPUs of the node, as nvidia-smi shows it; `device_node` is the path of the
    file that a user must be able to open, empty if it has none; `process_ids` is None if the driver does not
    report them.
    """

    index: int
    device_node: str
    process_ids: tuple[int, ...] | None


class Gpu(Protocol):
    """One GPU. Methods may be called from any thread; each may raise a `GpuError`."""

    @property
    def uuid(self) -> str:
        """The GPU's UUID, such as ``GPU-8f6c…``."""

    @property
    def name(self) -> str:
        """The GPU's model, such as ``NVIDIA A40``."""

    @property
    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """All clocks that can be locked, descending."""

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the clock; blocks for 10–20 ms. Raises `ClockNotSupportedError` for an unsupported clock."""

    def reset_clock(self) -> None:
        """Return to stock; blocks like `set_clock_mhz`."""

    def lock_range(self, lowest_mhz: int, highest_mhz: int) -> None:
        """Limit the clock to a range, as an operator does; blocks like `set_clock_mhz`."""

    def total_energy_j(self) -> float:
        """Read the energy counter, joules; it updates every 20–100 ms on real GPUs."""

    def sm_clock_mhz(self) -> int:
        """Read the current SM clock."""

    def power_w(self) -> float:
        """Read the current power."""

    def power_limit_w(self) -> float:
        """Read the power limit in force; 0 if the GPU does not report it."""

    def power_profiles(self) -> tuple[int, ...]:
        """Read the workload power profiles in force, by NVML's numbers, rising; none if not supported."""

    def clock_event_reasons(self) -> int:
        """Read the bit mask of `ClockEventReason`; other NVML bits may be set too."""

    def close(self) -> None:
        """Close the GPU; its clock stays as it is."""


def is_transient(error: Exception) -> bool:
    """Whether the same call may succeed a moment later: the driver failed or was busy."""
    return isinstance(error, GpuDriverError | GpuInUseError) and not isinstance(error, GpuHungError)
