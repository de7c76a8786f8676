"""Setting a GPU's clock without blocking the caller.

A set takes 10–20 ms, so each GPU has a worker thread for its sets. Only the newest requested clock counts: a
clock that is requested during a set and superseded before the set ends is never set. A clock can be scheduled
for a future time: the thread keeps that time itself, however busy the agent is.

A set with a transient error is retried before it counts as failed. A reset is retried until it succeeds or
another clock is requested: until then the GPU may be locked.

Whoever decides on clocks has to show that it still does (`renew`). If it has not for `LEASE_S`, as an event
loop that hangs, the thread goes to stock by itself, and back to the requested clock when it is renewed.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import structlog

from perseus.agent.gpu import Gpu, GpuError, is_transient
from perseus.retry import Retry

_log = structlog.get_logger(__name__)

STOCK: Final = None
"""The target for the stock clocks."""

LEASE_S = 5.0
"""How long a clock outlives the last sign of whoever decides on it: longer than a busy host delays a loop."""

_UNKNOWN_MHZ = -1

# Interval and time limit of polling the effective clock after a set.
_POLL_INTERVAL_S = 0.001
_IN_FORCE_TIMEOUT_S = 0.050
# Retries of driver calls: the first and the longest delay, and how long calls may fail in a row.
_FIRST_DELAY_S, _MAX_DELAY_S, _GIVE_UP_S = 0.01, 0.5, 2.0


@dataclass(frozen=True, slots=True)
class ClockResult:
    """A set that was carried out, or failed. Times are CLOCK_MONOTONIC."""

    target_mhz: int | None
    """The clock, or `STOCK`."""
    due_s: float
    """When it was due to begin."""
    begun_at_s: float
    """When it began, possibly delayed by the previous set."""
    in_force_at_s: float
    """When the GPU's effective clock was observed at the target; otherwise when the call returned."""
    error: Exception | None = None
    is_tried_again: bool = False
    """The error may be transient."""


@dataclass(frozen=True, slots=True)
class _DesiredClock:
    target_mhz: int | None
    due_s: float


def driver_retry() -> Retry:
    """Return the retry policy for calls of a driver.

    A busy driver, or another of its clients, makes single calls fail that succeed a moment later. The agent
    gives a rank up only when no call has succeeded for a while.
    """
    return Retry(_FIRST_DELAY_S, _MAX_DELAY_S, forget_after_s=_GIVE_UP_S, give_up_after_s=_GIVE_UP_S)


