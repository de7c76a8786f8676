"""A GPU that the test controls."""

import threading
from collections.abc import Iterator
from itertools import repeat

from perseus.agent.gpu import GpuError


class FakeGpu:
    """Implements `Gpu`. Sets are recorded, and wait for `permit` if the test has cleared it."""

    uuid = "GPU-fake"
    name = "fake"
    supported_clocks_mhz = (1400, 1200, 1000)

    def __init__(self, readings: Iterator[float | GpuError] | None = None) -> None:
        self.sets: list[int | None] = []
        self.begun = threading.Semaphore(0)
        self.permit = threading.Event()
        self.permit.set()
        self.errors: dict[int | None, Exception] = {}
        self.reasons = 0
        self.effective_mhz: Iterator[int | GpuError] = repeat(1400)
        self._readings = readings or repeat(0.0)

    def set_clock_mhz(self, clock_mhz: int) -> None:
        self._set(clock_mhz)

    def reset_clock(self) -> None:
        self._set(None)

    def lock_range(self, lowest_mhz: int, highest_mhz: int) -> None:
        self._set(highest_mhz)

    def _set(self, target_mhz: int | None) -> None:
        self.begun.release()
        assert self.permit.wait(10)
        if target_mhz in self.errors:
            raise self.errors[target_mhz]
        self.sets.append(target_mhz)

    def total_energy_j(self) -> float:
        reading = next(self._readings)
        if isinstance(reading, GpuError):
            raise reading
        return reading

    def sm_clock_mhz(self) -> int:
        reading = next(self.effective_mhz)
        if isinstance(reading, GpuError):
            raise reading
        return reading

    def power_w(self) -> float:
        return 70.0

    def power_limit_w(self) -> float:
        return 300.0

    def power_profiles(self) -> tuple[int, ...]:
        return ()

    def clock_event_reasons(self) -> int:
        return self.reasons

    def close(self) -> None:
        pass
