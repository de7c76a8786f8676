"""How long a clock is held: as long as its noise deserves among the others'. Pure.

What holding for one more iteration gains is least where a clock is known well already. The squared errors
of all clocks add up to the least, for the same number of iterations in all, where each clock is held for as
many as its noise, the error of a single iteration, is to the others' (Neyman's allocation): twice as noisy,
twice as long, and not four times, which would make all equally sure and be no better than holding all for as
long. So `iterations`, what is asked for, is what a clock gets that is as noisy as those before it.

Three things bound that. What is known much better than profiling has to be is held no longer. What surely
lies above the hull of the clocks measured before will be in no plan: its errors don't count. And a noisy
clock gets so many times its share at the most.

Errors come from few values at first: none is believed before the second iteration. An error that was not told
(0) leaves it at what was asked for.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perseus.service.domain.measured import StageKey, StageProfile
from perseus.service.job.profiling.hull import effective_point, height_j, lower_hull
from perseus.service.job.profiling.stage_profiles import blocking_power_w, curves
from perseus.solver import Kind, Measurement, Schedule

MIN_ITERATIONS = 2
"""Iterations before standard errors are believed."""

MAX_HOLD_FACTOR = 4
"""How many times the iterations asked for a noisy clock is held at most: long before it is given up."""

_NEGLIGIBLE_SHARE = 0.25
"""An error of this share of the accuracy is added to it as good as unseen: 3 % of it, in squares."""

_SURE_ERRORS = 2.0
"""Standard errors by which a clock lies above the hull, to be surely of no use."""


@dataclass(frozen=True, slots=True)
class RoundError:
    """What an iteration's energy may be mistaken by under the clocks of a round, and that energy.

    `error_j` is None where an error was not told.
    """

    error_j: float | None
    energy_j: float


class SampleAllocation:
    """Spreads iterations over the clocks of a job."""

    def __init__(self, iterations: int, accuracy: float) -> None:
        """`iterations`: at a clock as noisy as others; `accuracy`: by what share energy may be off."""
        self._iterations = iterations
        self._accuracy = accuracy
        # The noise of each round that has ended: joules, of a single iteration.
        self._noises_j: list[float] = []

    @property
    def min_iterations(self) -> int:
        """No clock is held for fewer."""
        return min(MIN_ITERATIONS, self._iterations)

    def is_enough(self, iteration_count: int, found: RoundError) -> bool:
        """Tell whether a round is sure enough after so many iterations."""
        if found.error_j is None:
            return iteration_count >= self._iterations
        if iteration_count >= MAX_HOLD_FACTOR * self._iterations:
            return True
        if found.error_j <= _NEGLIGIBLE_SHARE * self._accuracy * found.energy_j:
            return True
        if not self._noises_j:
            return iteration_count >= self._iterations
        usual_j = math.fsum(self._noises_j) / len(self._noises_j)
        return iteration_count * usual_j >= self._iterations * found.error_j * math.sqrt(iteration_count)

    def take_round(self, iteration_count: int, found: RoundError) -> None:
        """Remember how noisy a round was. One that showed no error, or none that counts, tells nothing."""
        if found.error_j:
            self._noises_j.append(found.error_j * math.sqrt(iteration_count))

    def restart(self) -> None:
        """What was measured is of no use any more."""
        self._noises_j.clear()


def round_error(
    found: Iterable[StageProfile], measured: Sequence[StageProfile], schedule: Schedule
) -> RoundError:
    """Return the error of what a round has found so far, beside what was measured before."""
    found = tuple(found)
    powers_w = blocking_power_w([*measured, *found], schedule.stage_count)
    errors_j: list[float] = []
    energies_j: list[float] = []
    has_errors = True
    for profile in found:
        before = curves(measured, profile.stage)
        power_w = powers_w[profile.stage]
        counts: Counter[StageKey] = Counter(
            (c.chunk, c.kind) for c in schedule.orders[profile.stage] if c.kind is not Kind.FIXED
        )
        for key, count in counts.items():
            m = profile.measurements[key]
            energies_j.append(count * m.energy_j)
            has_errors = has_errors and m.energy_se_j > 0 and m.time_se_s > 0
            if not _is_surely_useless(m, before.get(key, []), power_w):
                errors_j.append(count * _error_j(m))
    return RoundError(math.hypot(*errors_j) if has_errors else None, math.fsum(energies_j))


def _error_j(m: Measurement) -> float:
    """The error of an energy, with what an error in time is worth."""
    return math.hypot(m.energy_se_j, m.energy_j / m.time_s * m.time_se_s)


def _is_surely_useless(m: Measurement, others: Iterable[Measurement], power_w: float) -> bool:
    """Tell whether a clock's point is above the hull of the others, whatever errors can do."""
    hull = lower_hull([effective_point(other, power_w) for other in others])
    if not hull or m.time_s - _SURE_ERRORS * m.time_se_s <= hull[0].time_s:
        return False
    point = effective_point(m, power_w)
    error_j = math.hypot(_error_j(m), max(other.error_j for other in hull))
    return point.energy_j - height_j(hull, point.time_s) > _SURE_ERRORS * error_j
