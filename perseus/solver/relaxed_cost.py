"""The cost of relaxed plans on given hulls, which may differ from those that they were made for."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from perseus.solver.graph import Int64Array
from perseus.solver.profile import Hull
from perseus.solver.scale import PS_PER_SCALED_S, UW_PER_W


class RelaxedCost:
    """All hulls in flat arrays; each one's times are offset beyond the previous one's slowest."""

    def __init__(self, hulls: Sequence[Hull], profile_of: Int64Array) -> None:
        """Store the hulls, and per computation the index of its hull."""
        keys: list[int] = []
        slopes_w: list[float] = []
        energies_j: list[float] = []
        offsets: list[int] = []
        for hull in hulls:
            offsets.append(keys[-1] + 1 if keys else 0)
            keys += [offsets[-1] + time_ps for time_ps in hull.times_ps]
            some_w = [slope_uw / UW_PER_W for slope_uw in hull.slopes_uw]
            pieces = zip(pairwise(hull.times_ps), some_w, strict=True)
            steps_j = [slope_w * (slow - fast) / PS_PER_SCALED_S for (fast, slow), slope_w in pieces]
            energies_j += [*accumulate(reversed(steps_j), initial=hull.slowest_effective_energy_j)][::-1]
            slopes_w += [0.0, *some_w]
        self._keys = np.array(keys, dtype=np.int64)
        self._slopes_w = np.array(slopes_w)
        self._energies_j = np.array(energies_j)
        self._offsets = np.array(offsets, dtype=np.int64)[profile_of]
        self._slowest_ps = np.array([hull.times_ps[-1] for hull in hulls], dtype=np.int64)[profile_of]

    def effective_energy_j(self, durations_ps: Int64Array) -> float:
        """Return the total effective energy; no duration may be shorter than its hull."""
        keys = np.minimum(durations_ps, self._slowest_ps) + self._offsets
        slower = self._keys.searchsorted(keys, "left")
        saved_s = (self._keys[slower] - keys) / PS_PER_SCALED_S
        return float((self._energies_j[slower] + self._slopes_w[slower] * saved_s).sum())
