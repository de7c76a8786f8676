"""Which GPUs this node has for trainers: said at the start, and to whoever asks whether the agent is well.

An agent without a driver or without GPUs runs all the same: the driver may come later, and trainers are told
what is wrong with theirs. But whoever looks is to see it before the first trainer does.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from perseus.agent.gpu import GpuError
from perseus.agent.gpu.lanes import ALL_GPUS, Lanes
from perseus.agent.sidecar.backends import Backend

_log = structlog.get_logger(__name__)

_KEPT_S = 2.0


@dataclass(frozen=True, slots=True)
class Found:
    """How many GPUs there are, and what is wrong: with all of them, or with some."""

    gpu_count: int
    problems: tuple[str, ...] = ()


class Inventory:
    """Looks at a backend's GPUs, in a lane of its own: a driver that hangs keeps nobody else waiting."""

    def __init__(self, gpus: Backend, lanes: Lanes, clock: Callable[[], float] = time.monotonic) -> None:
        self._gpus = gpus
        self._lanes = lanes
        self._clock = clock
        self._found = Found(0)
        self._found_s = float("-inf")

    async def look(self) -> Found:
        """What is found now; who asks often is told the same for a moment."""
        if self._clock() >= self._found_s + _KEPT_S:
            self._found, self._found_s = await self._look(), self._clock()
        return self._found

    async def tell(self) -> None:
        """Say in the log what is found."""
        found = await self.look()
        for problem in found.problems:
            _log.error("no GPU can be served" if not found.gpu_count else "GPU lost", reason=problem)
        if found.gpu_count:
            _log.info("GPUs found", count=found.gpu_count)

    async def _look(self) -> Found:
        try:
            listed = await self._lanes.run(ALL_GPUS, self._gpus.listed)
        except GpuError as error:
            return Found(0, (str(error),))
        problems = [str(each) for each in listed if isinstance(each, GpuError)]
        if not listed:
            problems = ["this node has no GPU, or none that the agent may see (CUDA_VISIBLE_DEVICES)"]
        return Found(sum(isinstance(each, str) for each in listed), tuple(problems))
