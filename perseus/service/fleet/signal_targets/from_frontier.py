"""A job's speed curve, read off its frontier: iteration time and power of each point."""

from perseus.service.domain.job_signal import SpeedCurveBasis
from perseus.service.fleet.signal_targets.speed_curve import SpeedCurve, SpeedPoint


def speed_curve(basis: SpeedCurveBasis) -> SpeedCurve:
    """Return a job's speed curve, from no slowdown on; powers are one pipeline's.

    The time in an iteration outside computations is spent at stock's blocking power.
    """
    frontier, full_s = basis.frontier, basis.full_time_s
    rows = [(full_s, frontier.plan_within(full_s).energy_until_j(full_s))]
    rows += [(p.iteration_time_s, p.energy_j) for p in frontier.points if p.iteration_time_s > full_s]
    blocking_w = frontier.baseline.blocking_power_w
    points = []
    for time_s, energy_j in rows:
        iteration_s = time_s + basis.overhead_s
        energy_j += blocking_w * basis.overhead_s
        points.append(SpeedPoint(time_s, 1 / iteration_s, energy_j / iteration_s))
    return SpeedCurve(points)
