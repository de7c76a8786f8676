"""The thread that polls a GPU's energy counter, at injected times, and the limits that it reads besides.

And the counters of GPUs without a rank: what is reported of them, and to whom, is in the tests of slots.
"""

import queue
from collections.abc import Callable, Iterator
from itertools import chain, count, repeat
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from perseus.agent.energy.counter import CounterChange
from perseus.agent.gpu import (
    ClockEventReason,
    GpuDriverError,
    GpuError,
    GpuInUseError,
    GpuLostError,
    GpuUnsupportedError,
)
from perseus.agent.rank.messages import GpuLimits
from perseus.agent.sidecar import optional
from perseus.agent.sidecar.backends import EmulatedBackend
from perseus.agent.sidecar.counter_poller import LIMITS_INTERVAL_S, CounterPoller, LimitsWatch
from perseus.agent.sidecar.optional import OptionalParts
from perseus.agent.sidecar.power_readings import OtherGpus
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from tests.agent.fake_gpu import FakeGpu
from tests.agent.sidecar.training import UUID

BUSY, LOST = GpuDriverError("busy"), GpuLostError("gone")
STANDS_STILL = "GPU-fake: energy counter: expected it to move within 10 s, found it at 2 J"


class Polled:
    """A GPU that is polled; time advances by a quarter of a second at every reading."""

    def __init__(
        self,
        gpu: FakeGpu,
        limits: LimitsWatch | None = None,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        self.reports: queue.Queue[CounterChange | Exception] = queue.Queue()
        self.failed: queue.Queue[tuple[str, Exception]] = queue.Queue()
        self.ticks = count()
        self._poller = CounterPoller(
            gpu,
            self.reports.put,
            self.reports.put,
            limits,
            lambda part, error: self.failed.put((part, error)),
            interval_s=0.0001,
            monotonic=monotonic or (lambda: next(self.ticks) / 4),
        )

    def take(self, count: int) -> list[CounterChange | Exception]:
        """Return the next reports, and end the polling."""
        taken = [self.reports.get(timeout=60) for _ in range(count)]
        self._poller.close()
        return taken


def energies(reports: list[CounterChange | Exception]) -> list[float | Exception]:
    return [each.energy_j if isinstance(each, CounterChange) else each for each in reports]


@pytest.mark.parametrize(
    ("reasons", "read_mhz", "clock"),
    [
        pytest.param(0, 1200, (1200, 1.0), id="of a GPU that computes"),
        pytest.param(ClockEventReason.GPU_IDLE, 1200, (0, 0.0), id="none of one that idles"),
        pytest.param(0, BUSY, (0, 1.0), id="none of one that does not say"),
    ],
)
def test_a_change_has_its_time_and_the_clock(
    reasons: int, read_mhz: int | GpuError, clock: tuple[int, float]
) -> None:
    """It happened between the readings before it and after it."""
    gpu = FakeGpu(readings=chain([1.0, 2.0], repeat(2.0)))
    gpu.reasons, gpu.effective_mhz = reasons, repeat(read_mhz)
    assert Polled(gpu).take(1) == [CounterChange(0.375, 2.0, 0.375, reasons, 0, *clock)]


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        pytest.param([1.0, 2.0, LOST], [2.0, LOST], id="an error ends the polling"),
        pytest.param(
            [1.0, 2.0, BUSY, GpuInUseError("busy"), 3.0, 4.0],
            [2.0, 4.0],  # the time of the change to 3 is unknown
            id="transient errors do not",
        ),
        pytest.param([BUSY] * 100, [BUSY], id="lasting ones do in the end"),
    ],
)
def test_errors(readings: list[float | GpuError], expected: list[float | Exception]) -> None:
    """The counter would move on afterwards."""
    polled = Polled(FakeGpu(readings=chain(readings, map(float, count(5)))))
    assert energies([polled.reports.get(timeout=60) for _ in expected]) == expected
    if isinstance(expected[-1], Exception):
        with pytest.raises(queue.Empty):
            polled.reports.get(timeout=0.1)
    polled.take(0)


def test_a_counter_that_stands_still_is_reported() -> None:
    polled = Polled(FakeGpu(readings=chain([1.0, 2.0], repeat(2.0))))
    moved, error = polled.take(2)
    assert 11 < next(polled.ticks) / 4 < 13
    assert isinstance(moved, CounterChange)
    assert isinstance(error, GpuUnsupportedError)
    assert STANDS_STILL in str(error)


