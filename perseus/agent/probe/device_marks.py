"""Marks at device time, from events on a GPU's stream.

Under CUDA the host runs ahead of the device, so host time shows when a computation was launched, not when it
ran. Here every edge is an event, recorded on the stream of the computation's kernels. A helper thread polls
for completed events and sends their marks, about a millisecond later; no thread ever waits for the device.

Events only measure the time between two of them. Each iteration's first event is its anchor. Its time is the
latest that is consistent with all polls so far (`device_time`): its error is at most the delay of the
promptest poll, and it is never before the event was recorded. All other times of the iteration are the
anchor's plus the device's measurements: durations and gaps within an iteration are exact device times. Where
the last mark of the preceding iteration was too late, and a device that never pauses leaves no gap to make up
for it, they are shorter by `SLEW` until it is made up for.

Graphs: while the stream is being captured, launched work goes into a graph and does not run. Edges within a
capture are left out. An iteration that begins in a capture is captured whole; its replays run no Python and
can't be marked, so marking ends (`UnmarkableError`). Captures by other code are not disturbed: the trainer's
thread only records events, and the helper, which queries them, has excluded itself from captures
(`EventSource.enter_helper`).

Without an agent there is no helper, and no event is recorded.

Standard library only: the framework hook records the events.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.link.packets import Saving
from perseus.agent.probe.client import Probe
from perseus.agent.probe.device_time import DeviceTime
from perseus.agent.probe.job_spec import Path
from perseus.agent.probe.marks import UnmarkableError

_log = logging.getLogger("perseus.device_marks")

POLL_INTERVAL_S = 0.001
SLEW = 1e-3
"""By which share marks that are too late catch up: ten times as fast as clocks drift."""
# Training is over when finish() is called, so it may wait a moment for the device.
_FINISH_TIMEOUT_S = 1.0


class DeviceEvent(Protocol):
    """An event on a device's stream, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the device has completed the event."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this event to another; both must have completed."""


class EventSource(Protocol):
    """A device's events from a framework; all methods but `enter_helper` are for the training thread."""

    def is_capturing(self) -> bool:
        """Return whether launches are captured into a graph at present."""

    def make_event(self) -> DeviceEvent:
        """Return an event that is not yet recorded."""

    def record(self, event: Any, /) -> None:
        """Record a new or reused event on the current stream."""

    def enter_helper(self) -> None:
        """Prepare the calling thread for queries: it must disturb no capture and use no other GPU."""


class _Edge(NamedTuple):
    """A mark that waits for its event. `recorded_ns`: host time just before it was recorded."""

    event: DeviceEvent
    send: Callable[[int], None]
    is_anchor: bool
    recorded_ns: int


class _Due(NamedTuple):
    """A mark to be sent; its event completed at this position of the device."""

    position_ns: int
    edge: _Edge


