"""The physics of an emulated GPU: time and power of work at a clock.

Pure functions of a model and a clock; `dynamics` adds time, and `gpu` the sharing between processes.

Time is roofline-like: the compute-bound part of a computation stretches as the clock falls, the
memory-bound part does not (the memory has a clock of its own):

    time(f) = compute_s · f_max / f + memory_s

Power is static power, plus the memory system's and the cores' dynamic power in proportion to activity. The
cores follow f · V(f)², the voltage V being flat up to a knee and rising linearly above it, as measured
voltage-frequency curves do:

    power(f) = static + activity · (memory + core · (f / f_max) · (V(f) / V(f_max))²)

A GPU that waits on communication is not idle: its collective kernels spin. That is a small activity of the
same formula, so blocking power falls mildly with the clock.

The model neither caps power nor heats up: at stock the clock in force is the highest one, and full activity
there draws the board's TDP.
"""

import math
from dataclasses import dataclass, replace

from perseus.gpu import EmulatedGpuError


@dataclass(frozen=True, slots=True)
class Work:
    """One computation from the GPU's view.

    `compute_s`: seconds bound by the cores at the GPU's highest clock; `memory_s`: seconds bound by memory,
    at any clock; `activity`: share of the GPU's dynamic power that it draws, in (0, 1].
    """

    compute_s: float
    memory_s: float
    activity: float = 1.0

    def __post_init__(self) -> None:
        for field, value_s in (("compute_s", self.compute_s), ("memory_s", self.memory_s)):
            if not (math.isfinite(value_s) and value_s >= 0):
                raise EmulatedGpuError(f"work: {field}: expected a finite number >= 0, found {value_s}")
        if self.compute_s + self.memory_s == 0:
            raise EmulatedGpuError("work: expected compute_s + memory_s > 0, found 0")
        if not 0 < self.activity <= 1:
            raise EmulatedGpuError(f"work: activity: expected a number in (0, 1], found {self.activity}")


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A GPU model: clocks (descending), power curve, set latency and the counter's update period."""

    name: str
    clocks_mhz: tuple[int, ...]
    static_power_w: float
    memory_power_w: float
    core_power_w: float
    """The cores' dynamic power at the highest clock and full activity."""
    knee_clock_mhz: int
    """Voltage is flat up to this clock."""
    knee_voltage_ratio: float
    """Voltage at the knee, as a share of the voltage at the highest clock."""
    blocking_activity: float
    set_latency_s: float = 0.010
    counter_period_s: float = 0.100

    @property
    def board_power_w(self) -> float:
        """The power of full activity at the highest clock: the board's TDP."""
        return self.static_power_w + self.memory_power_w + self.core_power_w

    @property
    def highest_clock_mhz(self) -> int:
        """The highest clock, which is also stock."""
        return self.clocks_mhz[0]

    def time_s(self, work: Work, clock_mhz: int) -> float:
        """Return the duration of `work` at a clock, in seconds."""
        return work.compute_s * self.highest_clock_mhz / clock_mhz + work.memory_s

    def power_w(self, activity: float, clock_mhz: int) -> float:
        """Return the power at an activity and a clock, in watts."""
        above_knee_mhz = max(0, clock_mhz - self.knee_clock_mhz)
        voltage_ratio = self.knee_voltage_ratio + (1 - self.knee_voltage_ratio) * above_knee_mhz / (
            self.highest_clock_mhz - self.knee_clock_mhz
        )
        core_w = self.core_power_w * clock_mhz / self.highest_clock_mhz * voltage_ratio**2
        return self.static_power_w + activity * (self.memory_power_w + core_w)

    def blocking_power_w(self, clock_mhz: int) -> float:
        """Return the power at a clock while the GPU waits on communication, in watts."""
        return self.power_w(self.blocking_activity, clock_mhz)

    def with_clocks(self, count: int) -> "GpuModel":
        """Return the same GPU with `count` of its clocks, spread evenly from half the highest to the highest.

        Half the highest clock lies below the clock of least energy of any training computation measured.
        Raises `EmulatedGpuError` if there are fewer clocks.
        """
        candidates_mhz = [
            clock_mhz for clock_mhz in self.clocks_mhz if 2 * clock_mhz >= self.highest_clock_mhz
        ]
        if not 2 <= count <= len(candidates_mhz):
            raise EmulatedGpuError(
                f"{self.name}: number of clocks: expected 2 to {len(candidates_mhz)}, found {count}"
            )
        step = (len(candidates_mhz) - 1) / (count - 1)
        return replace(self, clocks_mhz=tuple(candidates_mhz[round(index * step)] for index in range(count)))


# Public figures: clock range and board power (TDP 300 and 400 W) from NVIDIA's data sheets of the A40 and the
# A100 SXM; blocking power (70.38 and 83.64 W, here at the highest clock) and the shape of the curves from the
# measurements published with "Reducing Energy Bloat in Large Model Training" (SOSP '24).
A40 = GpuModel(
    name="NVIDIA A40",
    clocks_mhz=tuple(range(1740, 209, -15)),
    static_power_w=55.0,
    memory_power_w=60.0,
    core_power_w=185.0,
    knee_clock_mhz=1110,
    knee_voltage_ratio=0.80,
    blocking_activity=(70.38 - 55.0) / (60.0 + 185.0),
)
A100_SXM = GpuModel(
    name="NVIDIA A100-SXM4-80GB",
    clocks_mhz=tuple(range(1410, 209, -15)),
    static_power_w=60.0,
    memory_power_w=50.0,
    core_power_w=290.0,
    knee_clock_mhz=1095,
    knee_voltage_ratio=0.77,
    blocking_activity=(83.64 - 60.0) / (50.0 + 290.0),
)
