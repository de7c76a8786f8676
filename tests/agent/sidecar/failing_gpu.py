"""An agent in this process on GPUs that fail as the test says."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perseus.agent.gpu import Gpu, GpuUse
from perseus.agent.sidecar.backends import EmulatedBackend


class Faults:
    """What a GPU answers instead: for each method the error to raise, or the event to wait for first."""

    def __init__(self) -> None:
        self.by_method: dict[str, Exception | threading.Event] = {}

    @contextmanager
    def during(self, **faults: Exception | threading.Event) -> Iterator[None]:
        """While these methods fail, or hang."""
        self.by_method.update(faults)
        try:
            yield
        finally:
            for name in faults:
                self.by_method.pop(name, None)

    def meet(self, method: str) -> None:
        """To be called before the method does what it does."""
        match self.by_method.get(method):
            case threading.Event() as event:
                event.wait()
            case Exception() as error:
                raise error


class FailingGpu:
    """A GPU between the agent and an emulated one."""

    def __init__(self, gpu: Gpu, faults: Faults) -> None:
        self._gpu = gpu
        self._faults = faults

    def __getattr__(self, name: str) -> object:
        self._faults.meet(name)
        return getattr(self._gpu, name)


class FailingBackend(EmulatedBackend):
    """Emulated GPUs; of each that is opened by the agent, the faults are in `faults`, by UUID."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.faults: dict[str, Faults] = {}

    def faults_of(self, uuid: str) -> Faults:
        """Of one GPU."""
        return self.faults.setdefault(uuid, Faults())

    def open(self, uuid: str) -> Gpu:
        faults = self.faults_of(uuid)
        faults.meet("open")
        return FailingGpu(super().open(uuid), faults)  # type: ignore[return-value] # by __getattr__

    def inspect(self, uuid: str) -> GpuUse:
        self.faults_of(uuid).meet("inspect")
        return super().inspect(uuid)
