"""Marks at device time, with a device whose time the test moves."""

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.agent.link.computation import Kind
from perseus.agent.probe.client import Probe
from perseus.agent.probe.device_marks import DeviceMarks


@dataclass
class Device:
    """Events complete in the order in which they were recorded, each at the next of `times_ms`.

    Its clock has an origin of its own, and the host's is `host_ahead_ns` ahead of it.
    """

    times_ms: list[float]
    host_ahead_ns: int = 5_000_000_000
    now_ms: float = 0.0
    recorded: list["Event"] = field(default_factory=list)

    def record(self) -> "Event":
        event = Event(self, self.times_ms[len(self.recorded)])
        self.recorded.append(event)
        return event

    def monotonic_ns(self) -> int:
        return self.host_ahead_ns + round(1e6 * self.now_ms)


@dataclass
class Event:
    device: Device
    at_ms: float

    def query(self) -> bool:
        return self.device.now_ms >= self.at_ms

    def elapsed_time(self, end_event: "Event") -> float:
        assert self.query()
        assert end_event.query(), "CUDA raises where an event has not completed"
        return end_event.at_ms - self.at_ms


class ProbeStub(Probe):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.marks: list[tuple[Any, ...]] = []

    def begin_iteration(self, time_ns: int | None = None) -> None:
        self.marks.append(("begin iteration", time_ns))

    def end_iteration(self, time_ns: int | None = None) -> None:
        self.marks.append(("end iteration", time_ns))

    def begin_computation(
        self, kind: Kind, microbatch: int, chunk: int = 0, time_ns: int | None = None
    ) -> None:
        self.marks.append(("begin", kind, microbatch, chunk, time_ns))

    def end_computation(
        self, kind: Kind, microbatch: int, chunk: int = 0, time_ns: int | None = None
    ) -> None:
        self.marks.append(("end", kind, microbatch, chunk, time_ns))

    def register(self, **arguments: Any) -> bool:
        self.marks.append(("register", arguments["stage_count"]))
        return True

    def finish(self) -> None:
        self.marks.append(("finish",))

    def close(self) -> None:
        self.marks.append(("close",))


def launch_iteration(marks: DeviceMarks) -> None:
    marks.begin_iteration()
    marks.begin_computation(Kind.FORWARD, 3, 1)
    marks.end_computation(Kind.FORWARD, 3, 1)
    marks.end_iteration()


def test_the_device_s_times_count_and_not_the_host_s() -> None:
    device, probe = Device([100.0, 110.0, 130.5, 140.0, 150.0, 151.0, 152.0, 153.0]), ProbeStub()
    marks = DeviceMarks(probe, device.record, has_helper=False, monotonic_ns=device.monotonic_ns)
    launch_iteration(marks)
    launch_iteration(marks)  # the host runs ahead
    marks.look()
    assert not probe.marks, "the device has done nothing yet"
    device.now_ms = 100.25
    marks.look()
    assert probe.marks == [("begin iteration", 5_100_250_000)], "found a quarter of a millisecond late"
    device.now_ms = 130.5
    marks.look()
    assert probe.marks[1:] == [("begin", Kind.FORWARD, 3, 1, 5_110_250_000)], "the end would lie ahead"
    device.now_ms = 151.5
    marks.look()
    assert probe.marks[2:] == [
        ("end", Kind.FORWARD, 3, 1, 5_130_750_000),
        ("end iteration", 5_140_250_000),
        ("begin iteration", 5_150_500_000),
        ("begin", Kind.FORWARD, 3, 1, 5_151_500_000),
    ], "an iteration has one anchor, and the next has its own"
    marks.close()
    assert probe.marks[-1] == ("close",)


@given(
    st.lists(st.floats(0.0, 50.0), min_size=16, max_size=16),
    st.lists(st.floats(0.0, 20.0), min_size=1, max_size=60),
)
def test_every_mark_is_sent_once_in_order_with_exact_durations(
    gaps_ms: list[float], looks_ms: list[float]
) -> None:
    times_ms = [sum(gaps_ms[: index + 1]) for index in range(len(gaps_ms))]
    device, probe = Device(times_ms), ProbeStub()
    marks = DeviceMarks(probe, device.record, has_helper=False, monotonic_ns=device.monotonic_ns)
    for _ in range(4):
        launch_iteration(marks)
    for step_ms in [*looks_ms, 1000.0]:
        device.now_ms += step_ms
        marks.look()
        assert all(mark[-1] <= device.monotonic_ns() for mark in probe.marks), "none is from the future"
    assert len(probe.marks) == 16
    for first in range(0, 16, 4):
        iteration, measured_ms = probe.marks[first : first + 4], times_ms[first : first + 4]
        assert [mark[0] for mark in iteration] == ["begin iteration", "begin", "end", "end iteration"]
        found_ms = [(mark[-1] - iteration[0][-1]) / 1e6 for mark in iteration]
        assert found_ms == pytest.approx([at_ms - measured_ms[0] for at_ms in measured_ms], abs=1e-5)
        assert iteration[0][-1] >= device.host_ahead_ns + 1e6 * measured_ms[0] - 1


def test_the_helper_sends_marks_and_finishing_waits_for_the_device() -> None:
    device, probe = Device([0.0, 1.0, 2.0, 3.0]), ProbeStub()
    marks = DeviceMarks(probe, device.record, monotonic_ns=device.monotonic_ns)
    launch_iteration(marks)
    marks.register(
        pipeline_count=1, stage_count=7, tensor_count=1, schedule=[], paths=[], max_slowdown_percent=0
    )
    deadline_s = time.monotonic() + 5
    while len(probe.marks) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    device.now_ms = 3.0
    marks.finish()
    marks.close()
    names = [mark[0] for mark in probe.marks]
    assert sorted(names[:2]) == ["begin iteration", "register"]
    assert names[2:] == ["begin", "end", "end iteration", "finish", "close"]


def test_a_device_that_never_gets_there_is_not_waited_for_long() -> None:
    device, probe = Device([0.0, 1e9, 1e9, 1e9]), ProbeStub()
    marks = DeviceMarks(probe, device.record, monotonic_ns=device.monotonic_ns)
    launch_iteration(marks)
    begin_s = time.monotonic()
    marks.finish()
    assert time.monotonic() - begin_s < 3
    assert probe.marks[-1] == ("finish",)


def test_a_device_that_fails_ends_the_marks_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Event):
        def query(self) -> bool:
            raise RuntimeError("an illegal memory access was encountered")

    device, probe = Device([0.0] * 8), ProbeStub()
    marks = DeviceMarks(probe, lambda: Broken(device, 0.0))
    launch_iteration(marks)
    marks.finish()
    launch_iteration(marks)
    assert probe.marks == [("finish",)]
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "illegal memory access" in warning.getMessage()


def test_it_goes_before_a_real_probe(tmp_path: Path) -> None:
    """Without an agent: what matters is that the times are taken as they are given."""
    device = Device([0.0, 1.0, 2.0, 3.0], now_ms=3.0)
    probe = Probe.connect(tmp_path / "nothing.sock", job_id="job", pipeline=0, stage=0, gpu_uuid="GPU-1")
    sent: list[bytes] = []
    probe._send = sent.append
    marks = DeviceMarks(probe, device.record, has_helper=False, monotonic_ns=device.monotonic_ns)
    launch_iteration(marks)
    marks.look()
    times_ns = [int.from_bytes(packet[-8:], "little") for packet in sent]
    assert times_ns == [5_000_000_000, 5_001_000_000, 5_002_000_000, 5_003_000_000]
    marks.close()
