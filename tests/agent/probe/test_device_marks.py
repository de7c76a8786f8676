"""Marks at device time, with a device whose time the test advances."""

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.agent.link.computation import Kind
from perseus.agent.probe.client import Probe
from perseus.agent.probe.device_marks import SLEW, DeviceMarks
from perseus.agent.probe.marks import UnmarkableError
from tests.agent.marks_stub import MarksStub
from tests.agent.probe.agent_stub import AgentStub


@dataclass
class Device:
    """Events complete in the order in which they were recorded, each at the next of `times_ms`.

    Its clock has its own origin, and the host's is `host_ahead_ns` ahead of it. While `is_captured`, the
    trainer's stream is being captured; while `is_capture_on`, some stream of some thread is.
    """

    times_ms: Sequence[float]
    host_ahead_ns: int = 5_000_000_000
    now_ms: float = 0.0
    recorded_count: int = 0
    made: list["Event"] = field(default_factory=list)
    is_captured: bool = False
    is_capture_on: bool = False
    spoilt_count: int = 0
    relaxed_threads: set[int] = field(default_factory=set)
    failing: str = ""

    def is_capturing(self) -> bool:
        return self.is_captured

    def make_event(self) -> "Event":
        self.made.append(Event(self))
        return self.made[-1]

    def record(self, event: "Event") -> None:
        assert not self.is_captured, "it would be part of the graph"
        event.at_ms = max(self.now_ms, self.times_ms[self.recorded_count])
        self.recorded_count += 1

    def enter_helper(self) -> None:
        if self.failing == "enter_helper":
            raise RuntimeError("enter_helper fails")
        self.relaxed_threads.add(threading.get_ident())

    def monotonic_ns(self) -> int:
        return self.host_ahead_ns + round(1e6 * self.now_ms)


@dataclass(eq=False)
class Event:
    device: Device
    at_ms: float = math.inf

    def query(self) -> bool:
        if self.device.failing == "query":
            raise RuntimeError("query fails")
        if self.device.is_capture_on and threading.get_ident() not in self.device.relaxed_threads:
            self.device.spoilt_count += 1
            raise RuntimeError("operation not permitted when any thread captures")
        assert self.at_ms < math.inf, "never recorded"
        return self.device.now_ms >= self.at_ms

    def elapsed_time(self, end_event: "Event") -> float:
        assert self.query()
        assert end_event.query(), "CUDA raises where an event has not completed"
        return end_event.at_ms - self.at_ms


class ProbeStub(MarksStub):
    """Without an agent it only counts the iterations begun."""

    def __init__(self, *, is_connected: bool = True) -> None:
        super().__init__()
        self.is_connected = is_connected
        self.begun_count = 0

    def begin_iteration(self, *time_ns: int) -> None:
        self.begun_count += 1
        if self.is_connected:
            self.note("begin_iteration", *time_ns)


def bench(
    times_ms: Sequence[float], *, is_connected: bool = True, has_helper: bool = False, **more: Any
) -> tuple[Device, ProbeStub, DeviceMarks]:
    """Return a device, a probe, and marks from the one to the other; `more`: of the device."""
    device, probe = Device(times_ms, **more), ProbeStub(is_connected=is_connected)
    return device, probe, between(probe, device, has_helper=has_helper)


def between(probe: Any, device: Device, *, has_helper: bool = False) -> DeviceMarks:
    return DeviceMarks(probe, device, has_helper=has_helper, monotonic_ns=device.monotonic_ns)


def launch_iteration(marks: DeviceMarks, *, has_wait: bool = False) -> None:
    marks.begin_iteration()
    marks.begin_computation(Kind.FORWARD, 3, 1)
    if has_wait:
        marks.begin_wait()
        marks.end_wait()
    marks.end_computation(Kind.FORWARD, 3, 1)
    marks.end_iteration()


