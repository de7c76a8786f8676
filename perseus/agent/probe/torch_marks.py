"""Connect a rank of a framework that runs on torch: marks at the host's times, under CUDA at the device's."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from perseus.agent.probe.attachment import Connect, Marks
from perseus.agent.probe.client import Probe
from perseus.agent.probe.device_marks import DeviceEvent, DeviceMarks
from perseus.agent.probe.placement import Placement

if TYPE_CHECKING:
    import torch


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
        return DeviceMarks(marks, _recorder(device))
    return marks


def _recorder(device: "torch.device") -> Callable[[], DeviceEvent]:
    from torch import cuda

    def record() -> DeviceEvent:
        event: DeviceEvent = cuda.Event(enable_timing=True)
        event.record(cuda.current_stream(device))  # type: ignore[attr-defined]
        return event

    return record
