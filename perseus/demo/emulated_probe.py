"""A probe whose rank computes on an emulated GPU: each marked computation takes as long as on that GPU.

This shows real plans at work in a training process on a CPU: the real computation runs, then the process
sleeps for the rest of the time that the emulated GPU takes at the clock in force. For tests and examples
only.
A framework's hook takes it as its `connect`, and needs no change:

    attach(schedule, job_id="tiny", connect=emulated_connect(gpu_file, works))
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perseus.agent.link.computation import Kind
from perseus.agent.link.packets import Saving
from perseus.agent.probe.client import Probe
from perseus.agent.probe.marks import Connect
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import Work

Works = Mapping[tuple[Kind, int], Work]
"""(kind, chunk) → work of such a computation on this rank; of each part, if it waits for other ranks."""


class EmulatedProbe:
    """A probe, and the emulated GPU that its rank computes on (implements `Marks`).

    Without an agent, the GPU does its work at stock.
    """

    def __init__(self, probe: Probe, gpu: EmulatedGpu, works: Works) -> None:
        self._probe = probe
        self._gpu = gpu
        self._works = works
        self._work: Work | None = None
        self.register = probe.register
        self.begin_iteration = probe.begin_iteration
        self.end_iteration = probe.end_iteration
        self.report_unmarked = probe.report_unmarked
        self.finish = probe.finish

    @property
    def saving(self) -> Saving | None:
        """As of the probe."""
        return self._probe.saving

    def begin_computation(self, kind: Kind, microbatch: int, chunk: int) -> None:
        """Begin the computation's work on the GPU. KeyError for a computation without work."""
        self._probe.begin_computation(kind, microbatch, chunk)
        self._work = self._works[kind, chunk]
        self._gpu.begin(self._work)

    def end_computation(self, kind: Kind, microbatch: int, chunk: int) -> None:
        """Wait for the GPU."""
        self._gpu.wait()
        self._probe.end_computation(kind, microbatch, chunk)

    def count_work(self, elements: int) -> None:
        """Add to the iteration's work; the GPU's own does not follow it."""
        self._probe.count_work(elements)

    def begin_wait(self) -> None:
        """Wait until the GPU has done the computation's work once."""
        self._gpu.wait()
        self._probe.begin_wait()

    def end_wait(self) -> None:
        """Begin the same work once more: a computation has one more part than it has waits."""
        self._probe.end_wait()
        if self._work is not None:
            self._gpu.begin(self._work)

    def close(self) -> None:
        """Close the connection, and release the GPU."""
        self._probe.close()
        self._gpu.close()


def emulated_connect(gpu_file: Path, works: Works) -> Connect:
    """Return a replacement for `Probe.connect` on a file's emulated GPU, whose UUID it sends to the agent."""

    def connect(**arguments: Any) -> EmulatedProbe:
        gpu = EmulatedGpu(gpu_file)
        return EmulatedProbe(Probe.connect(**{**arguments, "gpu_uuid": gpu.uuid}), gpu, works)

    return connect
