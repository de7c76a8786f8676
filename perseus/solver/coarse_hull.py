"""Hulls with round slopes, so that the frontier has fewer pieces.

The frontier's slope is a sum of computations' slopes, and it has about as many pieces as there are different
sums: thousands, where every stage has its own slopes. So straight lines below a hull replace it. Their slopes
are multiples of powers of two, and each line touches the hull at a vertex: sums of such slopes coincide.
Between two neighbouring lines the result is lower than the hull, by at most the tolerance; each piece of the
hull gets the roundest slopes that the tolerance allows. The hull's ends stay where they are, and so do T_min,
T_slow, and the energy at T_slow.

All arithmetic is in integers (picoseconds, microwatts, and their product, 1e-18 J).
"""

from bisect import bisect_left
from itertools import accumulate, pairwise
from typing import NamedTuple

from perseus.solver.profile import Hull
from perseus.solver.scale import PS_PER_SCALED_S, UW_PER_W


class _Line(NamedTuple):
    """Touches the hull at a vertex from below; ``at_start`` is its height where time is 0."""

    slope_uw: int
    at_start: int


def coarse_hull(hull: Hull, tolerance_j: float) -> Hull:
    """Return a hull of rounder slopes below this one, nowhere by more than ``tolerance_j``."""
    tolerance = int(tolerance_j * PS_PER_SCALED_S * UW_PER_W)
    if not tolerance or not hull.slopes_uw:
        return hull
    # Take two slopes q apart, one on either side of the piece's own slope, with lines through the piece's
    # ends. The gap between the piece and these lines is at most a quarter of q × the piece's length.
    grains_uw = [4 * tolerance // (slow - fast) for fast, slow in pairwise(hull.times_ps)]
    # A last slope of 0 would shorten T_slow.
    exponents = [min(grain_uw, hull.slopes_uw[-1]).bit_length() - 1 for grain_uw in grains_uw]
    while True:
        coarse = _with_slopes(hull, _round_slopes_uw(hull.slopes_uw, exponents))
        if max(exponents) <= 0 or _largest_gap(hull, coarse) <= tolerance:
            return coarse
        exponents = [exponent - 1 for exponent in exponents]


def _round_slopes_uw(slopes_uw: tuple[int, ...], exponents: list[int]) -> list[int]:
    """Return the multiples of each piece's power of two next to its slope on both sides, falling."""
    found: set[int] = set()
    for slope_uw, exponent in zip(slopes_uw, exponents, strict=True):
        grain_uw = 1 << max(0, exponent)
        found.update((slope_uw // grain_uw * grain_uw, -(-slope_uw // grain_uw) * grain_uw))
    return sorted(found, reverse=True)


def _with_slopes(hull: Hull, slopes_uw: list[int]) -> Hull:
    """Return the highest hull below this one with only these slopes, to the picosecond."""
    heights = _heights(hull)
    falling = [-slope_uw for slope_uw in hull.slopes_uw]
    lines: list[_Line] = []
    for slope_uw in (*slopes_uw, 0):
        vertex = bisect_left(falling, -slope_uw)
        lines.append(_Line(slope_uw, heights[vertex] + slope_uw * hull.times_ps[vertex]))
    times_ps, kept_uw = [hull.times_ps[0]], []
    for steep, flat in pairwise(lines):
        # Rounded down: the steeper piece ends slightly sooner and lies slightly lower than it could.
        crossing_ps = (steep.at_start - flat.at_start) // (steep.slope_uw - flat.slope_uw)
        if crossing_ps > times_ps[-1]:
            times_ps.append(crossing_ps)
            kept_uw.append(steep.slope_uw)
    return Hull(tuple(times_ps), tuple(kept_uw), hull.slowest_effective_energy_j)


def _largest_gap(hull: Hull, coarse: Hull) -> int:
    """Return the largest gap between the hulls, which is at a vertex of the coarse one."""
    heights, maximum, piece = _heights(hull), 0, 0
    for time_ps, coarse_height in zip(coarse.times_ps, _heights(coarse), strict=True):
        while hull.times_ps[piece + 1] < time_ps:
            piece += 1
        height = heights[piece] - hull.slopes_uw[piece] * (time_ps - hull.times_ps[piece])
        maximum = max(maximum, height - coarse_height)
    return maximum


def _heights(hull: Hull) -> list[int]:
    """Return each vertex's height above the last."""
    pieces = zip(pairwise(hull.times_ps), hull.slopes_uw, strict=True)
    steps = [slope_uw * (slow - fast) for (fast, slow), slope_uw in pieces]
    return [*accumulate(reversed(steps), initial=0)][::-1]
