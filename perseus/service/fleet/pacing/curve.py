"""The paces of a job, read off its frontier: what it takes and draws at each."""

from perseus.service.domain.job_pacing import PacingBasis
from perseus.service.fleet.pacing.spending import Pace, SpeedCurve


def speed_curve(basis: PacingBasis) -> SpeedCurve:
    """Return the paces of a job that is not slower than stock at its fastest; one pipeline's power.

    What an iteration holds beyond computations is spent at blocking power.
    """
    frontier, full_s = basis.frontier, basis.full_time_s
    rows = [(full_s, frontier.plan_within(full_s).energy_until_j(full_s))]
    rows += [(p.iteration_time_s, p.energy_j) for p in frontier.points if p.iteration_time_s > full_s]
    blocking_w = sum(frontier.pipeline.blocking_power_w)
    paces = []
    for pace_s, energy_j in rows:
        iteration_s = pace_s + basis.overhead_s
        energy_j += blocking_w * basis.overhead_s
        paces.append(Pace(pace_s, 1 / iteration_s, energy_j / iteration_s))
    return SpeedCurve(paces)
