"""A small frontier with FIXED computations."""

from perseus.solver import Computation, Frontier, Kind, Measurement, Pipeline, Schedule, solve
from tests.service.service_fakes import CLOCKS_MHZ, energy_j, time_s


def make_frontier(fixed_s: float) -> Frontier:
    def order(stage: int) -> tuple[Computation, ...]:
        middle = [Computation(stage, kind, m) for m in range(3) for kind in (Kind.FORWARD, Kind.BACKWARD)]
        return (Computation(stage, Kind.FIXED, 0), *middle, Computation(stage, Kind.FIXED, 1))

    schedule = Schedule((order(0), order(1)))
    profiles = {
        (stage, 0, kind): tuple(
            Measurement(clock, time_s(stage, kind, clock), energy_j(stage, kind, clock))
            for clock in CLOCKS_MHZ
        )
        for stage in range(2)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    fixed = {c: fixed_s for c in schedule.computations if c.kind is Kind.FIXED}
    return solve(Pipeline(schedule, profiles, (60.0, 60.0), fixed_times_s=fixed), point_count=8)


FRONTIER = make_frontier(0.01)
