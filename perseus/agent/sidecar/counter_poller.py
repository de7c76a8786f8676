"""Watching a GPU's energy counter.

The counter moves only every 20–100 ms, so it is polled more often than that and only its changes are kept: a
change says what the energy was *when the counter moved*, and that lies between two polls.
"""

import threading
import time
from collections.abc import Callable

from perseus.agent.energy.regression import CounterChange
from perseus.agent.gpu import Gpu, GpuError


class ChangeDetector:
    """Turns polls into changes. Pure."""

    def __init__(self) -> None:
        self._energy_j: float | None = None
        self._unchanged_at_s = 0.0
        self._clock_event_reasons = 0

    def poll(
        self, before_s: float, after_s: float, energy_j: float, clock_event_reasons: int
    ) -> CounterChange | None:
        """Take a reading made between two moments; returns the change, if the counter has moved.

        The change carries all clock-event reasons seen since the change before it.
        """
        self._clock_event_reasons |= clock_event_reasons
        change = None
        if self._energy_j is not None and energy_j != self._energy_j:
            change = CounterChange(
                time_s=(self._unchanged_at_s + after_s) / 2,
                energy_j=energy_j,
                uncertainty_s=(after_s - self._unchanged_at_s) / 2,
                clock_event_reasons=self._clock_event_reasons,
            )
            self._clock_event_reasons = clock_event_reasons
        self._energy_j = energy_j
        self._unchanged_at_s = before_s
        return change


class CounterPoller:
    """Polls one GPU's counter on a thread of its own.

    `on_change` hears of every change, on that thread. The first `GpuError` ends the polling and goes to
    `on_error`.
    """

    def __init__(
        self,
        gpu: Gpu,
        on_change: Callable[[CounterChange], None],
        on_error: Callable[[GpuError], None],
        *,
        interval_s: float = 0.005,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpu = gpu
        self._on_change = on_change
        self._on_error = on_error
        self._interval_s = interval_s
        self._monotonic = monotonic
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"energy counter of {gpu.uuid}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the polling; blocks until the thread has ended."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        detector = ChangeDetector()
        try:
            while not self._closing.wait(self._interval_s):
                before_s = self._monotonic()
                energy_j = self._gpu.total_energy_j()
                after_s = self._monotonic()
                change = detector.poll(before_s, after_s, energy_j, self._gpu.clock_event_reasons())
                if change is not None:
                    self._on_change(change)
        except GpuError as error:
            self._on_error(error)
