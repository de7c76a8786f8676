"""The paces of a job, read off its frontier: what it takes and draws at each."""

from perseus.service.domain.job_signal import SpeedCurveBasis
from perseus.service.fleet.signal_targets.speed_curve import SpeedCurve, SpeedPoint


def speed_curve(basis: SpeedCurveBasis) -> SpeedCurve:
    """Return the paces of a job that is not slower than stock at its fastest; one pipeline's power.

    What an iteration holds beyond computations is spent at blocking power.
    """
    frontier, full_s = basis.frontier, basis.full_time_s
    rows = [(full_s, frontier.plan_within(full_s).energy_until_j(full_s))]
    rows += [(p.iteration_time_s, p.energy_j) for p in frontier.points if p.iteration_time_s > full_s]
    blocking_w = sum(frontier.pipeline.blocking_power_w)
    points = []
    for time_s, energy_j in rows:
        iteration_s = time_s + basis.overhead_s
        energy_j += blocking_w * basis.overhead_s
        points.append(SpeedPoint(time_s, 1 / iteration_s, energy_j / iteration_s))
    return SpeedCurve(points)
