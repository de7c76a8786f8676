"""The thread that sets a GPU's clock: which clocks it sets, in which order, and what it reports of them."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain, count, pairwise, repeat
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.agent.gpu import GpuDriverError, GpuLostError, GpuPermissionError
from perseus.agent.sidecar import clock_worker
from perseus.agent.sidecar.clock_worker import STOCK, ClockResult, ClockWorker
from tests.agent.fake_gpu import FakeGpu

UNKNOWN = GpuDriverError("unknown error")


class Results(queue.Queue[ClockResult]):
    """What a worker reports."""

    def take(self, count: int) -> list[ClockResult]:
        """Wait for the next results."""
        return [self.get(timeout=60) for _ in range(count)]

    @property
    def all(self) -> list[ClockResult]:
        """Those that nobody has taken, once the worker is closed."""
        return list(self.queue)


def ticking(step_s: float = 0.001) -> Callable[[], float]:
    """A time that advances at every reading."""
    ticks = count()
    return lambda: next(ticks) * step_s


def started(gpu: FakeGpu, monotonic: Callable[[], float] | None = None) -> tuple[ClockWorker, Results]:
    results = Results()
    return ClockWorker(gpu, results.put, monotonic=monotonic or ticking()), results


def instant_gpu() -> FakeGpu:
    """A GPU whose effective clock can't be read, so that nothing waits for it."""
    gpu = FakeGpu()
    gpu.effective_mhz = repeat(GpuLostError("gone"))
    return gpu


class Clock:
    """A time that passes when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._seen_s = 0.0

    def __call__(self) -> float:
        if threading.current_thread() is not threading.main_thread():
            self._seen_s = self.now_s
        return self.now_s

    def advance(self, now_s: float) -> None:
        """Wait until the worker has seen this time."""
        self.now_s = now_s
        while self._seen_s < now_s:
            time.sleep(0.001)


@pytest.mark.parametrize(
    ("effective_mhz", "least_s", "most_s"),
    [
        pytest.param(
            chain([1400] * 5, repeat(1200)), 0.006, 0.050, id="when the effective clock has changed"
        ),
        pytest.param(repeat(1000), 0.0, 0.002, id="when the call returned, if it never does"),
        pytest.param(repeat(GpuLostError("gone")), 0.0, 0.002, id="and if it can't be read"),
    ],
)
def test_a_set_is_in_force(
    effective_mhz: Iterator[int | GpuLostError], least_s: float, most_s: float
) -> None:
    """In the time of the worker's own readings."""
    gpu = FakeGpu()
    gpu.effective_mhz = effective_mhz
    worker, results = started(gpu)
    worker.request(1200)
    (result,) = results.take(1)
    worker.close()
    assert gpu.sets == [1200]
    assert (result.target_mhz, result.due_s, result.error) == (1200, 0.0, None)
    assert 0.0 < result.begun_at_s < result.in_force_at_s
    assert least_s <= result.in_force_at_s - result.begun_at_s <= most_s


def test_a_clock_is_set_again_although_it_was_set_unless_another_is_scheduled_or_it_is_stock() -> None:
    gpu = FakeGpu()
    gpu.effective_mhz = repeat(1200)
    worker, results = started(gpu, Clock())
    worker.request(1200)
    results.take(1)
    worker.set_again()
    results.take(1)
    worker.schedule(1000, 1000.0)
    worker.set_again()
    worker.close()
    worker.set_again()
    assert gpu.sets == [1200, 1200]
    worker, results = started(gpu, Clock())
    worker.request(STOCK)
    results.take(1)
    worker.set_again()
    worker.close()
    assert gpu.sets == [1200, 1200, None]


def test_a_scheduled_clock_is_set_when_it_is_due_unless_another_takes_its_place() -> None:
    gpu, clock = instant_gpu(), Clock()
    worker, results = started(gpu, clock)
    worker.schedule(1400, 0.05)
    worker.request(1000)
    worker.schedule(1200, 0.05)
    assert [result.target_mhz for result in results.take(1)] == [1000]
    clock.now_s = 0.05
    assert [result.target_mhz for result in results.take(1)] == [1200]
    worker.schedule(1400, 0.1)
    worker.request(1000)
    assert [result.target_mhz for result in results.take(1)] == [1000]
    clock.now_s = 0.1
    worker.request(1000)  # wakes the thread
    worker.close()
    assert gpu.sets == [1000, 1200, 1000]


