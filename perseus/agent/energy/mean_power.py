"""Mean power of GPUs from their energy counters, between the latest moves now and at the previous reading.
Pure.

A counter moves only every 20–100 ms. The energy between two of its moves is exact, so no joule is lost or
reported twice; over exactly a second it would be wrong by up to a tenth.
"""

from collections.abc import Mapping


class MeanPower:
    """Counters of some GPUs, as of the last report of each one's power."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}

    def take(self, counters: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Return mean powers (W) since the last call, given the time (s) and value (J) of each counter's last
        move.

        A GPU is left out if it is new, or its counter has not moved or was reset.
        """
        powers_w = {}
        for gpu_uuid, (moved_s, energy_j) in counters.items():
            before_s, before_j = self._last.get(gpu_uuid, (moved_s, energy_j))
            if moved_s > before_s and energy_j > before_j:
                powers_w[gpu_uuid] = (energy_j - before_j) / (moved_s - before_s)
        self._last = dict(counters)
        return powers_w
