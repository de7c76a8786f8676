"""What GPUs draw in the mean, from their energy counters: between when each moved last, now and before. Pure.

A counter moves every 20–100 ms only. Over the time between two moves the energy between them is exact, so no
joule is lost or told twice; over exactly a second it would be wrong by up to a tenth.
"""

from collections.abc import Mapping


class MeanPower:
    """The counters of some GPUs, each as it was when its power was told last."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}

    def take(self, counters: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Take when each counter moved last (s) and to what (J); return mean powers since the last time.

        A GPU that is new, whose counter has not moved, or has begun anew, is left out.
        """
        powers_w = {}
        for gpu_uuid, (moved_s, energy_j) in counters.items():
            before_s, before_j = self._last.get(gpu_uuid, (moved_s, energy_j))
            if moved_s > before_s and energy_j >= before_j:
                powers_w[gpu_uuid] = (energy_j - before_j) / (moved_s - before_s)
        self._last = dict(counters)
        return powers_w
