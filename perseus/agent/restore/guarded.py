"""A GPU that can always be brought back: no clock of it is set before a record says what to restore."""

from perseus.agent.gpu import (
    ClockNotSupportedError,
    Gpu,
    GpuError,
    GpuPermissionError,
    GpuUnsupportedError,
)
from perseus.agent.restore.records import TIMEOUT_S, ClockRange, HeldRecord, Record, RecordFolder


class GuardedGpu:
    """A GPU and its record (implements `Gpu`); clocks are set and reset by one thread.

    Stock is `stock`, or the GPU's own clocks (None); a record that a dead agent has left takes precedence.
    """

    def __init__(self, gpu: Gpu, records: RecordFolder, stock: ClockRange | None) -> None:
        self._gpu = gpu
        self._records = records
        self._stock = stock
        self._held: HeldRecord | None = None

    @property
    def uuid(self) -> str:
        """See `Gpu.uuid`."""
        return self._gpu.uuid

    @property
    def name(self) -> str:
        """See `Gpu.name`."""
        return self._gpu.name

    @property
    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """See `Gpu.supported_clocks_mhz`."""
        return self._gpu.supported_clocks_mhz

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the clock, once the record is on disk. `RecordError`: it is not, and the clock is not set."""
        is_first = False
        if self._held is None:
            self._held = self._records.find(self.uuid, timeout_s=TIMEOUT_S)
        if self._held is None:
            self._held = self._records.write(Record(self.uuid, self._stock))
            is_first = True
        try:
            self._gpu.set_clock_mhz(clock_mhz)
        except (GpuPermissionError, GpuUnsupportedError, ClockNotSupportedError):
            if is_first:  # refused: the GPU is as it was
                self._forget()
            raise

    def reset_clock(self) -> None:
        """Back to stock. A GPU without a record was not touched, and is not touched now."""
        held = self._held or self._records.find(self.uuid, timeout_s=TIMEOUT_S)
        if held is not None:
            self._held = held
            held.restore(self._gpu)
            self._held = None

    def lock_range(self, lowest_mhz: int, highest_mhz: int) -> None:
        """See `Gpu.lock_range`; for operators, who restore what they change themselves."""
        self._gpu.lock_range(lowest_mhz, highest_mhz)

    def total_energy_j(self) -> float:
        """See `Gpu.total_energy_j`."""
        return self._gpu.total_energy_j()

    def sm_clock_mhz(self) -> int:
        """See `Gpu.sm_clock_mhz`."""
        return self._gpu.sm_clock_mhz()

    def power_w(self) -> float:
        """See `Gpu.power_w`."""
        return self._gpu.power_w()

    def power_limit_w(self) -> float:
        """See `Gpu.power_limit_w`."""
        return self._gpu.power_limit_w()

    def power_profiles(self) -> tuple[int, ...]:
        """See `Gpu.power_profiles`."""
        return self._gpu.power_profiles()

    def clock_event_reasons(self) -> int:
        """See `Gpu.clock_event_reasons`."""
        return self._gpu.clock_event_reasons()

    def close(self) -> None:
        """Let go of the GPU, and of its record: one that is left now waits for whoever comes by."""
        if self._held is not None:
            self._held.release()
            self._held = None
        self._gpu.close()

    def _forget(self) -> None:
        if self._held is not None:
            try:
                self._held.remove()
            except GpuError:
                self._held.release()
            self._held = None
