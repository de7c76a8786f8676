import queue
from collections.abc import Iterator
from itertools import chain, count, repeat
from pathlib import Path

import pytest

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
from perseus.agent.sidecar.counter_poller import CounterPoller, LimitsWatch
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A40
from tests.agent.fake_gpu import FakeGpu


def test_polls_a_gpu_until_closed(tmp_path: Path) -> None:
    gpu = EmulatedGpu.create(tmp_path / "gpu", A40, "GPU-a")
    changes: queue.Queue[CounterChange] = queue.Queue()
    poller = CounterPoller(gpu, changes.put, lambda error: pytest.fail(str(error)))
    first, second = changes.get(timeout=10), changes.get(timeout=10)
    poller.close()
    gpu.close()
    between_s = (second.energy_j - first.energy_j) / 70.38
    assert between_s == pytest.approx(0.1 * round(between_s / 0.1), rel=1e-6)
    assert abs(second.time_s - first.time_s - between_s) <= first.uncertainty_s + second.uncertainty_s


@pytest.mark.parametrize(
    ("reasons", "read_mhz", "expected_mhz"),
    [(0, 1200, 1200), (ClockEventReason.GPU_IDLE, 1200, 0), (0, GpuDriverError("no clock"), 0)],
)
def test_a_change_has_the_clock_of_a_gpu_that_computes(
    reasons: int, read_mhz: int | GpuError, expected_mhz: int
) -> None:
    gpu = FakeGpu(readings=chain([1.0, 2.0], repeat(2.0)))
    gpu.reasons, gpu.effective_mhz = reasons, repeat(read_mhz)
    changes: queue.Queue[CounterChange] = queue.Queue()
    poller = CounterPoller(gpu, changes.put, lambda error: pytest.fail(str(error)), interval_s=0.0001)
    change = changes.get(timeout=10)
    poller.close()
    assert change.sm_clock_mhz == expected_mhz
    assert change.read_at_s > change.time_s or not expected_mhz


def test_an_error_ends_the_polling_and_is_reported() -> None:
    lost = GpuLostError("gone")
    gpu = FakeGpu(readings=chain([1.0, 2.0, lost], repeat(3.0)))
    changes: list[CounterChange] = []
    errors: queue.Queue[Exception] = queue.Queue()
    poller = CounterPoller(gpu, changes.append, errors.put, interval_s=0.0001)
    assert errors.get(timeout=10) is lost
    poller.close()
    assert [change.energy_j for change in changes] == [2.0]
    assert errors.empty()


def test_transient_errors_do_not_end_the_polling() -> None:
    busy = [GpuDriverError("unknown error"), GpuInUseError("busy")]
    gpu = FakeGpu(readings=chain([1.0, 2.0, *busy, 3.0, 4.0], repeat(4.0)))
    changes: queue.Queue[CounterChange] = queue.Queue()
    poller = CounterPoller(gpu, changes.put, lambda error: pytest.fail(str(error)), interval_s=0.0001)
    first, second = changes.get(timeout=10), changes.get(timeout=10)
    poller.close()
    assert (first.energy_j, second.energy_j) == (2.0, 4.0), "the time of the change to 3 is unknown"


def test_lasting_errors_are_reported_in_the_end() -> None:
    """Time advances by a second at every reading."""
    gpu = FakeGpu(readings=repeat(unknown := GpuDriverError("unknown error")))
    errors: queue.Queue[Exception] = queue.Queue()
    ticks = map(float, count())
    poller = CounterPoller(gpu, lambda _: None, errors.put, monotonic=lambda: next(ticks))
    assert errors.get(timeout=10) is unknown
    poller.close()


def test_a_counter_that_stands_still_is_reported() -> None:
    """Time advances by a second at every reading; each poll takes two."""
    gpu = FakeGpu(readings=chain([1.0, 2.0], repeat(2.0)))
    errors: queue.Queue[Exception] = queue.Queue()
    ticks = map(float, count())
    poller = CounterPoller(gpu, lambda _: None, errors.put, interval_s=0.0001, monotonic=lambda: next(ticks))
    error = errors.get(timeout=10)
    poller.close()
    assert isinstance(error, GpuUnsupportedError)
    assert "GPU-fake: energy counter: expected it to move within 10 s, found it at 2 J" in str(error)
    assert 12.0 < next(ticks) < 20.0


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

    changes: queue.Queue[CounterChange | Exception] = queue.Queue()
    poller = CounterPoller(
        FakeGpu(readings()), changes.put, changes.put, interval_s=0.0001, monotonic=lambda: now_s
    )
    taken = [changes.get(timeout=10) for _ in range(3)]
    poller.close()
    assert [each.energy_j for each in taken if isinstance(each, CounterChange)] == [2.0, 3.0, 4.0]


def test_a_bug_is_reported_too() -> None:
    gpu = FakeGpu(readings=iter(()))
    errors: queue.Queue[Exception] = queue.Queue()
    poller = CounterPoller(gpu, lambda _: None, errors.put)
    assert isinstance(errors.get(timeout=10), StopIteration)
    poller.close()


def test_an_unforeseen_error_in_the_limits_watch_does_not_affect_the_rank() -> None:
    class Odd(FakeGpu):
        def power_limit_w(self) -> float:
            raise ValueError("nobody has foreseen this")

    gpu = Odd(readings=chain([1.0, 2.0, 3.0], repeat(3.0)))
    changes: queue.Queue[CounterChange] = queue.Queue()
    failed: queue.Queue[tuple[str, Exception]] = queue.Queue()
    poller = CounterPoller(
        gpu,
        changes.put,
        lambda error: pytest.fail(str(error)),
        LimitsWatch(gpu, GpuLimits(), lambda _: None),
        lambda part, error: failed.put((part, error)),
        interval_s=0.0001,
    )
    assert [changes.get(timeout=10).energy_j for _ in range(2)] == [2.0, 3.0]
    part, error = failed.get(timeout=10)
    assert (part, type(error)) == ("limits watch", ValueError)
    poller.close()
