import contextlib
import queue
import time
from itertools import chain, count, repeat
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.agent.gpu import GpuDriverError, GpuLostError, GpuPermissionError
from perseus.agent.sidecar import clock_worker
from perseus.agent.sidecar.clock_worker import STOCK, ClockResult, ClockWorker
from tests.agent.fake_gpu import FakeGpu


def make_worker(gpu: FakeGpu) -> tuple[ClockWorker, list[ClockResult]]:
    """Return a worker whose time advances by a millisecond at every reading."""
    results: list[ClockResult] = []
    ticks = count()
    return ClockWorker(gpu, results.append, monotonic=lambda: next(ticks) / 1000), results


def test_a_set_is_reported_with_its_times() -> None:
    gpu = FakeGpu()
    worker, results = make_worker(gpu)
    worker.request(1200)
    worker.close()
    assert gpu.sets == [1200]
    (result,) = results
    assert (result.target_mhz, result.due_s, result.error) == (1200, 0.0, None)
    assert 0.0 < result.begun_at_s < result.in_force_at_s


def test_a_set_is_in_force_when_the_effective_clock_has_changed() -> None:
    gpu = FakeGpu()
    gpu.effective_mhz = chain([1400] * 5, repeat(1200))
    worker, results = make_worker(gpu)
    worker.request(1200)
    assert gpu.begun.acquire(timeout=10)
    while not results:
        time.sleep(0.001)
    worker.close()
    assert results[0].in_force_at_s - results[0].begun_at_s >= 0.006


@pytest.mark.parametrize("effective_mhz", [1000, GpuLostError("gone")])
def test_without_the_effective_clock_the_calls_return_counts(effective_mhz: int | GpuLostError) -> None:
    gpu = FakeGpu()
    gpu.effective_mhz = repeat(effective_mhz)
    worker, results = make_worker(gpu)
    worker.request(1200)
    while not results:
        time.sleep(0.001)
    worker.close()
    assert results[0].error is None
    assert results[0].in_force_at_s - results[0].begun_at_s < 0.003


def test_a_clock_is_set_again_although_it_was_set_unless_another_is_scheduled_or_it_is_stock() -> None:
    gpu = FakeGpu()
    gpu.effective_mhz = repeat(1200)
    results: queue.Queue[ClockResult] = queue.Queue()
    worker = ClockWorker(gpu, results.put)
    worker.request(1200)
    results.get(timeout=10)
    worker.set_again()
    results.get(timeout=10)
    worker.schedule(1000, time.monotonic() + 1000)
    worker.set_again()
    worker.close()
    worker.set_again()
    assert gpu.sets == [1200, 1200]
    worker = ClockWorker(gpu, results.put)
    worker.request(STOCK)
    results.get(timeout=10)
    worker.set_again()
    worker.close()
    assert gpu.sets == [1200, 1200, None]


def test_a_scheduled_clock_is_set_when_it_is_due() -> None:
    gpu = FakeGpu()
    results: queue.Queue[ClockResult] = queue.Queue()
    worker = ClockWorker(gpu, results.put)
    due_s = time.monotonic() + 0.05
    worker.schedule(1400, due_s)
    worker.request(1000)
    worker.schedule(1200, due_s)
    assert [results.get(timeout=10).target_mhz for _ in range(2)] == [1000, 1200]
    worker.close()


def test_a_request_replaces_the_scheduled_clock() -> None:
    gpu = FakeGpu()
    worker, _ = make_worker(gpu)
    worker.schedule(1200, 1e9)
    worker.request(1000)
    worker.close()
    assert gpu.sets == [1000]


def test_a_due_scheduled_clock_replaces_an_older_request() -> None:
    gpu = FakeGpu()
    gpu.permit.clear()
    worker, _ = make_worker(gpu)
    worker.request(1000)
    assert gpu.begun.acquire(timeout=10)
    worker.request(1200)
    worker.schedule(1400, 0.0)
    gpu.permit.set()
    worker.close()
    assert gpu.sets == [1000, 1400]