def test_marks_have_device_times_not_host_times() -> None:
    device, probe, marks = bench([100.0, 110.0, 130.5, 140.0, 150.0, 151.0, 152.0, 153.0])
    launch_iteration(marks)
    launch_iteration(marks)  # the host runs ahead
    marks.poll()
    assert not probe.calls, "the device has done nothing yet"
    device.now_ms = 100.25
    marks.poll()
    assert probe.calls == [("begin_iteration", 5_100_250_000)], "found a quarter of a millisecond late"
    device.now_ms = 130.5
    marks.poll()
    assert probe.calls[1:] == [("begin", Kind.FORWARD, 3, 1, 5_110_250_000)], "the end would lie ahead"
    device.now_ms = 151.5
    marks.poll()
    assert probe.calls[2:] == [
        ("end", Kind.FORWARD, 3, 1, 5_130_750_000),
        ("end_iteration", 5_140_250_000),
        # The poll at 130.5 ms was not late at all; the clocks may have drifted by 0.1 µs per millisecond
        # since.
        ("begin_iteration", 5_150_001_950),
        ("begin", Kind.FORWARD, 3, 1, 5_151_001_950),
    ], "an iteration has one anchor, and the next has its own"
    marks.close()
    assert probe.calls[-1] == ("close",)


@given(
    st.lists(st.floats(0.0, 50.0), min_size=24, max_size=24),
    st.lists(st.floats(0.0, 20.0), min_size=1, max_size=60),
)
def test_every_mark_is_sent_once_in_order_and_durations_are_exact_but_for_catching_up(
    gaps_ms: list[float], looks_ms: list[float]
) -> None:
    times_ms = [sum(gaps_ms[: index + 1]) for index in range(len(gaps_ms))]
    device, probe, marks = bench(times_ms)
    for _ in range(4):
        launch_iteration(marks, has_wait=True)
    for step_ms in [*looks_ms, 1000.0]:
        device.now_ms += step_ms
        marks.poll()
        assert all(mark[-1] <= device.monotonic_ns() for mark in probe.calls), "no mark is in the future"
    assert len(probe.calls) == 24
    names = ["begin_iteration", "begin", "begin_wait", "end_wait", "end", "end_iteration"]
    for first in range(0, 24, 6):
        iteration, measured_ms = probe.calls[first : first + 6], times_ms[first : first + 6]
        assert [mark[0] for mark in iteration] == names
        found_ms = [(mark[-1] - iteration[0][-1]) / 1e6 for mark in iteration]
        for found, at_ms in zip(found_ms, measured_ms, strict=True):
            assert (1 - SLEW) * (at_ms - measured_ms[0]) - 1e-5 <= found <= at_ms - measured_ms[0] + 1e-5
        assert iteration[0][-1] >= device.host_ahead_ns + 1e6 * measured_ms[0] - 1


def test_the_helper_sends_marks_and_finishing_waits_for_the_device() -> None:
    device, probe, marks = bench([0.0, 1.0, 2.0, 3.0], has_helper=True)
    launch_iteration(marks)
    job: dict[str, Any] = {
        "pipeline_count": 1,
        "stage_count": 7,
        "tensor_count": 1,
        "schedule": [[]],
        "paths": [[(0, 0)]],
        "max_slowdown_percent": 2,
        "stage_work": ["12 layers"],
        "stage_layers": [[12]],
        "waits": False,
    }
    marks.register(**job)
    until(lambda: len(probe.calls) == 2)
    device.now_ms = 3.0
    marks.finish()
    marks.close()
    names = [mark[0] for mark in probe.calls]
    assert sorted(names[:2]) == ["begin_iteration", "register"]
    assert probe.registered == [job]
    assert names[2:] == ["begin", "end", "end_iteration", "finish", "close"]


def test_the_wait_for_a_stuck_device_is_bounded() -> None:
    _device, probe, marks = bench([0.0, 1e9, 1e9, 1e9], has_helper=True)
    launch_iteration(marks)
    marks.finish()  # without a bound it would never return
    assert probe.calls[-1] == ("finish",)


