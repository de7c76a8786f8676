"""A GPU that can always be restored: a restore record exists before any clock of it is set."""

from perseus.agent.gpu import (
    ClockNotSupportedError,
    Gpu,
    GpuError,
    GpuPermissionError,
    GpuUnsupportedError,
)
from perseus.agent.restore.records import TIMEOUT_S, ClockRange, HeldRecord, Record, RecordFolder


class GuardedGpu:
    """A GPU and its record (implements `Gpu`); one thread sets and resets clocks.

    Stock is `stock`, or the GPU's own clocks (None); the record of a dead agent takes precedence.
    """

    def __init__(self, gpu: Gpu, records: RecordFolder, stock: ClockRange | None) -> None:
        self._gpu = gpu
        self._records = records
        self._stock = stock
        self._held: HeldRecord | None = None

    @property
    def uuid(self) -> str:
        """The GPU's UUID."""
        return self._gpu.uuid

    @property
    def name(self) -> str:
        """The GPU's model."""
        return self._gpu.name

    @property
    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """The clocks that can be locked, descending."""
        return self._gpu.supported_clocks_mhz

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the clock, once the record is on disk. Raises `RecordError` if it can't be written."""
        is_first = False
        if self._held is None:
            self._held = self._records.find(self.uuid, timeout_s=TIMEOUT_S)
        if self._held is None:
            self._held = self._records.write(Record(self.uuid, self._stock))
            is_first = True
        try:
            self._gpu.set_clock_mhz(clock_mhz)
        except (GpuPermissionError, GpuUnsupportedError, ClockNotSupportedError):
            if is_first:  # refused: the GPU is unchanged
                self._forget()
            raise

    def reset_clock(self) -> None:
        """Return to stock. A GPU without a record was never changed and is left alone."""
        held = self._held or self._records.find(self.uuid, timeout_s=TIMEOUT_S)
        if held is not None:
            self._held = held
            held.restore(self._gpu)
            self._held = None

    def lock_range(self, lowest_mhz: int, highest_mhz: int) -> None:
        """Lock a clock range without a record, for operators, who restore it themselves."""
        self._gpu.lock_range(lowest_mhz, highest_mhz)

    def total_energy_j(self) -> float:
        """Read the energy counter."""
        return self._gpu.total_energy_j()

    def sm_clock_mhz(self) -> int:
        """Read the SM clock."""
        return self._gpu.sm_clock_mhz()

    def power_w(self) -> float:
        """Read the power."""
        return self._gpu.power_w()

    def power_limit_w(self) -> float:
        """Read the power limit."""
        return self._gpu.power_limit_w()

    def power_profiles(self) -> tuple[int, ...]:
        """Read the workload power profiles."""
        return self._gpu.power_profiles()

    def clock_event_reasons(self) -> int:
        """Read the clock event reasons."""
        return self._gpu.clock_event_reasons()

    def close(self) -> None:
        """Close the GPU and release its record; any agent may restore from a record that remains."""
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