class DeviceMarks:
    """Wraps a probe, and gives its marks device times (implements `Marks`).

    With `has_helper` a helper thread polls the events; without it, the caller has to call `poll`.
    """

    def __init__(
        self,
        probe: Probe,
        source: EventSource,
        *,
        has_helper: bool = True,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._probe = probe
        self._source = source
        self._monotonic_ns = monotonic_ns
        self._edges: deque[_Edge] = deque()
        self._due: deque[_Due] = deque()
        # Reusable events. The trainer's thread takes from the pool, the helper puts back.
        self._pool: list[DeviceEvent] = []
        # The last completed anchor and its position.
        self._anchor: DeviceEvent | None = None
        self._anchor_position_ns = 0
        self._device_time = DeviceTime()
        # The last anchor that was sent: its position, its host time, and by how much that is too late.
        self._sent_position_ns = self._sent_anchor_ns = self._too_late_ns = 0
        self._sent_ns = 0
        self._has_warned_of_capture = False
        self._work = 0
        # The probe is not thread-safe: both threads use it under this lock.
        self._lock = threading.Lock()
        self._is_marking = threading.Event()
        self._is_over = threading.Event()
        self._has_helper = has_helper
        self._helper = threading.Thread(target=self._keep_polling, name="perseus-marks", daemon=True)

    @property
    def saving(self) -> Saving | None:
        """As of the probe."""
        return self._probe.saving

    def register(
        self,
        *,
        pipeline_count: int,
        stage_count: int,
        tensor_count: int,
        schedule: Sequence[Sequence[Computation]],
        paths: Sequence[Path],
        max_slowdown_percent: float,
        stage_work: Sequence[str],
        stage_layers: Sequence[Sequence[int]],
        waits: bool,
    ) -> bool:
        """Register the job as `Probe.register` does."""
        with self._lock:
            return self._probe.register(
                pipeline_count=pipeline_count,
                stage_count=stage_count,
                tensor_count=tensor_count,
                schedule=schedule,
                paths=paths,
                max_slowdown_percent=max_slowdown_percent,
                stage_work=stage_work,
                stage_layers=stage_layers,
                waits=waits,
            )

    def begin_iteration(self) -> None:
        """Mark the next iteration's begin at the device's time; the same for all marks.

        Raises UnmarkableError if the iteration is captured whole.
        """
        if self._is_over.is_set():
            return
        if not self._probe.is_connected:
            self._pass_unmarked()
            return
        if self._source.is_capturing():
            raise UnmarkableError(
                "iterations are captured whole in a CUDA graph, which runs no Python when replayed"
            )
        if self._has_helper and self._helper.ident is None:
            self._helper.start()
        self._is_marking.set()
        self._work = 0
        self._add(self._probe.begin_iteration, is_anchor=True)

    def end_iteration(self) -> None:
        """Mark the end of the iteration."""
        work, self._work = self._work, 0
        self._add(partial(self._end_iteration, work))

    def begin_computation(self, kind: Kind, microbatch: int, chunk: int) -> None:
        """Mark the begin of a computation of this iteration."""
        self._add(partial(self._probe.begin_computation, kind, microbatch, chunk))

    def end_computation(self, kind: Kind, microbatch: int, chunk: int) -> None:
        """Mark the end of the computation."""
        self._add(partial(self._probe.end_computation, kind, microbatch, chunk))

    def count_work(self, elements: int) -> None:
        """Add to the work of the current iteration."""
        self._work += elements

    def begin_wait(self) -> None:
        """Mark the begin of the current computation's wait for other ranks."""
        self._add(self._probe.begin_wait)

    def end_wait(self) -> None:
        """Mark the end of the wait."""
        self._add(self._probe.end_wait)

    def report_unmarked(self, message: str) -> None:
        """Report that training goes on without marked iterations, and why."""
        with self._lock:
            self._probe.report_unmarked(message)

    def poll(self) -> None:
        """Send the marks of all events that have completed, in the order in which they were recorded."""
        with self._lock:
            self._find_completed()
            self._send_due()

    def finish(self) -> None:
        """Report the end of training. Waits up to a second for the device to reach the last mark."""
        deadline_s = time.monotonic() + _FINISH_TIMEOUT_S
        while (self._edges or self._due) and self._helper.is_alive() and time.monotonic() < deadline_s:
            time.sleep(POLL_INTERVAL_S)
        self._end_helper()
        self._probe.finish()

    def close(self) -> None:
        """Close the connection; marks that the device has not reached are dropped."""
        self._end_helper()
        self._probe.close()

    def _add(self, send: Callable[[int], None], *, is_anchor: bool = False) -> None:
        if not self._is_marking.is_set() or self._is_over.is_set():
            return
        if self._source.is_capturing():
            self._warn_of_capture()
            return
        event = self._pool.pop() if self._pool else self._source.make_event()
        recorded_ns = self._monotonic_ns()
        self._source.record(event)
        self._edges.append(_Edge(event, send, is_anchor, recorded_ns))

    def _end_iteration(self, work: int, time_ns: int) -> None:
        if work:
            self._probe.count_work(work)
        self._probe.end_iteration(time_ns)

    def _pass_unmarked(self) -> None:
        """Count an iteration without an agent, and let the probe look for one."""
        self._is_marking.clear()
        with self._lock:
            # The probe numbers iterations, so those with unsent marks count as well.
            unsent = [*(due.edge for due in self._due), *self._edges]
            for _ in range(sum(edge.is_anchor for edge in unsent) + 1):
                self._probe.begin_iteration()
            self._edges.clear()
            self._due.clear()
            self._anchor, self._anchor_position_ns = None, 0
            self._device_time = DeviceTime()

    def _find_completed(self) -> None:
        now_ns = position_ns = 0
        while self._edges and self._edges[0].event.query():
            now_ns = self._monotonic_ns()
            edge = self._edges.popleft()
            position_ns = self._position_ns(edge)
            self._due.append(_Due(position_ns, edge))
        if now_ns:
            self._device_time.note(position_ns, now_ns)

    def _position_ns(self, edge: _Edge) -> int:
        """Return a completed event's position; events that are no longer needed go to the pool."""
        position_ns, done = self._anchor_position_ns, edge.event
        if self._anchor is not None:
            position_ns += round(1e6 * self._anchor.elapsed_time(edge.event))
        if edge.is_anchor:
            done = self._anchor or done
            self._anchor, self._anchor_position_ns = edge.event, position_ns
        if done is not self._anchor:
            self._pool.append(done)
        return position_ns

    def _send_due(self) -> None:
        while self._due:
            position_ns, edge = self._due[0]
            if edge.is_anchor:
                # No mark may be before its event was recorded, or before the preceding mark.
                latest_ns = max(self._device_time.latest_ns(position_ns), edge.recorded_ns)
                self._sent_position_ns, self._sent_anchor_ns = position_ns, max(latest_ns, self._sent_ns)
                self._too_late_ns = self._sent_anchor_ns - latest_ns
            since_ns = position_ns - self._sent_position_ns
            at_ns = self._sent_anchor_ns + since_ns - min(round(SLEW * since_ns), self._too_late_ns)
            if at_ns > self._monotonic_ns():
                return  # the anchor's poll was later than this one: no mark may be in the future
            edge.send(at_ns)
            self._sent_ns = at_ns
            self._due.popleft()

    def _keep_polling(self) -> None:
        try:
            self._source.enter_helper()
            while self._is_marking.wait() and not self._is_over.wait(POLL_INTERVAL_S):
                self.poll()
        except Exception as error:  # such as a device error, which training will see by itself
            _log.warning("marking has ended, training continues at stock clocks: %s", error)
            self._is_over.set()
            with self._lock:
                self._probe.close()

    def _end_helper(self) -> None:
        self._is_over.set()
        self._is_marking.set()
        # The helper itself may collect what was attached as garbage.
        if self._helper.is_alive() and self._helper is not threading.current_thread():
            self._helper.join()

    def _warn_of_capture(self) -> None:
        if not self._has_warned_of_capture:
            self._has_warned_of_capture = True
            _log.warning("computations that are captured in a CUDA graph are not marked")
