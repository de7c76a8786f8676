"""The demands of the jobs on the feeds: the input of an allocation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from perseus.service.domain.bounds import check_range
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.power import MAX_FEED_POWER_W
from perseus.service.domain.specification import MAX_WEIGHT, MIN_WEIGHT


@dataclass(frozen=True, slots=True)
class PowerPoint:
    """An operating point of a job under its plans.

    Attributes:
        iteration_time_s: the target iteration time, on the frontier's scale.
        speed: iterations per second, relative to the job without budgets; 1 is no slowdown.
        power_w: mean over an iteration, per feed that the job's GPUs are on.
        highest_clock_mhz: of all its plans' computations; 0 if unknown.
    """

    iteration_time_s: float
    speed: float
    power_w: Mapping[str, float]
    highest_clock_mhz: int = 0


@dataclass(frozen=True, slots=True)
class JobDemand:
    """One job, as an allocation sees it.

    Attributes:
        job_id: its identifier.
        points: its operating points, fastest first; none if it has no plans (while its baseline is measured
            or it is profiled, at stock, or quarantined).
        measured_w: its power on each feed if it has no points.
        tolerance_percent: the largest share of its speed that its owner lets a budget take.
        weight: the cost of its lost speed, relative to other jobs.
        paused_power_w: its power on each feed if it were paused: idle GPUs draw power, too.
        highest_clock_mhz: of its GPUs; 0 if unknown.

    Raises:
        InvalidFieldError: a figure is out of range, points are out of order, or some are on different feeds.
    """

    job_id: str
    points: tuple[PowerPoint, ...] = ()
    measured_w: Mapping[str, float] = field(default_factory=dict)
    tolerance_percent: float = 100.0
    weight: float = 1.0
    paused_power_w: Mapping[str, float] = field(default_factory=dict)
    highest_clock_mhz: int = 0

    def __post_init__(self) -> None:
        check_range("tolerance_percent", self.tolerance_percent, 0, 100)
        check_range("weight", self.weight, MIN_WEIGHT, MAX_WEIGHT)
        for name, powers_w in (("measured_w", self.measured_w), ("paused_power_w", self.paused_power_w)):
            for feed, power_w in powers_w.items():
                check_range(f"{name}[{feed}]", power_w, 0, MAX_FEED_POWER_W)
        before = math.inf
        for index, point in enumerate(self.points):
            check_range(f"points[{index}].speed", point.speed, 0, before)
            before = point.speed
            if point.power_w.keys() != self.points[0].power_w.keys():
                raise InvalidFieldError(
                    field=f"points[{index}].power_w",
                    expected=f"the feeds {', '.join(sorted(self.points[0].power_w))}",
                    found=", ".join(sorted(point.power_w)),
                )
            for feed, power_w in point.power_w.items():
                check_range(f"points[{index}].power_w[{feed}]", power_w, 0, MAX_FEED_POWER_W)

    @property
    def min_speed(self) -> float:
        """The lowest speed that its owner allows."""
        return 1 - self.tolerance_percent / 100

    @property
    def allowed(self) -> tuple[PowerPoint, ...]:
        """The points within the tolerance; the fastest if none is."""
        # Speeds are ratios of times: one that is exactly at the tolerance may be off by rounding.
        kept = tuple(point for point in self.points if point.speed >= self.min_speed - 1e-12)
        return kept or self.points[:1]

    @property
    def is_beyond_tolerance(self) -> bool:
        """Whether even its fastest plan is slower than its owner allows."""
        return bool(self.points) and self.points[0].speed < self.min_speed - 1e-12