@pytest.mark.parametrize("failing", ["query", "enter_helper"])
def test_a_device_that_fails_ends_the_marks_and_nothing_else(
    failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A device error, or a driver with which the helper might spoil captures."""
    device, probe, marks = bench([0.0] * 8, has_helper=True, failing=failing)
    launch_iteration(marks)
    until(lambda: bool(probe.calls))
    assert probe.calls == [("close",)], "the agent brings the GPU back to stock"
    recorded_count = device.recorded_count
    launch_iteration(marks)
    marks.finish()
    assert device.recorded_count == recorded_count
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert f"{failing} fails" in warning.getMessage()
    marks.close()


def test_the_helper_may_close_the_marks_itself() -> None:
    """As it does if it collects the model as garbage."""

    class Collecting(Device):
        def enter_helper(self) -> None:
            marks.close()

    probe = ProbeStub()
    marks = between(probe, Collecting([0.0] * 4), has_helper=True)
    marks.report_unmarked("in eval()")
    launch_iteration(marks)
    until(lambda: all(each.name != "perseus-marks" for each in threading.enumerate()))
    assert probe.calls == [("unmarked", "in eval()"), ("close",)]


def test_captures_by_other_code_are_not_spoilt() -> None:
    device, probe, marks = bench([0.0, 1.0, 2.0, 3.0], now_ms=1.0, is_capture_on=True, has_helper=True)
    launch_iteration(marks)
    until(lambda: bool(probe.calls))
    device.now_ms = 10.0
    marks.finish()
    assert [mark[0] for mark in probe.calls] == ["begin_iteration", "begin", "end", "end_iteration", "finish"]
    assert device.spoilt_count == 0
    assert threading.get_ident() not in device.relaxed_threads, "the trainer's mode is the trainer's"


def test_an_iteration_that_is_captured_whole_is_not_recorded() -> None:
    device, _probe, marks = bench([])
    device.is_captured = True
    with pytest.raises(UnmarkableError, match="captured whole in a CUDA graph"):
        marks.begin_iteration()
    marks.begin_computation(Kind.FORWARD, 0, 0)
    marks.poll()
    assert not device.made


def test_captured_computations_are_left_out_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device, probe, marks = bench([float(time_ms) for time_ms in range(8)])
    for _ in range(2):
        marks.begin_iteration()
        device.is_captured = True
        marks.begin_computation(Kind.FORWARD, 0, 0)
        marks.end_computation(Kind.FORWARD, 0, 0)
        device.is_captured = False
        marks.begin_computation(Kind.BACKWARD, 0, 0)
        marks.end_computation(Kind.BACKWARD, 0, 0)
        marks.end_iteration()
    device.now_ms = 7.0
    marks.poll()
    assert [mark[:2] for mark in probe.calls if mark[0] == "begin"] == 2 * [("begin", Kind.BACKWARD)]
    assert len(caplog.records) == 1


@given(
    # Delays of polls, in ms; one of them is prompt.
    st.lists(st.floats(0.2, 8.0), min_size=30, max_size=30),
    st.floats(-50e-6, 50e-6),
)
def test_lateness_is_that_of_the_promptest_polls(late_ms: list[float], drift: float) -> None:
    late_ms[3] = 0.05

    class Drifting(Device):
        def monotonic_ns(self) -> int:
            return round(1e6 * self.now_ms * (1 + drift))

    device, probe = Drifting([10.0 * index for index in range(40)]), ProbeStub()
    marks = between(probe, device)
    for _ in range(10):
        launch_iteration(marks)
    for index, late in enumerate(late_ms):
        device.now_ms = 10.0 * index + late
        marks.poll()
    begins_ns = [mark[-1] for mark in probe.calls if mark[0] == "begin_iteration"]
    for iteration, begun_ns in list(enumerate(begins_ns))[1:]:
        late_by_ms = begun_ns / 1e6 - 40.0 * iteration * (1 + drift)
        assert -0.001 <= late_by_ms <= 0.05 + 2e-4 * 300


def test_a_late_first_poll_wears_off_though_the_device_never_pauses() -> None:
    """Iterations of 40 ms follow each other without a gap; only the first poll is late, by 6 ms."""
    times_ms = [40.0 * number + after for number in range(200) for after in (0.0, 10.0, 30.0, 40.0)]
    device, probe, marks = bench(times_ms)
    for _ in range(200):
        launch_iteration(marks)
    for now_ms in (6.0, *(each + 0.05 for each in times_ms[1:]), 8100.0):
        device.now_ms = now_ms
        marks.poll()
    found_ms = [(mark[-1] - device.host_ahead_ns) / 1e6 for mark in probe.calls]
    late_ms = [found - at for found, at in zip(found_ms, times_ms, strict=True)]
    assert late_ms[0] == 6.0
    assert max(late_ms[-40:]) < 0.06
    assert found_ms == sorted(found_ms)
    # By so little that no duration tells.
    assert all(abs(later - earlier) <= 0.0201 for earlier, later in itertools.pairwise(late_ms))


def test_no_anchor_is_before_it_was_recorded_nor_before_the_mark_that_precedes_it() -> None:
    device, probe, marks = bench([1.0, 2.0, 2.0, 2.0, 50.0, 51.0, 52.0, 53.0])
    launch_iteration(marks)
    device.now_ms = 2.0
    marks.poll()
    device.host_ahead_ns += 30_000_000  # the host's clock was slewed by far more than clocks drift
    device.now_ms = 45.0
    launch_iteration(marks)
    device.now_ms = 53.0
    marks.poll()
    begins_ns = [mark[-1] for mark in probe.calls if mark[0] == "begin_iteration"]
    assert begins_ns[1] >= device.host_ahead_ns + 45_000_000
    times_ns = [mark[-1] for mark in probe.calls]
    assert times_ns == sorted(times_ns)


def test_events_are_reused() -> None:
    device, probe, marks = bench([0.01 * index for index in range(40_000)])
    for iteration in range(1000):
        launch_iteration(marks)
        device.now_ms = 0.04 * iteration - 1.0  # the host runs ahead by 100 events
        marks.poll()
    device.now_ms = 1e6
    marks.poll()
    assert len(probe.calls) == 4000
    assert len(device.made) <= 120


def test_without_an_agent_nothing_is_recorded_and_no_thread_runs() -> None:
    device, probe, marks = bench([], is_connected=False, has_helper=True)
    threads_before = threading.active_count()
    for _ in range(3):
        launch_iteration(marks)
    assert (probe.begun_count, probe.calls, device.made) == (3, [], [])
    assert threading.active_count() == threads_before
    marks.finish()
    marks.close()


def test_an_agent_that_starts_later_gets_marks_and_a_lost_one_none() -> None:
    device, probe, marks = bench([float(time_ms) for time_ms in range(16)], is_connected=False)
    launch_iteration(marks)
    probe.is_connected = True
    launch_iteration(marks)
    device.now_ms = 1.0
    marks.poll()
    assert [mark[0] for mark in probe.calls] == ["begin_iteration", "begin"]
    launch_iteration(marks)
    probe.is_connected = False
    launch_iteration(marks)
    assert probe.begun_count == 4, "every iteration has its number, even those that were not sent"
    assert device.recorded_count == 8
    marks.poll()
    assert len(probe.calls) == 2
    probe.is_connected = True
    launch_iteration(marks)
    device.now_ms = 11.0
    marks.poll()
    assert probe.begun_count == 5
    assert probe.calls[2] == ("begin_iteration", device.host_ahead_ns + 8_000_000)
    assert len(probe.calls) == 6


def test_a_real_probe_sends_the_given_times(agent: AgentStub, probe: Probe) -> None:
    device = Device([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    marks = between(probe, device)
    launch_iteration(marks, has_wait=True)
    device.now_ms = 5.0
    marks.poll()
    times_ns = [getattr(mark, "time_ns") for mark in agent.marks()]  # noqa: B009 - of whatever type
    assert times_ns == [5_000_000_000 + 1_000_000 * number for number in range(6)]


def test_work_is_that_of_the_iteration_in_which_it_was_counted() -> None:
    device, probe, marks = bench([float(number) for number in range(8)])
    for elements in (100, 250):
        marks.begin_iteration()
        marks.begin_computation(Kind.FORWARD, 0, 0)
        marks.count_work(elements)
        marks.end_computation(Kind.FORWARD, 0, 0)
        marks.end_iteration()
    works = []
    for now_ms in (3.5, 7.5):
        device.now_ms = now_ms
        marks.poll()
        works.append(probe.work)
    assert works == [100, 350]


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
