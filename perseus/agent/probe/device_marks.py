"""Marks at device time: what a GPU has done, seen through events on its stream.

Under CUDA the host runs ahead of the device, so a host's time says when a computation was launched, not when
it ran. Here every edge is an event, recorded on the stream where the computation's kernels go. A helper
thread looks which of them have completed and sends their marks, a millisecond or so later; nobody ever waits
for the device.

Events know only the time between two of them. Each iteration's first one is the anchor of the iteration: its
time is the latest that it can have had when the helper finds it completed, late by at most the time from one
completed event to the look that finds it. All other times of the iteration are that time and what the device
measured since: durations and gaps within an iteration are the device's own.

Standard library only: how an event is recorded is the framework's to say.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.client import Path, Probe

_log = logging.getLogger("perseus.device_marks")

LOOK_AGAIN_S = 0.001
# Training is over when finish() is called, so it may wait a moment for the device.
_FINISH_TIMEOUT_S = 1.0


class DeviceEvent(Protocol):
    """An event on a device's stream, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has got there."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to another; both have completed."""


class DeviceMarks:
    """Stands before a probe and gives its marks the device's times (implements `Marks`).

    `record` records an event on the current stream. With `has_helper` a thread of its own looks at the
    events; without, somebody has to call `look`.
    """

    def __init__(
        self,
        probe: Probe,
        record: Callable[[], DeviceEvent],
        *,
        has_helper: bool = True,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._probe = probe
        self._record = record
        self._monotonic_ns = monotonic_ns
        # What is still to be sent, and whether it is an iteration's first event.
        self._edges: deque[tuple[DeviceEvent, Callable[[int], None], bool]] = deque()
        self._anchor: DeviceEvent | None = None
        self._anchor_ns = 0
        # The probe is not to be shared between threads: whoever uses it holds the lock.
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._helper = threading.Thread(target=self._keep_looking, name="perseus-marks", daemon=True)
        if has_helper:
            self._helper.start()

    def register(
        self,
        *,
        pipeline_count: int,
        stage_count: int,
        tensor_count: int,
        schedule: Sequence[Sequence[Computation]],
        paths: Sequence[Path],
        max_slowdown_percent: float,
    ) -> bool:
        """See `Probe.register`. Marks wait meanwhile."""
        with self._lock:
            return self._probe.register(
                pipeline_count=pipeline_count,
                stage_count=stage_count,
                tensor_count=tensor_count,
                schedule=schedule,
                paths=paths,
                max_slowdown_percent=max_slowdown_percent,
            )

    def begin_iteration(self) -> None:
        """The next iteration begins when the device gets here. So for all marks."""
        self._add(self._probe.begin_iteration, is_anchor=True)

    def end_iteration(self) -> None:
        """The iteration ends."""
        self._add(self._probe.end_iteration)

    def begin_computation(self, kind: Kind, microbatch: int, chunk: int) -> None:
        """A computation of this iteration begins."""
        self._add(partial(self._probe.begin_computation, kind, microbatch, chunk))

    def end_computation(self, kind: Kind, microbatch: int, chunk: int) -> None:
        """The computation ends."""
        self._add(partial(self._probe.end_computation, kind, microbatch, chunk))

    def look(self) -> None:
        """Send the marks of all events that have completed, in the order in which they were recorded."""
        with self._lock:
            while self._edges:
                event, send, is_anchor = self._edges[0]
                if not event.query():
                    return
                if is_anchor and event is not self._anchor:
                    since_ns = self._completed_since_ns(event)
                    self._anchor, self._anchor_ns = event, self._monotonic_ns() - since_ns
                if self._anchor is not None:
                    at_ns = self._anchor_ns + _elapsed_ns(self._anchor, event)
                    if at_ns > self._monotonic_ns():
                        return  # the anchor was found later than this: no mark comes from the future
                    send(at_ns)
                self._edges.popleft()

    def finish(self) -> None:
        """Training is done. Waits up to a second for the device to get to the last mark."""
        deadline_s = time.monotonic() + _FINISH_TIMEOUT_S
        while self._edges and self._helper.is_alive() and time.monotonic() < deadline_s:
            time.sleep(LOOK_AGAIN_S)
        self._end_helper()
        self._probe.finish()

    def close(self) -> None:
        """Close the connection; marks that the device has not got to are dropped."""
        self._end_helper()
        self._probe.close()

    def _add(self, send: Callable[[int], None], *, is_anchor: bool = False) -> None:
        if not self._is_over.is_set():
            self._edges.append((self._record(), send, is_anchor))

    def _completed_since_ns(self, anchor: DeviceEvent) -> int:
        """How far the device has come since the anchor at the head, as far as its iteration's events say."""
        last, position = anchor, 1
        # By position: the thread that trains may add edges meanwhile.
        while position < len(self._edges):
            event, _, is_anchor = self._edges[position]
            if is_anchor or not event.query():
                break
            last, position = event, position + 1
        return _elapsed_ns(anchor, last)

    def _keep_looking(self) -> None:
        try:
            while not self._is_over.wait(LOOK_AGAIN_S):
                self.look()
        except Exception as error:  # of the device, say: training will see it by itself
            _log.warning("no marks any more, training goes on unmarked: %s", error)
            self._is_over.set()

    def _end_helper(self) -> None:
        self._is_over.set()
        if self._helper.is_alive():
            self._helper.join()


def _elapsed_ns(begin: DeviceEvent, end: DeviceEvent) -> int:
    return round(1e6 * begin.elapsed_time(end))
