"""Connect a rank of a framework that runs on torch: marks at the host's times, under CUDA at the device's."""

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from perseus.agent.probe.client import Probe
from perseus.agent.probe.device_marks import DeviceEvent, DeviceMarks
from perseus.agent.probe.marks import Connect, Marks
from perseus.agent.probe.placement import Placement

if TYPE_CHECKING:
    import torch

_DRIVER = "libcuda.so.1"
_CAPTURE_MODE_RELAXED = 2  # of CUstreamCaptureMode


def connect_marks(connect: Connect, job_id: str, placement: Placement, device: "torch.device") -> Marks:
    """What a rank's marks go to, made by `connect`. ValueError for a job or a place that can not be."""
    marks = connect(
        job_id=job_id,
        pipeline=placement.pipeline,
        stage=placement.stage,
        tensor=placement.tensor,
        gpu_uuid=placement.gpu_uuid,
    )
    if isinstance(marks, Probe) and device.type == "cuda":
        return DeviceMarks(marks, _cuda_events(device))
    return marks


def _cuda_events(device: "torch.device") -> "CudaEvents":
    from torch import cuda

    return CudaEvents(cuda, cuda.current_device() if device.index is None else device.index)


class CudaEvents:
    """Events on the current stream of a device (implements `EventSource`).

    `cuda` is the module `torch.cuda`; `load` loads the driver's library.
    """

    def __init__(self, cuda: Any, index: int, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._cuda = cuda
        self._index = index
        self._load = load

    def is_capturing(self) -> bool:
        """Whether the device's current stream is being captured."""
        if self._cuda.current_device() == self._index:
            return bool(self._cuda.is_current_stream_capturing())
        with self._cuda.device(self._index):
            return bool(self._cuda.is_current_stream_capturing())

    def make_event(self) -> DeviceEvent:
        """An event that has a time."""
        event: DeviceEvent = self._cuda.Event(enable_timing=True)
        return event

    def record(self, event: Any, /) -> None:
        """Record it on the device's current stream."""
        event.record(self._cuda.current_stream(self._index))

    def enter_helper(self) -> None:
        """Make this thread one that may query events at any time.

        A thread without a device of its own has GPU 0, where its first call would make a context. And while
        any thread captures a graph in the default, global mode, a query of any event by any other thread
        fails and spoils the capture, but by those whose own mode is relaxed. RuntimeError where it can't be
        set.
        """
        self._cuda.set_device(self._index)
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        try:
            status = self._load(_DRIVER).cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        except (OSError, AttributeError) as error:
            raise RuntimeError(
                f"{_DRIVER}: expected cuThreadExchangeStreamCaptureMode, found {error}"
            ) from error
        if status != 0:
            raise RuntimeError(
                f"cuThreadExchangeStreamCaptureMode: expected CUDA_SUCCESS, found error {status}"
            )