@pytest.mark.parametrize(
    ("requested", "scheduled", "sets"),
    [
        pytest.param([1200, STOCK, 1000, 1400], (), [1000, 1400], id="only the newest is set"),
        pytest.param([1200, 1000], (), [1000], id="the one in force is not set again"),
        pytest.param([1200], (1400,), [1000, 1400], id="one that was scheduled and is due counts as newer"),
    ],
)
def test_what_is_requested_during_a_set_never_waits(
    requested: list[int | None], scheduled: tuple[int, ...], sets: list[int | None]
) -> None:
    gpu = FakeGpu()
    gpu.permit.clear()
    worker, results = started(gpu)
    worker.request(1000)
    assert gpu.begun.acquire(timeout=60)  # it is in progress and can't end
    for target_mhz in requested:
        worker.request(target_mhz)
    for target_mhz in scheduled:
        worker.schedule(target_mhz, 0.0)
    gpu.permit.set()
    worker.close()
    done = results.all
    assert gpu.sets == [result.target_mhz for result in done] == sets
    assert all(each.due_s < each.begun_at_s for each in done)
    assert scheduled or all(one.begun_at_s < later.due_s for one, later in pairwise(done))


def test_after_an_error_the_clock_in_force_is_unknown() -> None:
    gpu = FakeGpu()
    gpu.errors[1000] = error = GpuPermissionError("no")
    worker, results = started(gpu)
    taken = []
    for target_mhz in (1200, 1000, 1200):
        worker.request(target_mhz)
        taken += results.take(1)
    worker.close()
    assert [(result.target_mhz, result.error) for result in taken] == [
        (1200, None),
        (1000, error),
        (1200, None),
    ]
    assert gpu.sets == [1200, 1200]


def test_a_failing_listener_does_not_prevent_the_reset() -> None:
    gpu = FakeGpu()

    def on_result(_result: ClockResult) -> None:
        gpu.begun.release()
        raise RuntimeError("the event loop is closed")

    worker = ClockWorker(gpu, on_result)
    worker.request(1000)
    for _ in range(2):
        assert gpu.begun.acquire(timeout=60)
    worker.request(STOCK)
    worker.close()
    assert gpu.sets == [1000, STOCK]


def test_requests_after_close_are_refused() -> None:
    worker, _ = started(FakeGpu())
    worker.close()
    with pytest.raises(RuntimeError, match="GPU-fake: its clock worker is closed"):
        worker.request(1000)


class FailingGpu(FakeGpu):
    """A GPU whose first sets fail."""

    def __init__(self, error: Exception, times: int) -> None:
        super().__init__()
        self._error = error
        self.times = times

    def _set(self, target_mhz: int | None) -> None:
        if self.times:
            self.times -= 1
            raise self._error
        super()._set(target_mhz)


@pytest.mark.parametrize("target_mhz", [1200, STOCK])
def test_a_set_with_a_transient_error_is_retried(target_mhz: int | None) -> None:
    gpu = FailingGpu(UNKNOWN, 3)
    worker, results = started(gpu)
    worker.request(target_mhz)
    failed, done = results.take(2)
    worker.close()
    assert failed.is_tried_again, "reported once"
    assert (done.target_mhz, done.error) == (target_mhz, None)
    assert gpu.sets == [target_mhz]
    assert results.all == []


@pytest.mark.parametrize("resets_succeed", [False, True])
def test_a_set_that_keeps_failing_is_reported(resets_succeed: bool) -> None:
    """Time advances by 0.3 s at every reading."""
    gpu = FakeGpu()
    gpu.errors[1200] = UNKNOWN
    worker, results = started(gpu, ticking(0.3))
    targets: list[int | None] = [1200, STOCK] if resets_succeed else [1200]
    failures: list[ClockResult] = []
    for _ in range(1000):
        if failures and not failures[-1].is_tried_again:
            break
        for target_mhz in targets if resets_succeed or not failures else []:
            worker.request(target_mhz)
            assert gpu.begun.acquire(timeout=60)
        failures += [result for result in results.take(1) if result.error]
    worker.close()
    assert {result.error for result in failures} == {UNKNOWN}
    assert not failures[-1].is_tried_again
    assert resets_succeed or len(failures) == 2, "retries are reported once"


