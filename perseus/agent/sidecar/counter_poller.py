"""Polling a GPU's energy counter on a separate thread; `energy.counter` interprets the polls.

The same thread occasionally reads the GPU's limits that others have set (power limit, workload power
profiles). It never sets them.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import structlog

from perseus.agent.energy.counter import ChangeDetector, CounterChange
from perseus.agent.gpu import ClockEventReason, Gpu, GpuError, GpuUnsupportedError, is_transient
from perseus.agent.rank.messages import GpuLimits
from perseus.agent.sidecar.clock_worker import driver_retry
from perseus.agent.sidecar.optional import part_retry
from perseus.rate_limited_log import RateLimitedLog

_log = structlog.get_logger(__name__)

LIMITS_INTERVAL_S = 2.0

STANDSTILL_S = 10.0
"""Without a move of the counter, until the GPU can't be measured: counters move every 20 to 100 ms."""

T = TypeVar("T")


def read_limits(gpu: Gpu) -> GpuLimits:
    """Read a GPU's limits. Raises `GpuError`."""
    return GpuLimits(gpu.power_limit_w(), gpu.power_profiles())


class LimitsWatch:
    """Checks one GPU's limits every `LIMITS_INTERVAL_S`, on the thread that calls `check`.

    That thread calls `on_change` when they have changed. If they can't be read, the known ones are kept:
    polling the counter will meet the same error.
    """

    def __init__(self, gpu: Gpu, known: GpuLimits, on_change: Callable[[GpuLimits], None]) -> None:
        self._gpu = gpu
        self._known = known
        self._on_change = on_change
        self._next_s = 0.0
        self._failures = RateLimitedLog(_log)

    def check(self, now_s: float) -> None:
        """Check the limits if the interval has passed."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + LIMITS_INTERVAL_S
        try:
            limits = read_limits(self._gpu)
        except GpuError as error:
            self._failures.warning("power limit not read", gpu=self._gpu.uuid, reason=str(error))
            return
        if limits != self._known:
            self._known = limits
            self._on_change(limits)


@dataclass(frozen=True, slots=True)
class GpuReading:
    """A GPU's readings at one time; None for values that it does not report."""

    energy_j: float
    power_w: float | None
    sm_clock_mhz: int | None


class CounterPoller:
    """Polls one GPU's counter on a separate thread.

    The thread calls `on_change` for every change. A lasting error, or a counter that stands still, ends the
    polling and goes to `on_error`. An error in an optional part (limits, readings) goes to
    `on_part_failed` and delays that part. Power and clock are read every `reading_interval_s`, if given.

    Attributes:
        reading: the latest reading; None before the first.
        change: the counter's latest; None before the first.
    """

    def __init__(
        self,
        gpu: Gpu,
        on_change: Callable[[CounterChange], None],
        on_error: Callable[[Exception], None],
        limits: LimitsWatch | None = None,
        on_part_failed: Callable[[str, Exception], None] | None = None,
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
        self._still: tuple[float, float] | None = None
        self._on_part_failed = on_part_failed
        self._part_retry = part_retry()
        self._parts_from_s = float("-inf")
        self._interval_s = interval_s
        self._monotonic = monotonic
        self._retry = driver_retry()
        self._begun_at_s: float | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"energy counter of {gpu.uuid}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the polling; blocks until the thread has ended."""
        self._closing.set()
        self._thread.join()

    def under_way_s(self, now_s: float) -> float:
        """Return for how long the current poll has been in progress; 0 if none is."""
        begun_at_s = self._begun_at_s
        return now_s - begun_at_s if begun_at_s is not None else 0.0

    def _run(self) -> None:
        detector = ChangeDetector()
        pause_s = self._interval_s
        while not self._closing.wait(pause_s):
            pause_s = self._interval_s
            try:
                change = self._poll(detector)
                self._retry.succeeded()
            except Exception as error:
                now_s = self._monotonic()
                pause_s = self._retry.failed(now_s)
                if not is_transient(error) or self._retry.is_over(now_s):
                    self._on_error(error)
                    return
                detector = ChangeDetector()  # its last poll is too old to date a change
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
        if after_s >= self._parts_from_s:
            self._poll_more(energy_j, after_s)
        self._check_moves(energy_j, before_s, after_s)
        change = detector.poll(before_s, after_s, energy_j, reasons, capped_mhz)
        if change is None or reasons & ClockEventReason.GPU_IDLE:
            return change
        clock_mhz = _or_none(self._gpu.sm_clock_mhz)
        return replace(change, sm_clock_mhz=clock_mhz or 0, read_at_s=self._monotonic())

    def _check_moves(self, energy_j: float, before_s: float, after_s: float) -> None:
        """Raise `GpuUnsupportedError` if the counter has not moved for too long: every GPU draws power.

        A reading made between two moments: for how long the process froze meanwhile proves nothing.
        """
        if self._still is None or self._still[0] != energy_j:
            self._still = energy_j, after_s
        elif before_s > self._still[1] + STANDSTILL_S:
            raise GpuUnsupportedError(
                f"GPU {self._gpu.uuid}: energy counter: expected it to move within {STANDSTILL_S:g} s, "
                f"found it at {energy_j:g} J all the time"
            )

    def _poll_more(self, energy_j: float, now_s: float) -> None:
        """Read the optional parts: an unforeseen error only delays them."""
        part = "limits watch"
        try:
            if self._limits is not None:
                self._limits.check(now_s)
            part = "GPU readings"
            if self._reading_interval_s is not None and now_s >= self._read_at_s + self._reading_interval_s:
                self._read_at_s = now_s
                self.reading = GpuReading(
                    energy_j, _or_none(self._gpu.power_w), _or_none(self._gpu.sm_clock_mhz)
                )
        except Exception as error:
            self._parts_from_s = now_s + self._part_retry.failed(now_s)
            if self._on_part_failed is not None:
                self._on_part_failed(part, error)


def _or_none(ask: Callable[[], T]) -> T | None:
    """Return a GPU's answer, or None if it fails: callers that need the value will meet the error."""
    try:
        return ask()
    except GpuError:
        return None