class ClockWorker:
    """Sets one GPU's clock on a thread of its own.

    The thread calls `on_result` for every set that was carried out or failed, and once for retries that fail
    for the same reason. Sets that were superseded before they began, or already in force, are not reported.
    After a failure the clock in force is unknown.
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
        # Resets may succeed while sets fail.
        self._retries = {True: driver_retry(), False: driver_retry()}
        self._retried: _DesiredClock | None = None
        self._retry_at_s = 0.0
        self._logged_failure: tuple[str, bool] | None = None
        self._begun_at_s: float | None = None
        self._desired: _DesiredClock | None = None
        self._scheduled: _DesiredClock | None = None
        # The last request that was taken up, the one to take up again after a lease that was over, and when
        # that lease was renewed.
        self._followed: _DesiredClock | None = None
        self._suspended: _DesiredClock | None = None
        self._renewed_at_s = 0.0
        self._closing = False
        self._in_force_mhz: int | None = _UNKNOWN_MHZ  # a crashed agent may have left any clock
        self._thread = threading.Thread(target=self._run, name=f"clocks of {gpu.uuid}", daemon=True)
        self._thread.start()

    @property
    def set_clock_mhz(self) -> int | None:
        """The clock that the driver was last set to, or `STOCK`; undefined unless `is_set_known`."""
        return self._in_force_mhz

    @property
    def is_set_known(self) -> bool:
        """Whether the latest set or reset succeeded."""
        return self._in_force_mhz != _UNKNOWN_MHZ

    def request(self, target_mhz: int | None) -> None:
        """Request this clock, or `STOCK`, now, in place of all earlier requests; returns at once.

        Raises RuntimeError after `close`.
        """
        wanted = _DesiredClock(target_mhz, self._monotonic())
        with self._deciding():
            self._desired, self._scheduled, self._retried, self._suspended = wanted, None, None, None

    def schedule(self, target_mhz: int | None, due_s: float) -> None:
        """Request this clock, or `STOCK`, from `due_s` on, in place of the scheduled one; returns at once.

        Raises RuntimeError after `close`.
        """
        with self._deciding():
            self._scheduled = _DesiredClock(target_mhz, due_s)

    def set_again(self) -> None:
        """Set the clock that was set last once more, unless that was a reset; returns at once.

        Without effect while another set is in progress, pending or scheduled.
        """
        with self._changed:
            waiting = (self._desired, self._scheduled, self._retried, self._suspended, self._begun_at_s)
            if self._is_leased and not self._closing and all(each is None for each in waiting):
                assert self._followed is not None  # it is leased
                self._in_force_mhz = _UNKNOWN_MHZ
                self._desired = replace(self._followed, due_s=self._monotonic())
                self._changed.notify()

    def renew(self) -> None:
        """Show that the caller still decides on the clock, as requests do; returns at once."""
        with self._changed:
            self._renewed_at_s = now_s = self._monotonic()
            suspended, self._suspended = self._suspended, None
            if suspended is not None:
                self._desired, self._retried = replace(suspended, due_s=now_s), None
                self._changed.notify()
        if suspended is not None:
            _log.warning(
                "clock was at stock: nothing decided on it",
                gpu=self._gpu.uuid,
                clock_mhz=suspended.target_mhz,
            )

    def close(self) -> None:
        """Carry out the last request, if it is still pending, and end the thread; blocks until then.

        A request that keeps failing is left to the process that finds the restore record.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def under_way_s(self, now_s: float) -> float:
        """Return for how long the current set has been in progress; 0 if none is."""
        begun_at_s = self._begun_at_s
        return now_s - begun_at_s if begun_at_s is not None else 0.0

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        with self._changed:
            if self._closing:
                raise RuntimeError(f"GPU {self._gpu.uuid}: its clock worker is closed")
            yield
            self._renewed_at_s = self._monotonic()
            self._changed.notify()

    def _run(self) -> None:
        while (desired := self._next()) is not None:
            if desired.target_mhz != self._in_force_mhz:
                self._set(desired)

    def _next(self) -> _DesiredClock | None:
        """Wait for the newest request and return it; None when the worker is closing."""
        with self._changed:
            while True:
                left_s: float | None = None
                if self._scheduled is not None or self._retried is not None or self._is_leased:
                    left_s = self._take_due(self._monotonic())
                desired, self._desired = self._desired, None
                if desired is not None and self._suspended is None:
                    self._followed = desired
                if desired is not None or (self._closing and self._retried is None):
                    return desired
                self._changed.wait(left_s)

    @property
    def _is_leased(self) -> bool:
        return (
            self._followed is not None and self._followed.target_mhz is not STOCK and self._suspended is None
        )

    def _take_due(self, now_s: float) -> float | None:
        """Request the clock that is due by now; return how long until the next is due."""
        if self._scheduled is not None and self._scheduled.due_s <= now_s:
            if self._suspended is None:
                self._desired, self._retried = self._scheduled, None
            else:
                self._suspended = self._scheduled
            self._scheduled = None
        lease_end_s = self._renewed_at_s + LEASE_S
        if self._is_leased and lease_end_s <= now_s:
            self._suspended = self._desired or self._followed
            self._desired, self._retried = _DesiredClock(STOCK, now_s), None
        if self._retried is not None and self._retry_at_s <= now_s:
            self._desired, self._retried = self._retried, None
        dues_s = [self._scheduled.due_s] if self._scheduled is not None else []
        if self._retried is not None:
            dues_s.append(self._retry_at_s)
        if self._is_leased:
            dues_s.append(lease_end_s)
        return min(dues_s) - now_s if dues_s else None

    def _set(self, desired: _DesiredClock) -> None:
        error: Exception | None = None
        self._begun_at_s = begun_at_s = self._monotonic()
        try:
            if desired.target_mhz is STOCK:
                self._gpu.reset_clock()
            else:
                self._gpu.set_clock_mhz(desired.target_mhz)
            self._in_force_mhz = desired.target_mhz
        except Exception as caught:  # whatever it was, the next set (perhaps a reset) must still be tried
            error = caught
            self._in_force_mhz = _UNKNOWN_MHZ
        self._begun_at_s = None
        in_force_at_s = self._monotonic()
        if error is None:
            self._retries[desired.target_mhz is STOCK].succeeded()
            self._logged_failure = None
            if desired.target_mhz is not STOCK:
                in_force_at_s = self._seen_at_s(desired.target_mhz, in_force_at_s)
        is_tried_again = error is not None and self._try_again(desired, error, in_force_at_s)
        if error is not None:
            failure = (repr(error), is_tried_again)
            was_logged = failure == self._logged_failure
            self._logged_failure = failure
            if was_logged and (is_tried_again or desired.target_mhz is STOCK):
                return
        result = ClockResult(
            desired.target_mhz, desired.due_s, begun_at_s, in_force_at_s, error, is_tried_again
        )
        try:
            self._on_result(result)
        except Exception:  # the next set must still be tried, as above
            _log.exception("clock result not delivered", gpu=self._gpu.uuid, target_mhz=desired.target_mhz)

    def _try_again(self, desired: _DesiredClock, error: Exception, now_s: float) -> bool:
        """Schedule a retry where it may help, or is required; return whether the failure is tolerated."""
        retry = self._retries[desired.target_mhz is STOCK]
        retry_at_s = now_s + retry.failed(now_s)
        is_tolerated = is_transient(error) and not retry.is_over(now_s)
        with self._changed:
            is_tried_again = is_tolerated or (desired.target_mhz is STOCK and not self._closing)
            if is_tried_again and self._desired is None:
                self._retried, self._retry_at_s = desired, retry_at_s
        return is_tolerated

    def _seen_at_s(self, target_mhz: int, returned_at_s: float) -> float:
        """Return when the effective clock reached the target; `returned_at_s` if it did not (throttling).

        Stops polling once another clock is requested.
        """
        while True:
            try:
                is_there = self._gpu.sm_clock_mhz() == target_mhz
            except GpuError:
                return returned_at_s
            now_s = self._monotonic()
            if is_there:
                return returned_at_s if now_s - returned_at_s < _POLL_INTERVAL_S else now_s
            with self._changed:
                due_s = self._scheduled.due_s if self._scheduled else now_s + _IN_FORCE_TIMEOUT_S
                if (
                    self._desired
                    or self._closing
                    or due_s <= now_s
                    or now_s > returned_at_s + _IN_FORCE_TIMEOUT_S
                ):
                    return returned_at_s
                self._changed.wait(min(_POLL_INTERVAL_S, due_s - now_s))