def test_a_failed_set_does_not_delay_the_next() -> None:
    worker, results = started(gpu := FailingGpu(UNKNOWN, 1), Clock())
    worker.request(1200)
    results.take(1)
    worker.request(STOCK)
    worker.close()
    assert gpu.sets == [STOCK]


@pytest.mark.parametrize("error", [GpuPermissionError("no"), GpuLostError("gone"), RuntimeError("a mistake")])
def test_a_reset_is_retried_forever_and_its_failure_reported_once(error: Exception) -> None:
    gpu = FailingGpu(error, 6)
    worker, results = started(gpu, time.monotonic)
    worker.request(STOCK)
    assert [result.error for result in results.take(2)] == [error, None]
    worker.close()
    assert gpu.sets == [STOCK]


def test_a_failing_reset_does_not_prevent_closing() -> None:
    worker, results = started(FailingGpu(GpuLostError("gone"), -1))
    worker.request(STOCK)
    worker.close()
    assert {type(result.error) for result in results.all} == {GpuLostError}


def test_a_set_in_progress_is_visible() -> None:
    gpu = instant_gpu()
    gpu.permit.clear()
    worker, _ = started(gpu, Clock())
    assert worker.under_way_s(5.0) == 0.0
    worker.request(1200)
    assert gpu.begun.acquire(timeout=60)
    assert worker.under_way_s(5.0) == 5.0
    gpu.permit.set()
    worker.close()
    assert worker.under_way_s(5.0) == 0.0


def test_without_a_sign_of_who_decides_the_gpu_goes_to_stock_and_returns_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock_worker, "LEASE_S", 0.05)
    gpu, clock = instant_gpu(), Clock()
    worker, results = started(gpu, clock)
    worker.request(1200)
    targets = [result.target_mhz for result in results.take(1)]
    worker.schedule(1400, 0.2)  # when nobody decides any more
    clock.advance(0.1)
    targets += [result.target_mhz for result in results.take(1)]
    clock.advance(0.2)
    for decide in (worker.renew, lambda: worker.request(1000)):
        decide()
        targets += [result.target_mhz for result in results.take(1)]
        clock.advance(clock.now_s + 0.1)
        targets += [result.target_mhz for result in results.take(1)]
    worker.close()
    assert gpu.sets == targets == [1200, STOCK, 1400, STOCK, 1000, STOCK]


def test_a_worker_that_was_never_asked_for_a_clock_sets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for ranks that are only observed."""
    monkeypatch.setattr(clock_worker, "LEASE_S", 0.0)
    worker, _ = started(gpu := FakeGpu())
    worker.renew()
    worker.close()
    assert not gpu.sets


def test_a_clock_is_kept_while_its_lease_is_renewed() -> None:
    """The lease is five thousand readings of the time."""
    worker, results = started(FakeGpu())
    worker.request(1200)
    for _ in range(10_000):
        worker.renew()
    worker.close()
    assert [result.target_mhz for result in results.all] == [1200]


@given(targets=st.lists(st.sampled_from([1000, 1200, 1400, STOCK]), min_size=1, max_size=30))
def test_the_last_request_is_in_force_in_the_end(targets: list[int | None]) -> None:
    worker, results = started(gpu := FakeGpu())
    for target_mhz in targets:
        worker.request(target_mhz)
    worker.close()
    assert gpu.sets[-1] == targets[-1]
    assert all(left != right for left, right in zip(gpu.sets, gpu.sets[1:], strict=False))
    assert [result.target_mhz for result in results.all] == gpu.sets
    wanted = iter(targets)  # the set clocks are a subsequence of the requested ones
    assert all(target_mhz in cast("list[int | None]", wanted) for target_mhz in gpu.sets)
