"""The evolution of an emulated GPU's state: clock changes, progress of work, energy and its counter.

Pure: every method takes the time. Between two events (a pending clock coming into force, the end of the work)
power and speed are constant, so `GpuState.advance` is exact however rarely it is called, and by whom. In
particular the work ends at its exact moment, not when the process that waits for it wakes up, and work of a
killed process runs to its end, as kernels already queued on a real GPU do.
"""

import math
from dataclasses import dataclass

from perseus.emulation.physics import GpuModel, Work
from perseus.gpu import EmulatedGpuError

NO_CLOCK = 0
"""`pending_clock_mhz` when no clock change is under way."""


@dataclass(slots=True)
class GpuState:
    """The whole state at the moment `at_s`; all fields are numbers, so that it can live in a flat record."""

    at_s: float
    counter_origin_s: float
    """The counter updates at this time plus whole update periods."""
    clock_mhz: int
    energy_j: float = 0.0
    counter_j: float = 0.0
    """The energy counter's value: `energy_j` at the latest counter update."""
    pending_clock_mhz: int = NO_CLOCK
    pending_at_s: float = 0.0
    compute_s: float = 0.0
    memory_s: float = 0.0
    activity: float = 0.0
    remaining: float = 0.0
    """Share of the work still to do; 0 while waiting."""
    slowdown: float = 1.0
    clock_event_reasons: int = 0
    cap_mhz: int = NO_CLOCK
    """Upper bound on the effective clock, whatever clock is set; NO_CLOCK if there is none."""
    cap_reasons: int = 0
    """The reasons that it reports while the cap holds it below its clock."""
    power_limit_w: float = 0.0
    """0 for the model's own."""
    power_profiles_mask: int = 0

    @property
    def effective_mhz(self) -> int:
        """The clock at which it runs."""
        return self._reached_mhz(self.clock_mhz)

    @property
    def reasons(self) -> int:
        """The clock event reasons, as NVML's bits."""
        is_capped = self.effective_mhz < self.clock_mhz
        return self.clock_event_reasons | (self.cap_reasons if is_capped else 0)

    @property
    def busy(self) -> bool:
        """Whether work is being executed."""
        return self.remaining > 0

    def power_w(self, model: GpuModel) -> float:
        """The power drawn at `at_s`."""
        if self.busy:
            return model.power_w(self.activity, self.effective_mhz)
        return model.blocking_power_w(self.effective_mhz)

    def begin(self, work: Work) -> None:
        """Start executing `work` at `at_s`. Raises `EmulatedGpuError` if other work is in progress."""
        if self.busy:
            raise EmulatedGpuError(
                f"expected a waiting GPU, found one with {self.remaining:.0%} of its work still to do: "
                "an emulated GPU serves one trainer"
            )
        self.compute_s, self.memory_s, self.activity = work.compute_s, work.memory_s, work.activity
        self.remaining = 1.0

    def set_clock(self, model: GpuModel, clock_mhz: int) -> None:
        """Let `clock_mhz` come into force one set latency after `at_s`, replacing any pending change."""
        self.pending_clock_mhz = clock_mhz
        self.pending_at_s = self.at_s + model.set_latency_s

    def finish_s(self, model: GpuModel) -> float:
        """Return when the work ends (`at_s` if there is none), given the pending clock change."""
        end_s = self.at_s + self._remaining_s(model, self.effective_mhz)
        if self.pending_clock_mhz == NO_CLOCK or end_s <= self.pending_at_s:
            return end_s
        left = (end_s - self.pending_at_s) / (end_s - self.at_s)
        return self.pending_at_s + left * self._remaining_s(model, self._reached_mhz(self.pending_clock_mhz))

    def advance(self, model: GpuModel, now_s: float) -> None:
        """Advance the state to `now_s`; an earlier time changes nothing."""
        tick_s = self._last_tick_s(model, now_s)
        if self.at_s < tick_s:
            self._accrue(model, tick_s)
            self.counter_j = self.energy_j
        self._accrue(model, now_s)

    def _last_tick_s(self, model: GpuModel, now_s: float) -> float:
        """Return the counter's latest update as of `now_s`: the same time for every `now_s` until the next.

        The quotient alone may be rounded below an update at `now_s` itself, which would then be missed.
        """
        ticks = math.floor((now_s - self.counter_origin_s) / model.counter_period_s) + 1
        while (tick_s := self.counter_origin_s + ticks * model.counter_period_s) > now_s:
            ticks -= 1
        return tick_s

    def _accrue(self, model: GpuModel, until_s: float) -> None:
        while self.at_s < until_s:
            step_to_s = until_s
            if self.pending_clock_mhz != NO_CLOCK:
                step_to_s = min(step_to_s, max(self.pending_at_s, self.at_s))
            end_s = self.at_s + self._remaining_s(model, self.effective_mhz)
            if self.busy:
                step_to_s = min(step_to_s, end_s)
            self.energy_j += self.power_w(model) * (step_to_s - self.at_s)
            if self.busy:
                done = step_to_s >= end_s
                self.remaining = 0.0 if done else self.remaining * (end_s - step_to_s) / (end_s - self.at_s)
            self.at_s = step_to_s
            if self.pending_clock_mhz != NO_CLOCK and self.at_s >= self.pending_at_s:
                self.clock_mhz, self.pending_clock_mhz = self.pending_clock_mhz, NO_CLOCK

    def _reached_mhz(self, clock_mhz: int) -> int:
        return clock_mhz if self.cap_mhz == NO_CLOCK else min(clock_mhz, self.cap_mhz)

    def _remaining_s(self, model: GpuModel, clock_mhz: int) -> float:
        if not self.busy:
            return 0.0
        work = Work(self.compute_s, self.memory_s, self.activity)
        return self.remaining * model.time_s(work, clock_mhz) * self.slowdown
