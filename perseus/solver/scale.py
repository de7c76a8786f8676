"""The solver's own units: those that fit a problem's figures.

Sums of whole picoseconds and whole microwatts are exact in doubles, and precise enough for iterations of a
few seconds on GPUs of a few hundred watts. Microsecond kernels, or pods of megawatts, are solved as problems
of that size: times and energies are scaled before, and scaled back after. So a solution does not depend on
the units of its figures, and figures at all accepted bounds are solved alike.

Effective energies are multiples of a unit, so that their sums are exact, too. Two plans in which the same
computations run at the same clocks in another order cost exactly the same, and the first one is taken:
rounding in a sum, which depends on the order, never chooses.

The names of scaled figures are those of picoseconds, microwatts and joules. Everything in
:mod:`perseus.solver.graph` is scaled, and so is what is laid out or chosen from it. Pipelines, plans and
frontiers have real seconds and joules.
"""

import math
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

FloatOrArray = TypeVar("FloatOrArray", float, NDArray[np.float64])

PS_PER_SCALED_S = 10**12
UW_PER_W = 10**6

_TOTAL_DIGITS = 15
"""Decimal digits of the total time in ps: the largest number that survives division and multiplication by
``ps_per_s`` exactly, in doubles of 53 bits."""

_LOG2_TOTAL_UNITS = 50
"""Effective energy of all computations in units, at most: a minimum cut adds up four of these, below 2^53."""

_TO_NEAREST = 1.5 * 2.0**52
"""Added to a smaller number and subtracted again, this rounds it to a whole one, in Python and in NumPy."""

_LOG2_MEAN_FLOW_UW = 43
"""Computations × mean slope, where slopes differ as usual. The total flow must be below 2^53 and may be four
times the sum of the steepest slopes (`perseus.solver.graph.steepest_exact_uw`): so these may be 256 times as
steep as the mean."""

_LOG2_LEAST_MEAN_UW = 24
"""The mean slope at least, where some are steeper than that. Rounding slopes down to whole microwatts costs
at most the inverse as a share of the energy that can be saved. Slopes too steep even so are limited."""


class Scale(NamedTuple):
    """Conversions to scaled units. Without arguments, units stay what they are.

    Attributes:
        ps_per_s: scaled picoseconds per second: a power of ten, so that decimals remain whole.
        energy: scaled joules per joule: a power of two, so that scaling rounds nothing.
        unit_j: the unit of effective energies, in joules: a power of two, or 0 to leave them as they are.
    """

    ps_per_s: float = 1e12
    energy: float = 1.0
    unit_j: float = 0.0

    def to_ps(self, time_s: float) -> int:
        """Round seconds to whole scaled picoseconds."""
        return round(time_s * self.ps_per_s)

    def to_s(self, time_ps: int) -> float:
        """Return scaled picoseconds in seconds."""
        return time_ps / self.ps_per_s

    def in_units_j(self, energy_j: FloatOrArray) -> FloatOrArray:
        """Round effective energies, in joules, to multiples of the unit."""
        return energy_j + _TO_NEAREST * self.unit_j - _TO_NEAREST * self.unit_j

    @property
    def power(self) -> float:
        """Scaled watts per watt."""
        return self.energy * (PS_PER_SCALED_S / self.ps_per_s)


class Range(NamedTuple):
    """What computations can save, all together.

    Attributes:
        time_s: how much shorter they are at their fastest.
        energy_j: how much effective energy they save at their slowest.
        steepest_w: the sum of their steepest savings per second.
        total_j: the sum of their largest effective energies, without signs.
        computation_count: how many they are.
    """

    time_s: float
    energy_j: float
    steepest_w: float
    total_j: float
    computation_count: int


def fitting_scale(total_s: float, all_of: Range) -> Scale:
    """Return the scale for a problem.

    ``total_s`` is the time of all its computations and lags, one after the other, at their slowest.
    """
    digits = math.floor(math.log10(total_s)) + 1 if total_s else 0
    ps_per_s = float(f"1e{_TOTAL_DIGITS - digits}")
    unit_j = math.ldexp(1.0, math.frexp(all_of.total_j)[1] - _LOG2_TOTAL_UNITS)
    if not (all_of.time_s > 0 and all_of.energy_j > 0):
        return Scale(ps_per_s, unit_j=unit_j)
    uw_per_w = UW_PER_W * (PS_PER_SCALED_S / ps_per_s)
    mean_uw, steepest_uw = uw_per_w * (all_of.energy_j / all_of.time_s), uw_per_w * all_of.steepest_w
    usual = _LOG2_MEAN_FLOW_UW - math.floor(math.log2(mean_uw * all_of.computation_count))
    least = _LOG2_LEAST_MEAN_UW - math.floor(math.log2(mean_uw))
    # Twice the flow, as coarse hulls may be twice as steep; and log2 is rounded down.
    fitting = 53 - 4 - math.floor(math.log2(steepest_uw))
    return Scale(ps_per_s, math.ldexp(1.0, min(usual, max(fitting, least))), unit_j)
