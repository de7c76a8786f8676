"""Merged measurements, blocking power, and when a sweep has seen enough."""

from dataclasses import replace

import pytest
from service_fakes import BLOCKING_POWER_W, energy_j, estimate, time_s

from perseus.service.profiling import ClockProfile, blocking_power_w, has_swept_enough, is_measured, merge
from perseus.service.specification import Coordinates, Parallelism
from perseus.service.telemetry import EnergyEstimate
from perseus.solver import Kind, Measurement, one_forward_one_backward

SCHEDULE = one_forward_one_backward(2, 2)
SHAPE = Parallelism(2, 2, 2)


def estimates(clock_mhz: int) -> dict[Coordinates, EnergyEstimate]:
    return {
        place: estimate(SCHEDULE.orders[place.stage], 1, 3, clock_mhz) for place in SHAPE.all_coordinates()
    }


def scaled(some: EnergyEstimate, time: float, energy: float) -> EnergyEstimate:
    samples = (replace(s, time_s=s.time_s * time, energy_j=s.energy_j * energy) for s in some.samples)
    return replace(some, samples=tuple(samples))


def test_time_is_that_of_the_slowest_tensor_rank_and_energy_their_sum_averaged_over_pipelines() -> None:
    found = estimates(1200)
    found[Coordinates(0, 1, 1)] = scaled(found[Coordinates(0, 1, 1)], time=1.5, energy=3.0)
    profile = merge(1200, found, SHAPE, SCHEDULE)
    measured = profile.measurements[1, 0, Kind.BACKWARD]
    assert measured.time_s == pytest.approx(1.25 * time_s(1, Kind.BACKWARD, 1200))
    assert measured.energy_j == pytest.approx((4 + 2) / 2 * energy_j(1, Kind.BACKWARD, 1200))
    assert profile.measurements[0, 0, Kind.FORWARD].time_s == pytest.approx(time_s(0, Kind.FORWARD, 1200))


def test_blocking_power_is_the_mean_of_the_ranks_that_tell_it() -> None:
    found = estimates(1200)
    for place in (Coordinates(0, 0, 0), Coordinates(1, 0, 0)):
        found[place] = replace(found[place], blocking_power_w=0.0, blocking_power_se_w=0.0)
    assert merge(1200, found, SHAPE, SCHEDULE).blocking_power_w == pytest.approx((2 * BLOCKING_POWER_W,) * 2)


def with_powers(powers_w: tuple[float, ...], errors_w: tuple[float, ...]) -> ClockProfile:
    return ClockProfile(1000, {}, powers_w, errors_w)


def test_over_the_clocks_blocking_power_is_weighted_by_its_certainty() -> None:
    profiles = [with_powers((100.0, 80.0), (1.0, 0.0)), with_powers((110.0, 90.0), (3.0, 1.0))]
    assert blocking_power_w(profiles) == pytest.approx((101.0, 85.0))


def test_a_stage_that_never_waits_gets_the_mean_of_the_others() -> None:
    profiles = [with_powers((100.0, 80.0, 0.0), (1.0, 1.0, 0.0))]
    assert blocking_power_w(profiles) == pytest.approx((100.0, 80.0, 90.0))
    assert blocking_power_w([with_powers((0.0, 0.0), (0.0, 0.0))]) == (0.0, 0.0)


def test_an_estimate_with_impossible_energy_is_not_a_measurement_yet() -> None:
    order = SCHEDULE.orders[0]
    good = estimate(order, 1, 3, 1200)
    assert is_measured(good, order, 1200, 3)
    assert not is_measured(good, order, 1200, 4)
    assert not is_measured(good, order, 1300, 3)
    assert not is_measured(scaled(good, time=1.0, energy=-1.0), order, 1200, 3)


def test_a_sweep_ends_when_every_stage_has_risen_three_times_in_a_row() -> None:
    def profile(clock_mhz: int, first_j: float, second_j: float) -> ClockProfile:
        energies_j = {0: first_j, 1: second_j}
        measurements = {
            (stage, 0, kind): Measurement(clock_mhz, 0.1, energies_j[stage])
            for stage in (0, 1)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        }
        return ClockProfile(clock_mhz, measurements, (10.0, 10.0), (1.0, 1.0))

    sweep = [profile(1000 - 10 * n, 20 + max(0, n - 1), 20 + max(0, n - 3)) for n in range(9)]
    ends = [n for n in range(len(sweep) + 1) if has_swept_enough(sweep[:n], SCHEDULE)]
    # The second stage's energy is at its least until the fourth clock, and has risen thrice at the seventh.
    assert ends == [7, 8, 9]
