"""Merged measurements, blocking power, interpolation and correction."""

from dataclasses import replace

import pytest

from perseus.service.domain.measured import StageProfile
from perseus.service.domain.profiling import ClockGivenUpReason
from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.domain.telemetry import EnergyEstimate
from perseus.service.job.profiling.stage_profiles import (
    agree,
    blocking_power_w,
    blocking_powers_w,
    build_problem,
    corrected,
    interpolate,
    is_power_known,
    merge,
    why_not_measured,
)
from perseus.solver import Kind, Measurement, Pipeline, one_forward_one_backward, read_profile_csv, solve
from tests.published_data import PUBLISHED_DATA
from tests.service.service_fakes import BLOCKING_POWER_W, energy_j, estimate, time_s

SCHEDULE = one_forward_one_backward(2, 2)
SHAPE = Parallelism(2, 2, 2)
KINDS = (Kind.FORWARD, Kind.BACKWARD)


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
    profile = merge(1, 1200, found, SHAPE, range(2), 1200)
    measured = profile.measurements[0, Kind.BACKWARD]
    assert measured.time_s == pytest.approx(1.25 * time_s(1, Kind.BACKWARD, 1200))
    assert measured.energy_j == pytest.approx((4 + 2) / 2 * energy_j(1, Kind.BACKWARD, 1200))
    healthy = merge(1, 1200, found, SHAPE, [1], 1200)
    assert healthy.measurements[0, Kind.BACKWARD].time_s == pytest.approx(time_s(1, Kind.BACKWARD, 1200))


def test_blocking_power_is_the_mean_of_the_ranks_that_report_it() -> None:
    found = estimates(1200)
    for place in (Coordinates(0, 0, 0), Coordinates(1, 0, 0)):
        found[place] = replace(found[place], blocking_power_w=None, blocking_power_se_w=0.0)
    assert merge(0, 1200, found, SHAPE, range(2), 1200).blocking_power_w == pytest.approx(
        2 * BLOCKING_POWER_W
    )


@pytest.mark.parametrize(
    ("reported", "powers_w"),
    [
        pytest.param([(0, 100.0, 1.0), (0, 110.0, 3.0)], (101.0,), id="weighted by certainty"),
        pytest.param([(0, 80.0, 0.0), (0, 90.0, 1.0)], (85.0,), id="one without an error"),
        pytest.param([(0, 100.0, 1e-200), (0, 110.0, 1e-6)], (105.0,), id="tiny errors weigh only so much"),
        pytest.param(
            [(0, 100.0, 1.0), (1, 80.0, 1.0), (2, None, 0.0)],
            (100.0, 80.0, 90.0),
            id="a stage that never waits gets the mean of the others",
        ),
    ],
)
def test_blocking_power_is_the_mean_over_the_clocks(
    reported: list[tuple[int, float | None, float]], powers_w: tuple[float, ...]
) -> None:
    profiles = [StageProfile(stage, 1000, {}, power_w, error_w) for stage, power_w, error_w in reported]
    assert blocking_power_w(profiles, len(powers_w)) == pytest.approx(powers_w)


def test_blocking_power_is_known_by_clock_and_a_stage_that_never_waits_gets_the_mean_of_the_others() -> None:
    measured = [
        StageProfile(stage, mhz, {}, power_w, 0.1)
        for stage, *powers_w in ((0, 72.0, 70.0, 84.0), (1, 74.0, None, 80.0), (2, None, None, None))
        for mhz, power_w in zip((700, 900, 1400), powers_w, strict=True)
    ]
    rising, sparse, usual = blocking_powers_w(measured, 3)
    assert rising == pytest.approx({700: 71.0, 900: 71.0, 1400: 84.0}, rel=1e-3), "errors average out"
    assert sparse == pytest.approx({700: 74.0, 1400: 80.0}, rel=1e-3)
    assert usual == pytest.approx({700: 72.5, 900: (71 + 74 + 6 * 2 / 7) / 2, 1400: 82.0}, rel=1e-3)


