"""What GPUs draw while they wait, by the clock that they hold meanwhile.

The agents' rule (`perseus.agent.clocks.keeper`): before its first computation a GPU holds the clock of that.
Between two computations it holds the lower one of their clocks, since it lowers when the first ends and
raises just before the second begins. After its last computation, until the next iteration, it is at stock:
nothing is planned there, so nothing may be slowed. FIXED computations count as waits. The latency of these
changes is left out; `latency` has it.

A search knows no waits, as they depend on all computations: it takes the least blocking power for all clocks.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from perseus.solver.pipeline import Pipeline

FloatArray = NDArray[np.float64]


class BlockingPower:
    """One stage's blocking power, linear between the known clocks and constant beyond them."""

    def __init__(self, by_clock: Mapping[int, float]) -> None:
        self._clocks_mhz, self._powers_w = map(list, zip(*sorted(by_clock.items()), strict=True))

    def at_w(self, clock_mhz: int) -> float:
        """Return the power at a clock."""
        return float(np.interp(clock_mhz, self._clocks_mhz, self._powers_w))

    def at_each_w(self, clocks_mhz: NDArray[np.int32]) -> FloatArray:
        """Return the power at each of the clocks."""
        found: FloatArray = np.interp(clocks_mhz, self._clocks_mhz, self._powers_w)
        return found


def blocking_of_stages(
    power_w: float | Mapping[int, float], gpus_per_stage: int, stage_count: int
) -> tuple[tuple[float, ...], tuple[Mapping[int, float], ...]]:
    """Return a `Pipeline`'s `blocking_power_w` and `blocking_powers_w` from what each of its GPUs draws.

    That is one value for all clocks, or one by clock in MHz, at least one.
    """
    if not isinstance(power_w, Mapping):
        return (power_w * gpus_per_stage,) * stage_count, ()
    by_clock = {mhz: power_w[mhz] * gpus_per_stage for mhz in sorted(power_w)}
    return (min(by_clock.values()),) * stage_count, (by_clock,) * stage_count


def below_stock_j(
    pipeline: Pipeline,
    stage: int,
    clocks_mhz: NDArray[np.int32],
    starts_s: FloatArray,
    durations_s: FloatArray,
) -> FloatArray:
    """Return how much less a stage draws in its waits up to its last computation than if it held stock.

    The last three arguments have one row per plan, and a column per computation of the stage, in order.
    """
    if not pipeline.blocking_powers_w or not starts_s.shape[1]:
        return np.zeros(len(starts_s))
    ends_s = np.zeros_like(starts_s)
    ends_s[:, 1:] = (starts_s + durations_s)[:, :-1]
    held_mhz = clocks_mhz.copy()
    held_mhz[:, 1:] = np.minimum(clocks_mhz[:, 1:], clocks_mhz[:, :-1])
    powers_w = BlockingPower(pipeline.blocking_powers_w[stage]).at_each_w(held_mhz)
    saved_w = pipeline.stock_blocking_power_w[stage] - powers_w
    saved_j: FloatArray = (saved_w * (starts_s - ends_s)).sum(axis=1)
    return saved_j


def below_searched_j(
    pipeline: Pipeline,
    stage: int,
    clocks_mhz: NDArray[np.int32],
    starts_s: FloatArray,
    durations_s: FloatArray,
) -> FloatArray:
    """Return how much lower a stage's effective energy is than in the search; arguments as above.

    A search takes ``blocking_power_w`` for waiting, plans the blocking power at stock less what lower clocks
    save.
    """
    if not pipeline.blocking_powers_w:
        return np.zeros(len(starts_s))
    more_w = pipeline.stock_blocking_power_w[stage] - pipeline.blocking_power_w[stage]
    busy_s: FloatArray = durations_s.sum(axis=1)
    return more_w * busy_s + below_stock_j(pipeline, stage, clocks_mhz, starts_s, durations_s)
