"""Watching a GPU's energy counter on a thread of its own; `energy.counter` says what is made of the polls.

The same thread looks at the GPU's limits now and then.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from perseus.agent.clocks.patience import Patience
from perseus.agent.energy.counter import ChangeDetector, CounterChange
from perseus.agent.gpu import ClockEventReason, Gpu, GpuError, is_transient
from perseus.agent.sidecar.limits_watch import LimitsWatch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What a GPU says of itself at a time; None where it says nothing."""

    energy_j: float
    power_w: float | None
    sm_clock_mhz: int | None


class CounterPoller:
    """Polls one GPU's counter on a thread of its own.

    `on_change` hears of every change, on that thread. An error that does not pass within a moment ends the
    polling and goes to `on_error`. Every `reading_interval_s`, if that is given, the rest is read, too.

    Attributes:
        reading: what was read last.
        change: the counter's latest; None before the first.
    """

    def __init__(
        self,
        gpu: Gpu,
        on_change: Callable[[CounterChange], None],
        on_error: Callable[[Exception], None],
        limits: LimitsWatch | None = None,
        *,
        interval_s: float = 0.005,
        reading_interval_s: float | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reading: GpuReading | None = None
        self.change: CounterChange | None = None
        self._reading_interval_s = reading_interval_s
        self._read_at_s = float("-inf")
        self._gpu = gpu
        self._on_change = on_change
        self._on_error = on_error
        self._limits = limits
        self._interval_s = interval_s
        self._monotonic = monotonic
        self._patience = Patience()
        self._begun_at_s: float | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"energy counter of {gpu.uuid}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the polling; blocks until the thread has ended."""
        self._closing.set()
        self._thread.join()

    def under_way_s(self, now_s: float) -> float:
        """For how long the poll has been under way that is; 0 if none is."""
        begun_at_s = self._begun_at_s
        return now_s - begun_at_s if begun_at_s is not None else 0.0

    def _run(self) -> None:
        detector = ChangeDetector()
        pause_s = self._interval_s
        while not self._closing.wait(pause_s):
            pause_s = self._interval_s
            try:
                change = self._poll(detector)
                self._patience.succeeded()
            except Exception as error:
                now_s = self._monotonic()
                pause_s = self._patience.failed(now_s) - now_s
                if not is_transient(error) or self._patience.is_over(now_s):
                    self._on_error(error)
                    return
                detector = ChangeDetector()  # what it saw last was too long ago to date a change by
                continue
            finally:
                self._begun_at_s = None
            if change is not None:
                self.change = change
                self._on_change(change)

    def _poll(self, detector: ChangeDetector) -> CounterChange | None:
        self._begun_at_s = before_s = self._monotonic()
        energy_j = self._gpu.total_energy_j()
        after_s = self._monotonic()
        reasons = self._gpu.clock_event_reasons()
        capped_mhz = self._gpu.sm_clock_mhz() if reasons & ClockEventReason.THROTTLED else 0
        if self._limits is not None:
            self._limits.look(after_s)
        if self._reading_interval_s is not None and after_s >= self._read_at_s + self._reading_interval_s:
            self._read_at_s = after_s
            self.reading = GpuReading(energy_j, _told(self._gpu.power_w), _told(self._gpu.sm_clock_mhz))
        return detector.poll(before_s, after_s, energy_j, reasons, capped_mhz)


def _told(ask: Callable[[], T]) -> T | None:
    """What a GPU answers; nothing where it does not tell: whoever needs the answer will meet the error."""
    try:
        return ask()
    except GpuError:
        return None
