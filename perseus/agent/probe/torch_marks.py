"""Connect a rank of a torch-based framework: marks at host time, under CUDA at device time."""

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
    """Return a rank's marks, made by `connect`; ValueError for an invalid job or place."""
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
        """Return whether the device's current stream is being captured."""
        if self._cuda.current_device() == self._index:
            return bool(self._cuda.is_current_stream_capturing())
        with self._cuda.device(self._index):
            return bool(self._cuda.is_current_stream_capturing())

    def make_event(self) -> DeviceEvent:
        """Return an event with timing."""
        event: DeviceEvent = self._cuda.Event(enable_timing=True)
        return event

    def record(self, event: Any, /) -> None:
        """Record an event on the device's current stream."""
        event.record(self._cuda.current_stream(self._index))

    def enter_helper(self) -> None:
        """Allow this thread to query events at any time.

        A thread without a device set uses GPU 0, where its first call would create a context. And while any
        thread captures a graph in the default, global mode, an event query by any other thread fails and
        spoils the capture, unless that thread's own mode is relaxed. Raises RuntimeError if the mode can't be
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
