"""What others set that bounds a GPU, power limit and workload power profiles: read, never set."""

from collections.abc import Callable

import structlog

from perseus.agent.gpu import Gpu, GpuError
from perseus.agent.rank.messages import GpuLimits

_log = structlog.get_logger(__name__)

LOOK_INTERVAL_S = 2.0


def read_limits(gpu: Gpu) -> GpuLimits:
    """Ask a GPU; `GpuError` if it fails."""
    return GpuLimits(gpu.power_limit_w(), gpu.power_profiles())


class LimitsWatch:
    """Looks at one GPU's limits every `LOOK_INTERVAL_S`, on whatever thread calls `look`.

    `on_change` hears of them when they are others than before, on that thread. Where they can't be read, they
    stay as they were: who polls the GPU's counter will meet the same error.
    """

    def __init__(self, gpu: Gpu, known: GpuLimits, on_change: Callable[[GpuLimits], None]) -> None:
        self._gpu = gpu
        self._known = known
        self._on_change = on_change
        self._next_s = 0.0
        self._told_failure = ""

    def look(self, now_s: float) -> None:
        """Look, if it is time to."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + LOOK_INTERVAL_S
        try:
            limits = read_limits(self._gpu)
        except GpuError as error:
            if str(error) != self._told_failure:
                self._told_failure = str(error)
                _log.warning("power limit not read", gpu=self._gpu.uuid, reason=str(error))
            return
        if limits != self._known:
            self._known = limits
            self._on_change(limits)
