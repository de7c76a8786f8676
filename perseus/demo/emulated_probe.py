"""A probe whose rank computes on an emulated GPU: what it marks takes as long as that GPU says.

A training process on a CPU so shows real plans at work: the real computation runs, and the rest of the time
that the emulated GPU takes for it, at the clock in force, is slept. For tests and examples only; a
framework's hook takes it as its `connect` and knows nothing of it:

    attach(schedule, job_id="tiny", connect=emulated_connect(gpu_file, works))
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perseus.agent.link.computation import Kind
from perseus.agent.probe.client import Probe
from perseus.agent.probe.marks import Connect
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import Work

Works = Mapping[tuple[Kind, int], Work]
"""(kind, chunk) → the work of such a computation on this rank; of each part, where it waits for others."""


class EmulatedProbe:
    """A probe, and the emulated GPU that its rank computes on (implements `Marks`).

    Without an agent the GPU does its work all the same, at stock.
    """

    def __init__(self, probe: Probe, gpu: EmulatedGpu, works: Works) -> None:
        self._probe = probe
        self._gpu = gpu
        self._works = works
        self._work: Work | None = None
        self.register = probe.register
        self.begin_iteration = probe.begin_iteration
        self.end_iteration = probe.end_iteration
        self.finish = probe.finish

    def begin_computation(self, kind: Kind, microbatch: int, chunk: int) -> None:
        """Begin the computation's work on the GPU. KeyError for a computation that has none."""
        self._probe.begin_computation(kind, microbatch, chunk)
        self._work = self._works[kind, chunk]
        self._gpu.begin(self._work)

    def end_computation(self, kind: Kind, microbatch: int, chunk: int) -> None:
        """Wait for the GPU."""
        self._gpu.wait()
        self._probe.end_computation(kind, microbatch, chunk)

    def begin_wait(self) -> None:
        """Wait for the GPU: so far the computation has done its work, once."""
        self._gpu.wait()
        self._probe.begin_wait()

    def end_wait(self) -> None:
        """The rest of the computation is the same work once more: it has as many parts as waits, and one."""
        self._probe.end_wait()
        if self._work is not None:
            self._gpu.begin(self._work)

    def close(self) -> None:
        """Close the connection, and let go of the GPU."""
        self._probe.close()
        self._gpu.close()


def emulated_connect(gpu_file: Path, works: Works) -> Connect:
    """What stands for `Probe.connect` on the emulated GPU of a file, whose UUID it gives the agent."""

    def connect(**arguments: Any) -> EmulatedProbe:
        gpu = EmulatedGpu(gpu_file)
        return EmulatedProbe(Probe.connect(**{**arguments, "gpu_uuid": gpu.uuid}), gpu, works)

    return connect