def test_an_uncertain_blocking_power_is_drawn_to_the_mean_of_all_clocks() -> None:
    measured = [StageProfile(0, 1400, {}, 80.0, 0.1), StageProfile(0, 700, {}, 40.0, 30.0)]
    (by_clock,) = blocking_powers_w(measured, 1)
    assert 75 < by_clock[700] < by_clock[1400]
    assert by_clock[1400] == pytest.approx(80.0, rel=1e-3)


def test_a_problem_has_blocking_powers_by_clock_where_they_differ() -> None:
    found = [
        merge(stage, mhz, estimates(mhz), SHAPE, range(2), mhz) for stage in range(2) for mhz in (1000, 1400)
    ]
    assert build_problem(found, SCHEDULE, ((1400, 1000),) * 2).blocking_powers_w == ()
    found = [
        replace(profile, blocking_power_w=0.1 * profile.clock_mhz) if profile.stage else profile
        for profile in found
    ]
    problem = build_problem(found, SCHEDULE, ((1400, 1000),) * 2)
    at_stock_w, least_w = problem.stock_blocking_power_w[1], problem.blocking_power_w[1]
    assert (at_stock_w, least_w) == pytest.approx((140.0, 100.0), rel=1e-2)
    assert problem.blocking_power_w[0] == problem.stock_blocking_power_w[0]


def test_unreported_power_is_assumed_and_never_0() -> None:
    found = estimates(1200)
    unreported = {place: replace(one, blocking_power_w=None) for place, one in found.items()}
    profiles = [merge(stage, 1200, unreported, SHAPE, range(2), 1200) for stage in range(2)]
    assert [profile.blocking_power_w for profile in profiles] == [None, None]
    assert not is_power_known(profiles)
    min_w = [min(m.energy_j / m.time_s for m in some.measurements.values()) for some in profiles]
    assert blocking_power_w(profiles, 2) == pytest.approx([0.25 * power_w for power_w in min_w])
    known = [profiles[0], merge(1, 1200, found, SHAPE, range(2), 1200)]
    assert is_power_known(known)
    assert blocking_power_w(known, 2) == pytest.approx((2 * BLOCKING_POWER_W,) * 2)


@pytest.mark.parametrize(("gpu", "waiting_w"), [("a100-sxm", 83.64), ("a40", 70.38)])
@pytest.mark.slow("solves published problems three times")
def test_the_assumed_power_slows_less_than_the_measured_one_and_more_than_none(
    gpu: str, waiting_w: float
) -> None:
    """On the published profiles, the assumption is on the safe side, and better than 0 W."""
    path = PUBLISHED_DATA / "profiles" / f"gpt3-175b-{gpu}.csv"
    if not path.exists():
        pytest.skip(f"the published profiles are not at {PUBLISHED_DATA}")
    measured = read_profile_csv(path, 8)
    profiles = [
        StageProfile(
            stage,
            mhz,
            {
                (0, kind): next(m for m in measured[stage, 0, kind] if m.clock_mhz == mhz)
                for kind in (Kind.FORWARD, Kind.BACKWARD)
            },
            None,
            0.0,
        )
        for stage in range(8)
        for mhz in {m.clock_mhz for m in measured[0, 0, Kind.FORWARD]}
    ]
    schedule = one_forward_one_backward(8, 8)

    def t_slow_s(powers_w: tuple[float, ...]) -> float:
        return solve(Pipeline(schedule, measured, powers_w), point_count=3).t_slow_s

    assumed_w = blocking_power_w(profiles, 8)
    assert all(0 < power_w < 8 * waiting_w for power_w in assumed_w)
    without_s, assumed_s, measured_s = map(t_slow_s, ((0.0,) * 8, assumed_w, (8 * waiting_w,) * 8))
    assert without_s <= assumed_s <= measured_s


