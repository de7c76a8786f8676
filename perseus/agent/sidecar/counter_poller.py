"""Watching a GPU's energy counter on a thread of its own; `energy.counter` says what is made of the polls."""

import threading
import time
from collections.abc import Callable

from perseus.agent.energy.counter import ChangeDetector, CounterChange
from perseus.agent.gpu import Gpu, GpuError


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
