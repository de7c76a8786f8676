"""An agent in this process on GPUs with injected faults."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perseus.agent.gpu import Gpu, GpuUse
from perseus.agent.sidecar.backends import EmulatedBackend

Fault = Exception | list[Exception] | threading.Event


class Faults:
    """Injected faults of a GPU: for each method an error to raise, some, or an event to wait for first."""

    def __init__(self) -> None:
        self.by_method: dict[str, Fault] = {}

    @contextmanager
    def during(self, **faults: Fault) -> Iterator[None]:
        """Let these methods fail or hang within the block."""
        self.by_method.update(faults)
        try:
            yield
        finally:
            for name in faults:
                self.by_method.pop(name, None)

    def meet(self, method: str) -> None:
        """Apply a method's fault, if any, before its call."""
        match self.by_method.get(method):
            case threading.Event() as event:
                event.wait()
            case Exception() as error:
                raise error
            case list() as errors if errors:
                raise errors.pop(0)


class FailingGpu:
    """A proxy of an emulated GPU that applies faults."""

    def __init__(self, gpu: Gpu, faults: Faults) -> None:
        self._gpu = gpu
        self._faults = faults

    def __getattr__(self, name: str) -> object:
        self._faults.meet(name)
        return getattr(self._gpu, name)


class FailingBackend(EmulatedBackend):
    """Emulated GPUs; `faults` has the faults of each, by UUID."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.faults: dict[str, Faults] = {}

    def faults_of(self, uuid: str) -> Faults:
        """Return the faults of one GPU."""
        return self.faults.setdefault(uuid, Faults())

    def open(self, uuid: str) -> Gpu:
        faults = self.faults_of(uuid)
        faults.meet("open")
        return FailingGpu(super().open(uuid), faults)  # type: ignore[return-value] # by __getattr__

    def inspect(self, uuid: str) -> GpuUse:
        self.faults_of(uuid).meet("inspect")
        return super().inspect(uuid)