def test_only_the_newest_requested_clock_is_set_and_the_caller_never_waits() -> None:
    gpu = FakeGpu()
    gpu.permit.clear()
    worker, results = make_worker(gpu)
    worker.request(1000)
    assert gpu.begun.acquire(timeout=10)  # the first set is in progress and cannot end
    for target_mhz in (1200, STOCK, 1000, 1400):
        worker.request(target_mhz)
    gpu.permit.set()
    worker.close()
    assert gpu.sets == [1000, 1400]
    assert [result.target_mhz for result in results] == [1000, 1400]
    assert results[0].due_s < results[0].begun_at_s < results[1].due_s < results[1].begun_at_s


def test_a_clock_in_force_is_not_set_again() -> None:
    gpu = FakeGpu()
    gpu.permit.clear()
    worker, results = make_worker(gpu)
    worker.request(1000)
    assert gpu.begun.acquire(timeout=10)
    worker.request(1200)
    worker.request(1000)
    gpu.permit.set()
    worker.close()
    assert gpu.sets == [1000]
    assert len(results) == 1


def test_the_first_reset_is_never_redundant() -> None:
    gpu = FakeGpu()
    worker, results = make_worker(gpu)
    worker.request(STOCK)
    worker.close()
    assert gpu.sets == [STOCK]
    assert results[0].target_mhz is STOCK


def test_after_an_error_the_clock_in_force_is_unknown() -> None:
    gpu = FakeGpu()
    gpu.errors[1000] = error = GpuPermissionError("no")
    results: queue.Queue[ClockResult] = queue.Queue()
    worker = ClockWorker(gpu, results.put)
    seen = []
    for target_mhz in (1200, 1000, 1200):
        worker.request(target_mhz)
        seen.append(results.get(timeout=10))
    worker.close()
    assert [(result.target_mhz, result.error) for result in seen] == [
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
    assert gpu.begun.acquire(timeout=10)
    assert gpu.begun.acquire(timeout=10)
    worker.request(STOCK)
    worker.close()
    assert gpu.sets == [1000, STOCK]


def test_requests_after_close_are_refused() -> None:
    worker, _ = make_worker(FakeGpu())
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
    gpu = FailingGpu(GpuDriverError("unknown error"), 3)
    results: queue.Queue[ClockResult] = queue.Queue()
    worker = ClockWorker(gpu, results.put)
    worker.request(target_mhz)
    failed, done = results.get(timeout=10), results.get(timeout=10)
    worker.close()
    assert failed.is_tried_again, "reported once"
    assert (done.target_mhz, done.error) == (target_mhz, None)
    assert gpu.sets == [target_mhz]
    assert results.empty()


def test_a_set_that_keeps_failing_is_reported() -> None:
    """Time advances by 0.3 s at every reading."""
    ticks = count()
    gpu = FailingGpu(error := GpuDriverError("unknown error"), -1)
    results: queue.Queue[ClockResult] = queue.Queue()
    worker = ClockWorker(gpu, results.put, monotonic=lambda: next(ticks) * 0.3)
    worker.request(1200)
    first, last = results.get(timeout=10), results.get(timeout=10)
    assert first.error is last.error is error
    assert (first.is_tried_again, last.is_tried_again) == (True, False)
    worker.close()
    assert results.empty()


def test_a_set_that_keeps_failing_is_reported_although_resets_succeed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock_worker, "_GIVE_UP_S", 0.2)
    gpu = FakeGpu()
    gpu.errors[1200] = error = GpuDriverError("unknown error")
    results: queue.Queue[ClockResult] = queue.Queue()
    worker = ClockWorker(gpu, results.put)
    deadline_s = time.monotonic() + 10
    found: ClockResult | None = None
    while found is None and time.monotonic() < deadline_s:
        worker.request(1200)
        assert gpu.begun.acquire(timeout=10)
        worker.request(STOCK)
        with contextlib.suppress(queue.Empty):
            while found is None:
                result = results.get(timeout=0.05)
                found = result if result.error and not result.is_tried_again else None
    worker.close()
    assert found is not None
    assert found.error is error


