"""Prepare raw measurements for planning: merge repeated clocks, fill in missing ones.

Nothing is fitted to a family of curves. Repeated measurements of a clock become their mean; a clock between
two measured ones may be interpolated, and is marked as such.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from perseus.solver.errors import ProfileError
from perseus.solver.profile import Measurement, refuse_further
from perseus.solver.setting import Setting, in_order


def merge_measurements(measurements: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """Return one measurement per clock (or setting), by rising clock.

    Times and energies are averaged, weighted by the inverse of their variance where every measurement of the
    clock has a standard error, else unweighted. The mean's standard error follows from these; where none is
    known it comes from the scatter of the repetitions. Measured clocks replace interpolated ones.
    """
    by_setting: dict[int | Setting, list[Measurement]] = {}
    for m in measurements:
        by_setting.setdefault(m.setting, []).append(m)
    return tuple(_merge(by_setting[setting]) for setting in sorted(by_setting, key=in_order))


def interpolate_clocks(
    measurements: Sequence[Measurement], clocks_mhz: Iterable[int]
) -> tuple[Measurement, ...]:
    """Return the measurements, by rising clock, with these clocks added where they were not measured.

    Time and energy are linear in the cycle time (1 / clock) between the two nearest clocks.

    Raises:
        ProfileError: a clock is measured twice, or a wanted one lies outside the measured ones; or there are
            settings of more than a clock, between which nothing can be interpolated.
    """
    refuse_further(measurements, "to interpolate between")
    measured = sorted(measurements, key=lambda m: m.clock_mhz)
    for lower, higher in pairwise(measured):
        if lower.clock_mhz == higher.clock_mhz:
            raise ProfileError(
                f"expected one measurement per clock, found several at {lower.clock_mhz} MHz",
                clock_mhz=lower.clock_mhz,
            )
    known_mhz = [m.clock_mhz for m in measured]
    added = []
    for clock_mhz in sorted(set(clocks_mhz) - {*known_mhz}):
        above = next((k for k, known in enumerate(known_mhz) if known > clock_mhz), 0)
        if above == 0:
            between = (
                f"{known_mhz[0]} to {known_mhz[-1]} MHz" if known_mhz else "measured ones, of which none"
            )
            raise ProfileError(
                f"expected a clock between the measured ones, {between}, found {clock_mhz} MHz",
                clock_mhz=clock_mhz,
            )
        added.append(_interpolate(measured[above - 1], measured[above], clock_mhz))
    return tuple(sorted([*measured, *added], key=lambda m: m.clock_mhz))


def _merge(repeated: list[Measurement]) -> Measurement:
    measured = [m for m in repeated if not m.interpolated] or repeated
    if len(measured) == 1:
        return measured[0]
    time_s, time_se_s = _mean([(m.time_s, m.time_se_s) for m in measured])
    energy_j, energy_se_j = _mean([(m.energy_j, m.energy_se_j) for m in measured])
    common_se_s = max(m.time_common_se_s for m in measured)  # it does not average out
    return replace(
        measured[0],
        time_s=time_s,
        energy_j=energy_j,
        time_se_s=max(time_se_s, common_se_s),
        energy_se_j=energy_se_j,
        time_common_se_s=common_se_s,
    )


def _mean(figures: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean of (value, standard error) figures, and its standard error."""
    count = len(figures)
    if all(error > 0 for _, error in figures):
        # Relative to the smallest error, so that no square overflows or underflows.
        minimum = min(error for _, error in figures)
        weights = [(minimum / error) ** 2 for _, error in figures]
        total = math.fsum(weights)
        mean = math.fsum(w * value for w, (value, _) in zip(weights, figures, strict=True)) / total
        return mean, minimum / math.sqrt(total)
    mean = math.fsum(value for value, _ in figures) / count
    scatter = math.fsum((value - mean) ** 2 for value, _ in figures)
    return mean, math.sqrt(scatter / (count - 1) / count)


def _interpolate(lower: Measurement, higher: Measurement, clock_mhz: int) -> Measurement:
    share = (1 / lower.clock_mhz - 1 / clock_mhz) / (1 / lower.clock_mhz - 1 / higher.clock_mhz)

    def at(figure: Callable[[Measurement], float]) -> float:
        return (1 - share) * figure(lower) + share * figure(higher)

    return Measurement(
        clock_mhz,
        at(lambda m: m.time_s),
        at(lambda m: m.energy_j),
        # Shrunk neighbours have nearly the same error, which doesn't average out.
        at(lambda m: m.time_se_s),
        at(lambda m: m.energy_se_j),
        interpolated=True,
        time_common_se_s=at(lambda m: m.time_common_se_s),
    )
