"""Setting a GPU's clock without making anybody wait for it.

A set takes 10–20 ms, so each GPU has a worker thread for its sets. Only the newest wanted clock counts: what
was wanted while a set was under way and has been overtaken since is never set.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from perseus.agent.gpu import Gpu

_log = structlog.get_logger(__name__)

STOCK: Final = None
"""The target that stands for the stock clocks."""

_UNKNOWN_MHZ = -1


@dataclass(frozen=True, slots=True)
class ClockResult:
    """A set that was carried out, or failed. Times are CLOCK_MONOTONIC."""

    target_mhz: int | None
    """The clock, or `STOCK`."""
    requested_at_s: float
    completed_at_s: float
    error: Exception | None = None


class ClockWorker:
    """Sets one GPU's clock on a thread of its own.

    `on_result` hears of every set that was carried out or failed, on that thread. What was overtaken before
    it began, and what was in force already, is not reported. After a failure nothing is known to be in force.
    """

    def __init__(
        self,
        gpu: Gpu,
        on_result: Callable[[ClockResult], None],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpu = gpu
        self._on_result = on_result
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._wanted: tuple[int | None, float] | None = None
        self._closing = False
        self._in_force_mhz: int | None = _UNKNOWN_MHZ  # a crashed agent may have left any clock
        self._thread = threading.Thread(target=self._run, name=f"clocks of {gpu.uuid}", daemon=True)
        self._thread.start()

    def request(self, target_mhz: int | None) -> None:
        """Want this clock, or `STOCK`, from now on; returns at once. RuntimeError after `close`."""
        with self._changed:
            if self._closing:
                raise RuntimeError(f"GPU {self._gpu.uuid}: its clock worker is closed")
            self._wanted = (target_mhz, self._monotonic())
            self._changed.notify()

    def close(self) -> None:
        """Carry out the last request, if it is still open, and end the thread; blocks until then."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted is not None or self._closing)
                if self._wanted is None:
                    return
                target_mhz, requested_at_s = self._wanted
                self._wanted = None
            if target_mhz != self._in_force_mhz:
                self._set(target_mhz, requested_at_s)

    def _set(self, target_mhz: int | None, requested_at_s: float) -> None:
        error: Exception | None = None
        try:
            if target_mhz is STOCK:
                self._gpu.reset_clock()
            else:
                self._gpu.set_clock_mhz(target_mhz)
            self._in_force_mhz = target_mhz
        except Exception as caught:  # whatever it was, the next set (a reset, perhaps) must still be tried
            error = caught
            self._in_force_mhz = _UNKNOWN_MHZ
        try:
            self._on_result(ClockResult(target_mhz, requested_at_s, self._monotonic(), error))
        except Exception:  # for the same reason
            _log.exception("clock result not delivered", gpu=self._gpu.uuid, target_mhz=target_mhz)
