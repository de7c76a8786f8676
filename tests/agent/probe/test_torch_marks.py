"""Events of torch, with a stand-in for `torch.cuda` and the driver; `make test-gpu` uses real ones."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from perseus.agent.probe.torch_marks import CudaEvents

RELAXED = 2


class Cuda:
    """Two GPUs. A thread's device is 0 until it sets another one, as in CUDA."""

    def __init__(self) -> None:
        self._threads = threading.local()
        self.capturing: set[int] = set()
        self.recorded: list[tuple[Any, str]] = []
        cuda = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: str) -> None:
                cuda.recorded.append((self, stream))

        self.Event = Event

    def current_device(self) -> int:
        device: int = getattr(self._threads, "device", 0)
        return device

    def set_device(self, index: int) -> None:
        self._threads.device = index

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before = self.current_device()
        self.set_device(index)
        yield
        self.set_device(before)

    def current_stream(self, index: int) -> str:
        return f"stream of {index}"

    def is_current_stream_capturing(self) -> bool:
        return self.current_device() in self.capturing


class Driver:
    """The driver's library; records which threads have relaxed their mode, and on which device."""

    def __init__(self, cuda: Cuda, status: int = 0) -> None:
        self.relaxed: list[tuple[int, int]] = []

        def exchange(mode: Any) -> int:
            assert ctypes.cast(mode, ctypes.POINTER(ctypes.c_int)).contents.value == RELAXED
            self.relaxed.append((threading.get_ident(), cuda.current_device()))
            return status

        self.cuThreadExchangeStreamCaptureMode = exchange


def test_the_ranks_stream_is_queried_on_any_current_device() -> None:
    cuda = Cuda()
    events = CudaEvents(cuda, 1)
    cuda.capturing = {0}
    assert not events.is_capturing()
    cuda.capturing = {1}
    assert events.is_capturing()
    assert cuda.current_device() == 0
    cuda.set_device(1)
    assert events.is_capturing()


def test_events_are_recorded_on_the_devices_current_stream() -> None:
    cuda = Cuda()
    events = CudaEvents(cuda, 1)
    event = events.make_event()
    events.record(event)
    events.record(event)
    assert cuda.recorded == 2 * [(event, "stream of 1")]


def test_the_helper_first_selects_its_device_and_leaves_captures_alone() -> None:
    cuda = Cuda()
    driver = Driver(cuda)
    loaded: list[str] = []

    def load(name: str) -> Driver:
        loaded.append(name)
        return driver

    helper = threading.Thread(target=CudaEvents(cuda, 1, load).enter_helper)
    helper.start()
    helper.join()
    assert loaded == ["libcuda.so.1"]
    ((thread, device),) = driver.relaxed
    assert (thread, device) == (helper.ident, 1)
    assert cuda.current_device() == 0, "the trainer's thread keeps its own"


def absent(_name: str) -> Any:
    raise OSError("cannot open shared object file")


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (absent, "cannot open shared object file"),
        (lambda _name: SimpleNamespace(), "cuThreadExchangeStreamCaptureMode"),
        (lambda _name: Driver(Cuda(), status=201), "expected CUDA_SUCCESS, found error 201"),
    ],
)
def test_a_driver_without_the_function_is_an_error(load: Callable[[str], Any], reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        CudaEvents(Cuda(), 1, load).enter_helper()