def test_a_bug_is_reported_too() -> None:
    (error,) = Polled(FakeGpu(readings=iter(()))).take(1)
    assert isinstance(error, StopIteration)


@pytest.mark.parametrize("frozen_j", [2.0, 3.0])
def test_a_process_that_freezes_in_a_reading_is_no_counter_that_stands_still(frozen_j: float) -> None:
    """Before or after the driver's answer: with the energy of before, or of after the freeze."""
    now_s = 0.0

    def readings() -> Iterator[float]:
        nonlocal now_s
        yield from (1.0, 2.0)
        now_s += 100.0
        yield from (frozen_j, 3.0)
        yield from map(float, count(4))

    polled = Polled(FakeGpu(readings()), monotonic=lambda: now_s)
    assert energies(polled.take(3)) == [2.0, 3.0, 4.0]


# --- Limits that others set on a GPU ------------------------------------------------------------------------


class LimitedGpu(FakeGpu):
    """A GPU with a sequence of limits, or exceptions to raise."""

    def __init__(self, *limits: GpuLimits | Exception) -> None:
        super().__init__(readings=chain([1.0, 2.0, 3.0], repeat(3.0)))
        self._limits = iter(limits)
        self._profiles: tuple[int, ...] = ()

    def power_limit_w(self) -> float:
        limits = next(self._limits)
        if isinstance(limits, Exception):
            raise limits
        self._profiles = limits.power_profiles
        return limits.power_limit_w

    def power_profiles(self) -> tuple[int, ...]:
        return self._profiles


KNOWN, LOWER, PROFILED = GpuLimits(400.0), GpuLimits(300.0), GpuLimits(300.0, (7,))


@pytest.mark.parametrize(
    ("limits", "reported"),
    [
        pytest.param([KNOWN, LOWER, LOWER, PROFILED], [LOWER, PROFILED], id="only changes are reported"),
        pytest.param([BUSY, BUSY, KNOWN, LOWER], [LOWER], id="unreadable ones stay as they were"),
    ],
)
def test_limits_are_read_at_intervals(limits: list[GpuLimits | Exception], reported: list[GpuLimits]) -> None:
    changes: list[GpuLimits] = []
    watch = LimitsWatch(LimitedGpu(*limits), KNOWN, changes.append)
    for check in range(2 * len(limits)):  # every second check comes too early
        watch.check(100.0 + check * LIMITS_INTERVAL_S / 2)
    assert changes == reported


def test_an_unforeseen_error_in_the_limits_watch_does_not_affect_the_rank() -> None:
    gpu = LimitedGpu(ValueError("nobody has foreseen this"))
    polled = Polled(gpu, LimitsWatch(gpu, GpuLimits(), lambda _: None))
    assert energies(polled.take(2)) == [2.0, 3.0]
    part, error = polled.failed.get(timeout=60)
    assert (part, type(error)) == ("limits watch", ValueError)


# --- Power readings of GPUs without a rank ------------------------------------------------------------------


def test_a_failing_gpu_is_left_out_and_a_served_one_is_closed(tmp_path: Path, gpu: EmulatedGpu) -> None:
    EmulatedGpu.create(tmp_path / "gpus" / "1", A100_SXM, "GPU-lost").close()
    others = OtherGpus(EmulatedBackend(tmp_path / "gpus"))
    assert others.read({UUID, "GPU-lost"}) == {}
    (tmp_path / "gpus" / "1").unlink()
    first = others.read(())
    assert first.keys() == {UUID}
    assert others.read({UUID}) == {}
    again = others.read(())
    assert again[UUID][0] > first[UUID][0]
    assert again[UUID][1] >= first[UUID][1]
    others.close()


async def test_a_part_with_an_unforeseen_error_is_only_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "_FIRST_DELAY_S", 0.0)
    outcomes, parts = iter([ValueError("nobody has foreseen this"), None]), OptionalParts()

    async def run() -> None:
        if (error := next(outcomes)) is not None:
            raise error

    with capture_logs() as logs:
        await parts.keep_running("power readings", run)
    assert next(outcomes, "none left") == "none left"
    assert parts.failure_counts == {"power readings": 1}
    (failed,) = [line for line in logs if line["event"] == "optional part failed"]
    assert "nobody has foreseen this" in repr(failed["exc_info"])