def test_a_failed_set_does_not_delay_the_next() -> None:
    gpu = FailingGpu(GpuDriverError("unknown error"), 1)
    results: queue.Queue[ClockResult] = queue.Queue()
    worker = ClockWorker(gpu, results.put)
    worker.request(1200)
    while gpu.times:
        time.sleep(0.001)
    worker.request(STOCK)
    worker.close()
    assert gpu.sets[-1] is STOCK


@pytest.mark.parametrize("error", [GpuPermissionError("no"), GpuLostError("gone"), RuntimeError("a mistake")])
def test_a_reset_is_retried_forever_and_its_failure_reported_once(error: Exception) -> None:
    gpu = FailingGpu(error, 6)
    results: queue.Queue[ClockResult] = queue.Queue()
    worker = ClockWorker(gpu, results.put)
    worker.request(STOCK)
    assert results.get(timeout=10).error is error
    assert results.get(timeout=10).error is None
    worker.close()
    assert gpu.sets == [STOCK]


def test_a_failing_reset_does_not_prevent_closing() -> None:
    gpu = FailingGpu(GpuLostError("gone"), -1)
    worker, results = make_worker(gpu)
    worker.request(STOCK)
    worker.close()
    assert all(isinstance(result.error, GpuLostError) for result in results)
    assert results


def test_a_set_in_progress_is_visible() -> None:
    gpu = FakeGpu()
    gpu.permit.clear()
    worker = ClockWorker(gpu, lambda _: None)
    assert worker.under_way_s(time.monotonic() + 5) == 0.0
    worker.request(1200)
    assert gpu.begun.acquire(timeout=10)
    assert 5 < worker.under_way_s(time.monotonic() + 5) < 6
    gpu.permit.set()
    worker.close()
    assert worker.under_way_s(time.monotonic() + 5) == 0.0


def test_without_a_sign_of_who_decides_the_gpu_goes_to_stock_and_returns_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock_worker, "LEASE_S", 0.05)
    gpu = FakeGpu()
    results: queue.Queue[ClockResult] = queue.Queue()
    worker = ClockWorker(gpu, results.put)
    worker.request(1200)
    targets = [results.get(timeout=10).target_mhz]
    worker.schedule(1400, due_s := time.monotonic() + 0.2)  # when nobody decides any more
    targets.append(results.get(timeout=10).target_mhz)
    while time.monotonic() < due_s:
        time.sleep(0.001)
    for decide in (worker.renew, lambda: worker.request(1000)):
        while results.empty():  # a busy machine may delay the thread for a lease
            decide()
            time.sleep(0.001)
        targets += [results.get(timeout=10).target_mhz for _ in range(2)]
    worker.close()
    assert targets == [1200, STOCK, 1400, STOCK, 1000, STOCK]
    assert gpu.sets == targets


def test_a_worker_that_was_never_asked_for_a_clock_sets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for ranks that are only observed."""
    monkeypatch.setattr(clock_worker, "LEASE_S", 0.0)
    gpu = FakeGpu()
    worker, _ = make_worker(gpu)
    worker.renew()
    worker.close()
    assert not gpu.sets


def test_a_clock_is_kept_while_its_lease_is_renewed() -> None:
    gpu = FakeGpu()
    worker, results = make_worker(gpu)  # the lease is five thousand readings of the time
    worker.request(1200)
    for _ in range(10_000):
        worker.renew()
    worker.close()
    assert [result.target_mhz for result in results] == [1200]


@given(targets=st.lists(st.sampled_from([1000, 1200, 1400, STOCK]), min_size=1, max_size=30))
def test_the_last_request_is_in_force_in_the_end(targets: list[int | None]) -> None:
    gpu = FakeGpu()
    worker, results = make_worker(gpu)
    for target_mhz in targets:
        worker.request(target_mhz)
    worker.close()
    assert gpu.sets[-1] == targets[-1]
    assert all(left != right for left, right in zip(gpu.sets, gpu.sets[1:], strict=False))
    assert [result.target_mhz for result in results] == gpu.sets
    wanted = iter(targets)  # the set clocks are a subsequence of the requested ones
    assert all(target_mhz in cast("list[int | None]", wanted) for target_mhz in gpu.sets)
