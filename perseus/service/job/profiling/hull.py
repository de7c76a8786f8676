"""Lower hulls of the cost of a stage's computation at its measured clocks. Pure."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from perseus.solver import Measurement


@dataclass(frozen=True, slots=True)
class Point:
    """Time and effective energy, with the energy's standard error."""

    time_s: float
    energy_j: float
    error_j: float


def effective_point(m: Measurement, blocking_power_w: float) -> Point:
    """Return a measurement's time and its energy beyond waiting for as long."""
    return Point(m.time_s, m.energy_j - blocking_power_w * m.time_s, m.energy_se_j)


def lower_hull(points: Sequence[Point]) -> list[Point]:
    """Return the falling lower convex hull; it leaves out points that are both slower and costlier."""
    vertices: list[Point] = []
    for point in sorted(points, key=lambda point: (point.time_s, point.energy_j)):
        if vertices and (point.energy_j >= vertices[-1].energy_j or point.time_s == vertices[-1].time_s):
            continue
        while len(vertices) >= 2 and slope_w(vertices[-1], point) <= slope_w(vertices[-2], vertices[-1]):
            vertices.pop()
        vertices.append(point)
    return vertices


def height_j(hull: Sequence[Point], time_s: float) -> float:
    """Return the hull's effective energy at a time, flat beyond its ends."""
    if time_s <= hull[0].time_s:
        return hull[0].energy_j
    if time_s >= hull[-1].time_s:
        return hull[-1].energy_j
    right = bisect_right(hull, time_s, key=lambda point: point.time_s)
    before, after = hull[right - 1], hull[right]
    return before.energy_j + slope_w(before, after) * (time_s - before.time_s)


def slope_w(before: Point, after: Point) -> float:
    """Return the change in energy per second between two points of different times."""
    return (after.energy_j - before.energy_j) / (after.time_s - before.time_s)
