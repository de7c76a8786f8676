"""How long each clock is held, given its noise and the noise of the others. Pure.

Another iteration improves a well-known clock the least. For a given total of iterations, the sum of the
squared errors of all clocks is smallest if each clock is held in proportion to its noise, the error of a
single iteration (Neyman's allocation): twice as noisy, twice as long. Four times as long would make all
clocks equally accurate and be no better than holding all equally long. So a clock that is as noisy as those
before it is held for the configured `iterations`.

Three things bound that, once all times are known well enough to plan with. A clock that is already much more
accurate than profiling requires is not held any longer. A clock that surely lies above the hull of the clocks
measured before will be in no plan, so its errors don't count. And a noisy clock gets a fixed multiple of its
share at most.

Energy counters need time, not iterations: their windows take up to 100 ms each. So a short iteration counts
as a part of one (`effective_count`), in all counts here.

The first errors are estimated from few values: none is believed before the second iteration. If an error was
not reported (0), the clock is held for the configured iterations.
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
"""Multiple of `iterations` for which a noisy clock is held at most: well before it is given up."""

_WHOLE_ITERATION_S = 0.5
"""Time of an iteration that counts as a whole one."""

_NEGLIGIBLE_SHARE = 0.25
"""An error below this share of the accuracy is negligible: it adds 3 % to it, in squares."""

_SURE_ERRORS = 2.0
"""Standard errors above the hull from which on a clock is surely useless."""


@dataclass(frozen=True, slots=True)
class RoundError:
    """The error of an iteration's energy under the clocks of a round, and that energy.

    `error_j` is None if an error was not reported. `time_share`: the largest error of a time, as its share.
    """

    error_j: float | None
    energy_j: float
    time_share: float = 0.0


def effective_count(iteration_count: int, iteration_time_s: float) -> float:
    """Return as how many iterations so many of this time count."""
    return iteration_count * min(1.0, iteration_time_s / _WHOLE_ITERATION_S)


class SampleAllocation:
    """Spreads iterations over the clocks of a job."""

    def __init__(self, iterations: int, accuracy: float, time_accuracy: float) -> None:
        """Create an allocation.

        Args:
            iterations: at a clock as noisy as the others.
            accuracy: the share by which energy may be off.
            time_accuracy: a time's standard error, as its share, up to which plans can be made.
        """
        self._iterations = iterations
        self._accuracy = accuracy
        self._time_accuracy = time_accuracy
        # The noise of each finished round: the error of a single iteration, in joules.
        self._noises_j: list[float] = []

    @property
    def min_iterations(self) -> int:
        """The fewest iterations that a clock is held for."""
        return min(MIN_ITERATIONS, self._iterations)

    def is_enough(self, iteration_count: float, found: RoundError) -> bool:
        """Tell whether a round is accurate enough after `iteration_count` iterations."""
        if found.error_j is None:
            return iteration_count >= self._iterations
        if iteration_count >= MAX_HOLD_FACTOR * self._iterations:
            return True
        if found.time_share > self._time_accuracy:
            return False
        if found.error_j <= _NEGLIGIBLE_SHARE * self._accuracy * found.energy_j:
            return True
        if not self._noises_j:
            return iteration_count >= self._iterations
        usual_j = math.fsum(self._noises_j) / len(self._noises_j)
        return iteration_count * usual_j >= self._iterations * found.error_j * math.sqrt(iteration_count)

    def take_round(self, iteration_count: float, found: RoundError) -> None:
        """Remember the noise of a round, unless it has no error or none that counts."""
        if found.error_j:
            self._noises_j.append(found.error_j * math.sqrt(iteration_count))

    def restart(self) -> None:
        """Discard the noise of earlier rounds."""
        self._noises_j.clear()


def round_error(
    found: Iterable[StageProfile], measured: Sequence[StageProfile], schedule: Schedule
) -> RoundError:
    """Return the error of a round's measurements so far, given the earlier measurements."""
    found = tuple(found)
    powers_w = blocking_power_w([*measured, *found], schedule.stage_count)
    errors_j: list[float] = []
    energies_j: list[float] = []
    shares: list[float] = []
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
            shares.append(m.time_se_s / m.time_s)
            has_errors = has_errors and m.energy_se_j > 0 and m.time_se_s > 0
            if not _is_surely_useless(m, before.get(key, []), power_w):
                errors_j.append(count * _error_j(m))
    error_j = math.hypot(*errors_j) if has_errors else None
    return RoundError(error_j, math.fsum(energies_j), max(shares, default=0.0))


def _error_j(m: Measurement) -> float:
    """Return the error of an energy, including the energy equivalent of the error in time."""
    return math.hypot(m.energy_se_j, m.energy_j / m.time_s * m.time_se_s)


def _is_surely_useless(m: Measurement, others: Iterable[Measurement], power_w: float) -> bool:
    """Tell whether a clock's point lies above the hull of the others beyond all errors."""
    hull = lower_hull([effective_point(other, power_w) for other in others])
    if not hull or m.time_s - _SURE_ERRORS * m.time_se_s <= hull[0].time_s:
        return False
    point = effective_point(m, power_w)
    error_j = math.hypot(_error_j(m), max(other.error_j for other in hull))
    return point.energy_j - height_j(hull, point.time_s) > _SURE_ERRORS * error_j