def test_an_estimate_with_impossible_energy_is_not_a_measurement_yet() -> None:
    order = SCHEDULE.orders[0]
    good = estimate(order, 1, 3, 1200)
    needed = {(each.kind, each.chunk) for each in order}
    assert why_not_measured(good, needed, 1200, 3) is None
    assert why_not_measured(None, needed, 1200, 3) is ClockGivenUpReason.NO_ESTIMATE
    more = needed | {(Kind.FIXED, 0)}
    for wanted, clock_mhz, count in ((needed, 1200, 4), (needed, 1300, 3), (more, 1200, 3)):
        incomplete = why_not_measured(good, wanted, clock_mhz, count)
        assert incomplete is ClockGivenUpReason.INCOMPLETE_ESTIMATE
    for energy in (-1.0, 0.0):
        found = scaled(good, time=1.0, energy=energy)
        assert why_not_measured(found, needed, 1200, 3) is ClockGivenUpReason.NO_ENERGY


def at(clock_mhz: int, time_s: float, energy_j: float) -> Measurement:
    return Measurement(clock_mhz, time_s, energy_j)


def test_between_clocks_time_is_linear_in_the_cycle_time() -> None:
    measured = [at(1000, 0.3, 30.0), at(2000, 0.2, 40.0)]
    between = interpolate(measured, 1500)
    # A fixed 0.1 s, and 0.2 s at 1000 MHz that shrinks with the clock.
    assert between.time_s == pytest.approx(0.1 + 0.2 / 1.5)
    assert 30.0 < between.energy_j < 40.0


def test_beyond_noisy_clocks_no_figure_falls_to_zero() -> None:
    measured = [Measurement(1000, 0.3, 0.2), Measurement(1300, 0.1, 1.0)]
    below, above = interpolate(measured, 900), interpolate(measured, 1800)
    assert below.energy_j == 0.2
    assert below.time_s == pytest.approx(0.396, abs=0.001)
    assert above.energy_j > 1.0
    assert above.time_s == 0.1


def test_the_problem_holds_interpolated_clocks_between_the_measured_ones_only() -> None:
    profiles = [
        StageProfile(stage, mhz, {(0, kind): at(mhz, 100 / mhz, 10.0) for kind in KINDS}, 5.0, 0.0)
        for stage in range(2)
        for mhz in (1000, 1400)
    ]
    problem = build_problem(profiles, SCHEDULE, [(1500, 1400, 1200, 1000, 900)] * 2)
    assert {m.clock_mhz for m in problem.profiles[1, 0, Kind.FORWARD]} == {1400, 1200, 1000}


def test_a_correction_replaces_updated_clocks_and_scales_the_rest() -> None:
    key = (0, Kind.FORWARD)
    profiles = [StageProfile(0, mhz, {key: at(mhz, 100 / mhz, 10.0)}, 5.0, 0.0) for mhz in (1000, 2000)]
    newer = corrected(profiles, {(0, 1500, key): 0.08})
    assert [profile.clock_mhz for profile in newer] == [1000, 1500, 2000]
    times_s = [profile.measurements[key].time_s for profile in newer]
    assert times_s == pytest.approx([0.12, 0.08, 0.06])
    assert newer[0].measurements[key].energy_j == pytest.approx(12.0)
    assert newer[0].blocking_power_w == 5.0


def test_profiles_agree_only_if_they_have_a_clock_in_common_and_all_figures_are_close() -> None:
    key = (0, Kind.FORWARD)

    def profile(mhz: int, time_s: float, energy_j: float) -> list[StageProfile]:
        return [StageProfile(0, mhz, {key: at(mhz, time_s, energy_j)}, 5.0, 0.0)]

    ours = profile(1000, 0.1, 10.0)
    assert agree(ours, profile(1000, 0.101, 10.5), 0.02, 0.1)
    assert not agree(ours, profile(1000, 0.103, 10.0), 0.02, 0.1)
    assert not agree(ours, profile(1000, 0.1, 12.0), 0.02, 0.1)
    assert not agree(ours, profile(1100, 0.1, 10.0), 0.02, 0.1)
